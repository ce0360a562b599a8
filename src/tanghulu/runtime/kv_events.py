"""KV events in vLLM's format over ZeroMQ: the option, and the publisher.

A PUB socket sends ``[topic, sequence number, payload]`` with numbers from 0; the payload is msgpack of [time, events,
data-parallel rank 0]. A ROUTER socket answers ``["", first number]`` with the messages from there on that are still
kept, and ``["", "", -1, ""]``. The first message of a process is AllBlocksCleared: what its predecessor had is gone.

Hashes are the last 8 bytes of our names, as unsigned numbers. Subscribers need no credentials: that is the format.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import structlog

from tanghulu.errors import ConfigError
from tanghulu.runtime.config import option
from tanghulu.runtime.extras import require
from tanghulu.runtime.kv_endpoints import END, EventEndpoints
from tanghulu.runtime.tasks import beside

#: An event as vLLM writes it.
EventMap: TypeAlias = dict[str, Any]

_log = structlog.get_logger(__name__)
#: Messages, and bytes of them, that are kept for replays.
KEPT_MESSAGES, KEPT_BYTES = 10_000, 64 << 20
#: Unsent messages to one subscriber before ZeroMQ drops further ones.
_HIGH_WATER = 100_000


@dataclass(frozen=True, kw_only=True)
class KvEventOptions:
    """The option of processes that publish events."""

    kv_events: str = option(
        "",
        "publish KV events in vLLM's format at tcp://HOST:PORT, or tcp://HOST:PORT|tcp://HOST:PORT with replays at "
        "the second; those of workers have token ids, in the clear",
    )

    def __post_init__(self) -> None:
        _ = self.event_endpoints  # refuses bad ones

    @property
    def event_endpoints(self) -> EventEndpoints | None:
        """The addresses of KV events; None without. Raises ConfigError."""
        return EventEndpoints.parse(self.kv_events, f"--kv-events {self.kv_events}") if self.kv_events else None


class KvEventPublisher:
    """Publishes events of the blocks of one process; keeps the last ones for replays.

    Raises ConfigError if pyzmq is missing, or an address cannot be bound. All is called in the event loop.
    """

    def __init__(self, endpoints: EventEndpoints) -> None:
        require("vllm", "--kv-events")
        import zmq
        import zmq.asyncio

        self._numbers = itertools.count()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT_MESSAGES)
        self._kept_bytes = 0
        self._context: Any = zmq.Context()
        self._publish: Any = self._context.socket(zmq.PUB)
        self._replay: Any = zmq.asyncio.Context(self._context).socket(zmq.ROUTER) if endpoints.replay else None
        for socket, endpoint in ((self._publish, endpoints.events), (self._replay, endpoints.replay)):
            if socket is not None:
                socket.set_hwm(_HIGH_WATER)
                try:
                    socket.bind(endpoint)
                except zmq.ZMQError as error:
                    self.close()
                    raise ConfigError(f"--kv-events: cannot listen at {endpoint}: {error}") from None
        if "//*:" in endpoints.events:
            _log.warning("kv_events.open_to_everybody", hint="subscribers need no credentials")
        self._send([{"type": "AllBlocksCleared"}])

    def publish(self, maps: Sequence[EventMap]) -> None:
        """Publish events, in order, as one message; none is sent for no events."""
        if maps:
            self._send(maps)

    def _send(self, maps: Sequence[EventMap]) -> None:
        number = next(self._numbers).to_bytes(8, "big")
        payload = msgspec.msgpack.encode([time.time(), maps, 0])
        while self._kept and (len(self._kept) == KEPT_MESSAGES or self._kept_bytes + len(payload) > KEPT_BYTES):
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        self._publish.send_multipart((b"", number, payload))

    async def run(self) -> None:
        """Answer requests for replays, until cancelled."""
        while self._replay is not None:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != len(END):
                _log.warning("kv_events.not_a_replay_request", frames=[len(frame) for frame in frames[:4]])
                continue
            for number, payload in [each for each in self._kept if each[0] >= frames[2]]:
                await self._replay.send_multipart((frames[0], b"", b"", number, payload))
            await self._replay.send_multipart((frames[0], b"", b"", END, b""))

    def close(self) -> None:
        """Close the sockets; unsent messages are lost."""
        for socket in filter(None, (self._publish, self._replay)):
            socket.close(linger=0)
        self._context.term()


@contextlib.asynccontextmanager
async def publishing(endpoints: EventEndpoints | None) -> AsyncIterator[Callable[[Sequence[EventMap]], None] | None]:
    """Give a function that publishes events at ``endpoints``; None without any."""
    if endpoints is None:
        yield None
        return
    publisher = KvEventPublisher(endpoints)
    try:
        async with beside(publisher.run()):
            yield publisher.publish
    finally:
        publisher.close()
