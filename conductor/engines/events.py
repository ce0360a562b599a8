"""KV events of vLLM's and SGLang's workers as changes of the index: format, sequence numbers, subscription, replay.

The only file that uses ZeroMQ (extra ``vllm``: pyzmq and msgspec), imported lazily. A publisher numbers its messages
from 0; a message is msgpack of [time, events, data-parallel rank]. An event is a map in newer versions (seen with
0.32), an array beginning with its name in older ones:

    {"type": "BlockStored", "block_hashes": hashes, "medium": medium, …}   {"type": "BlockRemoved", …}
    ["BlockStored", hashes, parent, token_ids, block_size, lora_id, medium, …]
    ["BlockRemoved", hashes, medium, …]
    ["AllBlocksCleared"]

Hashes are bytes, or 64-bit numbers: unsigned from vLLM, signed from SGLang. vLLM's numbers are the last 8 bytes of its
names; with ``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`` it publishes the names themselves, as ``vllm_sha256_cbor``
computes them from tokens. Blocks in media other than GPU memory are skipped.

A model with several kinds of attention publishes events for each group of layers (``group_idx``). A group with a
sliding window drops a block as soon as the window has passed it, while the group with full attention still has it, and
the latter decides whether a prefix can be used. So once a group with full attention is known, the events of others are
skipped.

If numbers are missing, the reader requests a replay from the first missing one; if the publisher no longer has all of
them, the worker's blocks are cleared, and return as they are used. Messages sent before the subscription took effect,
or dropped at the end of a burst, show no gap: after a pause, the reader requests what may have come since the last.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import structlog

from tanghulu.errors import ConfigError, InvalidRequest
from tanghulu.runtime.clock import Backoff
from tanghulu.runtime.extras import install_command
from tanghulu.runtime.kv_endpoints import END, EventEndpoints
from tanghulu.runtime.telemetry import RareLog
from tanghulu.session.outputs import KvChange
from tanghulu.types import BlockHash, InstanceId

_log = structlog.get_logger(__name__)
GPU = ("GPU", None)
#: Kinds of groups that keep all blocks of a prefix (``kv_cache_spec_kind``); None: a publisher without kinds.
FULL_ATTENTION = ("full_attention", "mla_attention", "sink_full_attention", None)
#: Position of the medium in an array event.
_MEDIUM_AT = {"BlockStored": 6, "BlockRemoved": 2}
REPLAY_TIMEOUT_S = 5.0
#: Seconds without a message after which missed ones are requested, at first and later.
FIRST_PAUSE_S, PAUSE_S = 0.2, 5.0
#: Most messages and bytes of one replay; if it would be longer, the blocks are cleared instead.
MAX_REPLAYED, MAX_REPLAYED_BYTES = 1 << 16, 256 << 20
#: Initial and longest pause before a failed subscription is retried.
_RETRY_S, _RETRY_MOST_S = 0.1, 10.0
_NO_LIMIT = 1 << 63
#: Messages of a replay that are read before anything else runs, and that are recognised when they arrive late.
_AT_ONCE = 64


def parse_sources(text: str) -> dict[InstanceId, EventEndpoints]:
    """Parse ``worker=tcp://host:5557|tcp://host:5558,…``, the second address for replay. Raises ConfigError."""
    sources = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        worker, _, addresses = part.partition("=")
        what = f"event source {part!r} (worker=tcp://host:port[|tcp://host:port])"
        if not worker or not addresses:
            raise ConfigError(f"{what} lacks the worker or its address; give both")
        sources[InstanceId(worker)] = EventEndpoints.parse(addresses, what)
    return sources


class EventDecoder:
    """Decodes one publisher's messages; remembers which of its groups have full attention."""

    def __init__(self) -> None:
        self._full_groups: set[int] = set()

    def decode(self, payload: Any) -> list[KvChange]:
        """Return the changes in an unpacked message, in order. Raises InvalidRequest for any other format."""
        try:
            return [self._change(event if isinstance(event, dict) else _as_map(event)) for event in payload[1]]
        except (IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(f"not a KV event message of vLLM or SGLang: {error!r}") from error

    def _change(self, event: dict[str, Any]) -> KvChange:
        name = event["type"]
        if name == "AllBlocksCleared":
            return KvChange(cleared=True)
        if name not in _MEDIUM_AT or event.get("medium") not in GPU or not self._counts(name, event):
            return KvChange()
        hashes = hashes_of(event["block_hashes"])
        return KvChange(stored=self.stored(hashes, event)) if name == "BlockStored" else self.removed(hashes)

    def stored(self, hashes: tuple[BlockHash, ...], event: dict[str, Any]) -> tuple[BlockHash, ...]:
        """Return the index's names of the blocks in a BlockStored event: here their hashes themselves."""
        return hashes

    def removed(self, hashes: tuple[BlockHash, ...]) -> KvChange:
        """Return the change of a BlockRemoved event."""
        return KvChange(removed=hashes)

    def _counts(self, name: str, event: dict[str, Any]) -> bool:
        """Return whether the event is one of a deciding group; only BlockStored states a group's kind."""
        group = event.get("group_idx")
        if group is None:
            return True
        if name == "BlockStored" and event.get("kv_cache_spec_kind") in FULL_ATTENTION:
            self._full_groups.add(group)
        return not self._full_groups or group in self._full_groups


def _as_map(event: list[Any]) -> dict[str, Any]:
    name = event[0]
    if name not in _MEDIUM_AT:
        return {"type": name}
    at = _MEDIUM_AT[name]
    fields = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id")
    known = dict(zip(fields if name == "BlockStored" else fields[:2], event, strict=False))
    return {**known, "medium": event[at] if len(event) > at else None}


def hashes_of(values: Iterable[int | bytes]) -> tuple[BlockHash, ...]:
    """Return hashes of an event as bytes."""
    return tuple(BlockHash(v.to_bytes(8, "big", signed=v < 0) if isinstance(v, int) else bytes(v)) for v in values)


class VllmFollower:
    """Passes a worker's changes to ``apply`` in order; for missing or unreadable ones, a clearing.

    Events are read at ``endpoints``, of which the address for replay may be missing.
    """

    def __init__(
        self,
        worker: InstanceId,
        endpoints: EventEndpoints,
        apply: Callable[[KvChange], None],
        new_decoder: Callable[[], EventDecoder] = EventDecoder,
    ) -> None:
        try:
            import zmq.asyncio
            from msgspec.msgpack import decode as unpack
        except ImportError as error:
            raise ConfigError(
                f"vLLM's KV events need pyzmq and msgspec: {install_command('vllm')} ({error})"
            ) from error
        self._endpoints, self._apply, self._unpack = endpoints, apply, unpack
        self._context: Any = zmq.asyncio.Context()
        self._subscribe, self._dealer = zmq.SUB, zmq.DEALER
        self._new_decoder = new_decoder
        self._next, self._decoder = 0, new_decoder()  # the number of the publisher's next message
        #: Whether every event since the publisher's start was applied.
        self.is_complete = False
        self._ahead: dict[int, bytes] = {}  # replayed messages that may still arrive
        self._rare_log = RareLog(_log, worker=worker)

    async def run(self) -> None:
        """Follow until cancelled. Any failure clears the worker's blocks; a new subscription follows after a pause."""
        backoff = Backoff(_RETRY_S, _RETRY_MOST_S)
        try:
            while True:
                try:
                    await self._follow()
                except Exception as error:  # noqa: BLE001 - whatever one publisher sends, the others are served
                    self._rare_log.warning("vllm.follower_failed", error=repr(error))
                    self._lose()
                await asyncio.sleep(backoff.pause_s())
        finally:
            self._context.destroy(0)

    async def _follow(self) -> None:
        socket = self._context.socket(self._subscribe)
        try:
            socket.subscribe(b"")
            socket.connect(self._endpoints.events)
            pause_s = FIRST_PAUSE_S if self._endpoints.replay else None
            while True:
                if await socket.poll(pause_s and 1000 * pause_s):
                    await self._take(await socket.recv_multipart())
                else:
                    pause_s = PAUSE_S if await self._catch_up(self._next, None) else None
        finally:
            socket.close(0)

    def _lose(self) -> None:
        """Discard everything known about the worker's cache."""
        self._next, self._decoder, self.is_complete = 0, self._new_decoder(), False
        self._apply(KvChange(cleared=True))

    async def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != len(END):
            self._rare_log.warning("vllm.not_an_event", frames=[len(frame) for frame in frames[:4]])
            return
        number = int.from_bytes(frames[1], "big")
        if self._ahead.get(number) == frames[2]:
            return
        self._ahead = {}
        if number < self._next:  # the publisher restarted: what it announced before is void
            self._next = 0
            self._apply(KvChange(cleared=True))
        if number > self._next:
            await self._catch_up(self._next, number)
        self._read(number, frames[2])

    def _read(self, number: int, payload: bytes) -> None:
        try:
            changes = self._decoder.decode(self._unpack(payload))
        except (InvalidRequest, ValueError, RecursionError, MemoryError) as error:
            self._rare_log.warning("vllm.not_an_event", error=str(error))
            changes = [KvChange(cleared=True)]
        for change in changes:
            self._apply(change)
        self._next = number + 1
        if not number:
            self.is_complete = True

    async def _catch_up(self, first: int, number: int | None) -> bool:
        """Read the messages from ``first`` to before ``number`` (None: to the last), as far as they are available.

        The rest is lost. Returns whether the publisher answered.
        """
        missed: dict[int, bytes] | None = None
        if self._endpoints.replay:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    missed = await self._replay(first, _NO_LIMIT if number is None else number)
        found = missed or {}
        if number is None:
            self._ahead = dict(list(found.items())[-_AT_ONCE:])
        begin = end = number if number is not None else max(found, default=first - 1) + 1
        while begin - 1 in found:
            begin -= 1
        if begin > first:
            self.is_complete = False
            self._rare_log.warning("vllm.events_lost", first=first, last=begin - 1)
            self._apply(KvChange(cleared=True))
        for each in range(begin, end):
            self._read(each, found[each])
            if not each % _AT_ONCE:
                await asyncio.sleep(0)
        return missed is not None

    async def _replay(self, first: int, number: int) -> dict[int, bytes]:
        """Return the messages from ``first`` to before ``number`` still available; none if the answer is malformed."""
        socket = self._context.socket(self._dealer)
        missed: dict[int, bytes] = {}
        num_bytes = 0
        try:
            socket.connect(self._endpoints.replay)
            await socket.send_multipart((b"", first.to_bytes(8, "big")))
            while True:
                frames = await socket.recv_multipart()
                if len(frames) < 2:
                    self._rare_log.warning("vllm.not_a_replay", frames=len(frames))
                    return {}
                if frames[-2] == END:
                    return missed
                each = int.from_bytes(frames[-2], "big")
                if first <= each < number:
                    missed[each] = frames[-1]
                    num_bytes += len(frames[-1])
                if len(missed) > MAX_REPLAYED or num_bytes > MAX_REPLAYED_BYTES:
                    self._rare_log.warning("vllm.replay_too_long", messages=len(missed), num_bytes=num_bytes)
                    return {}
        finally:
            socket.close(0)
