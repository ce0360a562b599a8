"""KV events in vLLM's format over ZeroMQ, for routers and caches that follow vLLM: the blocks that a worker can serve.

A PUB socket sends ``[topic, sequence number, payload]`` with numbers from 0; the payload is msgpack of [time, events,
data-parallel rank 0]. A ROUTER socket answers ``["", first number]`` with the messages from there on that are still
kept, and ``["", "", -1, ""]``. The first message of a process is AllBlocksCleared: what its predecessor had is gone.

    {"type": "BlockStored", "block_hashes": [h1, h2], "parent_block_hash": h0, "token_ids": [… both blocks' …],
     "block_size": 64, "lora_id": null, "medium": "GPU", "lora_name": null}
    {"type": "BlockRemoved", "block_hashes": [h2], "medium": "GPU"}

Hashes are the last 8 bytes of our names, as unsigned numbers. A prompt of a tenant with a salt has an opaque
``extra_keys`` at its first block, so that followers who name blocks by tokens keep tenants apart. Token ids travel in
the clear, and subscribers need no credentials: that is the format.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import msgspec
import structlog

from tanghulu.errors import ConfigError
from tanghulu.hashing import vllm_event_hash
from tanghulu.runtime.extras import require
from tanghulu.runtime.tasks import beside
from tanghulu.session.kv_endpoints import END, EventEndpoints
from tanghulu.types import BlockHash
from tanghulu.workers.engine.block_pool import KvEvent, KvEventKind

_log = structlog.get_logger(__name__)
#: Messages, and bytes of them, that are kept for replays.
KEPT_MESSAGES, KEPT_BYTES = 10_000, 64 << 20
#: Unsent messages to one subscriber before ZeroMQ drops further ones.
_HIGH_WATER = 100_000


class KvEventPublisher:
    """Publishes a worker's events; keeps the last ones for replays.

    ``plain_root`` is the root of names without a salt. Raises ConfigError if pyzmq is missing, or an address cannot be
    bound. All is called in the event loop.
    """

    def __init__(self, endpoints: EventEndpoints, plain_root: BlockHash) -> None:
        require("vllm", "--kv-events")
        import zmq
        import zmq.asyncio

        self._plain_root = plain_root
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
            _log.warning("kv_events.open_to_everybody", hint="subscribers read token ids without credentials")
        self._send([{"type": "AllBlocksCleared"}])

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Publish changes of the cache, in order, as one message."""
        if events:
            self._send(list(event_maps(events, self._plain_root)))

    def _send(self, maps: list[dict[str, Any]]) -> None:
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
async def publishing(
    endpoints: EventEndpoints | None, plain_root: BlockHash
) -> AsyncIterator[Callable[[Sequence[KvEvent]], None]]:
    """Give a function that publishes events at ``endpoints``; without any, one that does nothing."""
    if endpoints is None:
        yield lambda events: None
        return
    publisher = KvEventPublisher(endpoints, plain_root)
    try:
        async with beside(publisher.run()):
            yield publisher.publish
    finally:
        publisher.close()


def event_maps(events: Sequence[KvEvent], plain_root: BlockHash) -> Iterator[dict[str, Any]]:
    """Yield the events as vLLM writes them: consecutive blocks of one sequence, and runs of removals, are one."""

    def run_of(place: tuple[int, KvEvent]) -> tuple[object, ...]:
        at, event = place
        stored = event.kind is KvEventKind.STORED
        return (stored, id(event.sequence), event.index - at) if stored else (stored,)

    for (is_stored, *_), places in itertools.groupby(enumerate(events), run_of):
        run = [event for _, event in places]
        hashes = [vllm_event_hash(event.block_hash) for event in run]
        if is_stored:
            yield {"type": "BlockStored", "block_hashes": hashes, **_origin(run[0], len(run), plain_root)}
        else:
            yield {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}


def _origin(first: KvEvent, num_blocks: int, plain_root: BlockHash) -> dict[str, Any]:
    """Return the fields of a run of stored blocks that describe their tokens."""
    fields: dict[str, Any] = {"lora_id": None, "medium": "GPU", "lora_name": None}
    sequence, index = first.sequence, first.index
    if sequence is None:
        return {"parent_block_hash": None, "token_ids": [], "block_size": 0, **fields}
    size = sequence.block_tokens
    if index == 0 and sequence.root != plain_root:
        fields["extra_keys"] = [[sequence.root.hex()], *[None] * (num_blocks - 1)]
    return {
        "parent_block_hash": vllm_event_hash(sequence.block_hashes[index - 1]) if index else None,
        "token_ids": sequence.tokens[index * size : (index + num_blocks) * size].tolist(),
        "block_size": size,
        **fields,
    }
