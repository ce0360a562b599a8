"""What carries a worker's card and probes in a simulated cluster, in the place of gRPC: messages over `Network`.

Sessions travel by the production's own fast lane. One call is one connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from unittest import mock

from tanghulu.conductor.dispatch import worker_session
from tanghulu.errors import DeadlineExceeded, NodeUnavailable, TanghuluError, error_from_code
from tanghulu.protos import session_pb2 as pb
from tanghulu.rpc import grpc_edge
from tanghulu.types import Address
from tests.virtual.loop import Pipe

DESCRIBE, PROBE = b"D", b"P"
_REPLY, _ERROR = b"R", b"E"


class Wire(asyncio.Protocol):
    """One connection, message by message."""

    def __init__(self) -> None:
        self.transport: Pipe | None = None
        self._came: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.broken: Exception | None = None
        self.on_lost: Callable[[], None] = lambda: None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, Pipe)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._came.put_nowait(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.broken = exc
        self._came.put_nowait(None)
        self.on_lost()

    async def read(self) -> bytes | None:
        """The next message; None at the end."""
        return await self._came.get()

    def write(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()


async def _connect(address: Address) -> Wire:
    try:
        _, wire = await asyncio.get_running_loop().create_connection(Wire, address.host, address.port)
    except OSError as error:
        raise NodeUnavailable(f"worker {address}: {error}") from error
    return wire


class _Stub:
    """The conductor's side, as its session uses it; ``channel`` is the address."""

    def __init__(self, channel: _Channel) -> None:
        self._channel = channel

    async def Describe(self, request: Any, timeout: float, metadata: Any) -> pb.ModelCard:
        return pb.ModelCard.FromString(await self._ask(DESCRIBE, request, timeout))

    async def Probe(self, request: Any, timeout: float, metadata: Any) -> pb.ProbeReply:
        return pb.ProbeReply.FromString(await self._ask(PROBE, request, timeout))

    async def _ask(self, kind: bytes, request: Any, timeout: float) -> bytes:
        wire = Wire()
        try:
            async with asyncio.timeout(timeout):
                wire = await _connect(self._channel.address)
                wire.write(kind + request.SerializeToString())
                answer = await wire.read()
        except TimeoutError as error:
            raise DeadlineExceeded(f"worker {self._channel.address} did not answer in time") from error
        finally:
            wire.close()
        if answer is None:
            raise NodeUnavailable(f"worker {self._channel.address} hung up")
        if answer[:1] == _ERROR:
            code, _, message = answer[1:].decode().partition(" ")
            raise error_from_code(code, message)
        return answer[1:]


class _Channel:
    def __init__(self, address: Address, **_: Any) -> None:
        self.address = address

    async def close(self) -> None:
        """Nothing is open but calls, which end by themselves."""


@contextlib.contextmanager
def carried() -> Iterator[None]:
    """Let conductors find this carrier in the place of gRPC."""
    edge = types.SimpleNamespace(channel=_Channel, typed_errors=grpc_edge.typed_errors)
    with (
        mock.patch.object(worker_session, "grpc_edge", edge),
        mock.patch.object(worker_session, "session_pb2_grpc", types.SimpleNamespace(WorkerStub=_Stub)),
    ):
        yield


async def serve(
    wire: Wire,
    card: pb.ModelCard,
    probe: Callable[[float], Awaitable[float]],
) -> None:
    """The worker's side of one connection."""
    first = await wire.read()
    if first is None:
        return
    try:
        match first[:1]:
            case b"D":
                wire.write(_REPLY + card.SerializeToString())
                await wire.read()
            case b"P":
                asked = pb.ProbeRequest.FromString(first[1:])
                seconds = await probe(asked.deadline_s)
                wire.write(_REPLY + pb.ProbeReply(seconds=seconds).SerializeToString())
                await wire.read()
    except TanghuluError as error:
        wire.write(_ERROR + f"{error.code} {error.message}".encode())
    finally:
        wire.close()
