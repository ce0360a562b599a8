"""A fast port with a small service behind it, for the tests of both carriers."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tanghulu.auth.tenants import Right
from tanghulu.auth.tls import ServerTls
from tanghulu.errors import ChunkNotFound
from tanghulu.rpc.fast_port import FastPort
from tanghulu.rpc.fast_server import FastService, Later, Peer
from tanghulu.rpc.frames import HEAD
from tanghulu.rpc.methods import Method, Rule
from tanghulu.rpc.wire import FastMessage

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


class Ask(FastMessage, frozen=True):
    keys: Sequence[str]


class Answer(FastMessage, frozen=True):
    node_ids: Sequence[str] = ()


@dataclass
class Served:
    fast_port: FastPort
    service: FastService
    gate: asyncio.Event
    most_waiting: int = 0
    waiting: int = 0
    closed: int = 0
    later: list[Callable[[], None]] = field(default_factory=list)  # each sets one answer


def make_service(served: Served) -> None:
    def echo(peer: Peer, request: Ask, attachment: memoryview) -> Any:
        peer.on_close.append(lambda: setattr(served, "closed", served.closed + 1))
        return Answer(node_ids=request.keys), [attachment]

    async def slow(peer: Peer, request: Ask, attachment: memoryview) -> Any:
        served.waiting += 1
        served.most_waiting = max(served.most_waiting, served.waiting)
        try:
            await served.gate.wait()
        finally:
            served.waiting -= 1
        return Answer(node_ids=request.keys)

    def fail(peer: Peer, request: Ask, attachment: memoryview) -> Any:
        raise ChunkNotFound(f"no {request.keys[0]}")

    def broken(peer: Peer, request: Ask, attachment: memoryview) -> Any:
        raise ZeroDivisionError("a bug")

    async def slow_broken(peer: Peer, request: Ask, attachment: memoryview) -> Any:
        await asyncio.sleep(0)
        raise ZeroDivisionError("a bug")

    def bloat(peer: Peer, request: Ask, attachment: memoryview) -> Any:
        return Answer(), [bytes(65 << 20)]

    async def hang(peer: Peer, request: Ask, attachment: memoryview) -> Any:
        await asyncio.Event().wait()

    def later(peer: Peer, request: Ask, attachment: memoryview) -> Any:
        answer = Later()
        served.later.append(lambda: answer.set(Answer(node_ids=request.keys)))
        if "now" in request.keys:
            served.later.pop()()
        return answer

    handlers = {ECHO: echo, SLOW: slow, FAIL: fail, BROKEN: broken, SLOW_BROKEN: slow_broken, BLOAT: bloat, HANG: hang}
    handlers[LATER] = later
    for method, handler in handlers.items():
        served.service.register(Method(method, handler.__name__, Ask, Answer, READABLE), handler)


@asynccontextmanager
async def serving(tls: ServerTls | None = None) -> AsyncIterator[Served]:
    with tempfile.TemporaryDirectory(prefix="th-rpc-") as run_dir:
        service = FastService()
        fast_port = FastPort(service, Path(run_dir), "test", tls)
        made = Served(fast_port, service, asyncio.Event())
        make_service(made)
        await fast_port.start("127.0.0.1", 0)
        try:
            yield made
        finally:
            await fast_port.close(0.1)
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
