"""A port mux with a small service behind it, for the tests of both carriers."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tanghulu.auth.tenants import Right
from tanghulu.auth.tls import ServerTls
from tanghulu.errors import ChunkNotFound
from tanghulu.protos import directory_pb2 as pb
from tanghulu.protos import directory_pb2_grpc
from tanghulu.rpc.fast_server import FastService, Later, Peer
from tanghulu.rpc.frames import HEAD
from tanghulu.rpc.grpc_edge import abort
from tanghulu.rpc.methods import Method, Rule
from tanghulu.rpc.port_mux import PortMux

#: Of every method here, where tokens are asked for.
READABLE = Rule("echo", Right.READ)
ECHO = 13
SLOW = 10
FAIL = 16
BROKEN = 12
SLOW_BROKEN = 11
BLOAT = 14
HANG = 15
LATER = 31


@dataclass
class Served:
    port_mux: PortMux
    service: FastService
    gate: asyncio.Event
    most_waiting: int = 0
    waiting: int = 0
    closed: int = 0
    later: list[Callable[[], None]] = field(default_factory=list)  # each sets one answer


def make_service(served: Served) -> None:
    def echo(peer: Peer, request: pb.LocateRequest, attachment: memoryview) -> Any:
        peer.on_close.append(lambda: setattr(served, "closed", served.closed + 1))
        return pb.LocateReply(node_ids=request.keys), [attachment]

    async def slow(peer: Peer, request: pb.LocateRequest, attachment: memoryview) -> Any:
        served.waiting += 1
        served.most_waiting = max(served.most_waiting, served.waiting)
        try:
            await served.gate.wait()
        finally:
            served.waiting -= 1
        return pb.LocateReply(node_ids=request.keys)

    def fail(peer: Peer, request: pb.LocateRequest, attachment: memoryview) -> Any:
        raise ChunkNotFound(f"no {request.keys[0]}")

    def broken(peer: Peer, request: pb.LocateRequest, attachment: memoryview) -> Any:
        raise ZeroDivisionError("a bug")

    async def slow_broken(peer: Peer, request: pb.LocateRequest, attachment: memoryview) -> Any:
        await asyncio.sleep(0)
        raise ZeroDivisionError("a bug")

    def bloat(peer: Peer, request: pb.LocateRequest, attachment: memoryview) -> Any:
        return pb.LocateReply(), [bytes(65 << 20)]

    async def hang(peer: Peer, request: pb.LocateRequest, attachment: memoryview) -> Any:
        await asyncio.Event().wait()

    def later(peer: Peer, request: pb.LocateRequest, attachment: memoryview) -> Any:
        answer = Later()
        served.later.append(lambda: answer.set(pb.LocateReply(node_ids=request.keys)))
        if "now" in request.keys:
            served.later.pop()()
        return answer

    handlers = {ECHO: echo, SLOW: slow, FAIL: fail, BROKEN: broken, SLOW_BROKEN: slow_broken, BLOAT: bloat, HANG: hang}
    handlers[LATER] = later
    for method, handler in handlers.items():
        served.service.register(Method(method, handler.__name__, pb.LocateRequest, pb.LocateReply, READABLE), handler)


class Directory(directory_pb2_grpc.DirectoryServicer):
    async def Locate(self, request: pb.LocateRequest, context: Any) -> pb.LocateReply:
        if "missing" in request.keys:
            await abort(context, ChunkNotFound("no missing: ключ\nнет"))
        return pb.LocateReply(node_ids=request.keys)

    async def Events(self, request: pb.EventsRequest, context: Any) -> AsyncIterator[pb.EventBatch]:
        for number in range(200):
            yield pb.EventBatch(master_generation=number, events=[pb.DirectoryEvent(keys=["k" * 1000] * 100)])


@asynccontextmanager
async def serving(tls: ServerTls | None = None) -> AsyncIterator[Served]:
    with tempfile.TemporaryDirectory(prefix="th-rpc-") as run_dir:
        service = FastService()
        port_mux = PortMux(service, Path(run_dir), "test", tls=tls)
        made = Served(port_mux, service, asyncio.Event())
        make_service(made)
        directory_pb2_grpc.add_DirectoryServicer_to_server(Directory(), port_mux.grpc_server)
        await port_mux.start("127.0.0.1", 0)
        try:
            yield made
        finally:
            await port_mux.close(0.1)
            assert not service.peers
            assert not os.listdir(run_dir)


async def until(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - looks at the state of other tasks, which tell nobody
            await asyncio.sleep(0.001)


def head_of(data: bytes) -> tuple[int, int, int, int]:
    """(body length, attachment length, method, call id) of a frame."""
    body, attachment, method, _flags, call_id = HEAD.unpack(data)
    return body, attachment, method, call_id
