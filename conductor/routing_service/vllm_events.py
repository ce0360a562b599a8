"""Conversion of vLLM's and SGLang's KV events to changes of the index: payload format and sequence numbers.

Pure. A publisher numbers its messages from 0; a message is msgpack of [time, events, data-parallel rank]. An event is a
map in newer versions (seen with 0.32), an array beginning with its name in older ones:

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
them, the worker's blocks are cleared, and return as they are used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tanghulu.errors import ConfigError, InvalidRequest
from tanghulu.session.outputs import KvChange
from tanghulu.types import Address, BlockHash, InstanceId

GPU = ("GPU", None)
#: Kinds of groups that keep all blocks of a prefix (``kv_cache_spec_kind``); None: a publisher without kinds.
FULL_ATTENTION = ("full_attention", "mla_attention", "sink_full_attention", None)
#: Position of the medium in an array event.
_MEDIUM_AT = {"BlockStored": 6, "BlockRemoved": 2}


@dataclass(frozen=True, slots=True)
class EventSource:
    """The ZeroMQ addresses at which a worker publishes and replays its events ("" disables replay)."""

    worker: InstanceId
    events: str
    replay: str = ""


def parse_sources(text: str) -> tuple[EventSource, ...]:
    """Parse ``worker=tcp://host:5557|tcp://host:5558,…``, the second address for replay. Raises ConfigError."""
    sources = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        worker, _, addresses = part.partition("=")
        events, _, replay = addresses.partition("|")
        if not worker or "://" not in events or (replay and "://" not in replay):
            raise ConfigError(f"event source {part!r} is not of the form worker=tcp://host:port[|tcp://host:port]")
        for each in (events, replay):
            if each.startswith("tcp://"):
                try:
                    Address.parse(each.removeprefix("tcp://"))
                except InvalidRequest as error:
                    raise ConfigError(f"event source {part!r}: {error.message}") from None
        sources.append(EventSource(InstanceId(worker), events, replay))
    return tuple(sources)


class Numbers:
    """The sequence numbers of one publisher's messages."""

    def __init__(self) -> None:
        self.next: int | None = None

    def missing(self, number: int) -> int | None:
        """Return the first number missing before ``number``; None if none is, or if it is the first of all.

        A number smaller than expected means that the publisher restarted: all before it are missing.
        """
        if self.next is None:
            return 0 if number else None
        if number < self.next:
            return 0 if number else None
        return self.next if number > self.next else None

    def restarted(self, number: int) -> bool:
        """Return whether ``number`` shows a restarted publisher, whose earlier announcements are void."""
        return self.next is not None and number < self.next

    def took(self, number: int) -> None:
        """Record that the message was applied."""
        self.next = number + 1


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
        hashes = _hashes(event["block_hashes"])
        return KvChange(stored=hashes) if name == "BlockStored" else KvChange(removed=hashes)

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
    return {"type": name, "block_hashes": event[1], "medium": event[at] if len(event) > at else None}


def _hashes(values: Iterable[int | bytes]) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(v.to_bytes(8, "big", signed=v < 0) if isinstance(v, int) else bytes(v)) for v in values)
