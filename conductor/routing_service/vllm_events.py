"""From vLLM's KV events to changes of the index: the payload's format, and the sequence numbers.

Pure. A publisher numbers its messages from 0; a message is msgpack of [time, events, data-parallel rank]. An event is a
map in newer versions (seen with 0.32), an array with its name in front in older ones:

    {"type": "BlockStored", "block_hashes": hashes, "medium": medium, …}   {"type": "BlockRemoved", …}
    ["BlockStored", hashes, parent, token_ids, block_size, lora_id, medium, …]
    ["BlockRemoved", hashes, medium, …]
    ["AllBlocksCleared"]

Hashes are numbers of 64 bits, or bytes. Blocks in other media than the GPU's memory are left out. Where numbers are
missing the reader asks for a replay from the first missing one; what the publisher cannot give any more is lost, and
with it the worker's blocks: they are cleared, and come again as they are used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tanghulu.conductor.routing.requests import KvChange
from tanghulu.errors import ConfigError, InvalidRequest
from tanghulu.types import BlockHash, InstanceId

GPU = ("GPU", None)
#: Where an event that is an array has its medium.
_MEDIUM_AT = {"BlockStored": 6, "BlockRemoved": 2}


@dataclass(frozen=True, slots=True)
class EventSource:
    """The ZeroMQ addresses at which a worker tells its events and repeats them ("": it does not)."""

    worker: InstanceId
    events: str
    replay: str = ""


def parse_sources(text: str) -> tuple[EventSource, ...]:
    """``worker=tcp://host:5557|tcp://host:5558,…``, the second address for replay. Raises ConfigError."""
    sources = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        worker, _, addresses = part.partition("=")
        events, _, replay = addresses.partition("|")
        if not worker or "://" not in events or (replay and "://" not in replay):
            raise ConfigError(f"event source {part!r} is not of the form worker=tcp://host:port[|tcp://host:port]")
        sources.append(EventSource(InstanceId(worker), events, replay))
    return tuple(sources)


class Numbers:
    """The sequence numbers of one publisher's messages."""

    def __init__(self) -> None:
        self.next: int | None = None

    def missing(self, number: int) -> int | None:
        """The first number that is missing in front of ``number``; None if none is, or if it is the first of all.

        A number that is smaller than expected is that of a publisher which began anew: all in front of it are missing.
        """
        if self.next is None:
            return 0 if number else None
        if number < self.next:
            return 0 if number else None
        return self.next if number > self.next else None

    def restarted(self, number: int) -> bool:
        """Whether ``number`` shows that the publisher began anew, and so holds nothing of what it told before."""
        return self.next is not None and number < self.next

    def took(self, number: int) -> None:
        """Note that the message was applied."""
        self.next = number + 1


def decode(payload: Any) -> list[KvChange]:
    """The changes in an unpacked message, in order. Raises InvalidRequest for one that is not of this format."""
    try:
        return [_change(event if isinstance(event, dict) else _as_map(event)) for event in payload[1]]
    except (IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"not a KV event message of vLLM: {error!r}") from error


def _as_map(event: list[Any]) -> dict[str, Any]:
    name = event[0]
    if name not in _MEDIUM_AT:
        return {"type": name}
    at = _MEDIUM_AT[name]
    return {"type": name, "block_hashes": event[1], "medium": event[at] if len(event) > at else None}


def _change(event: dict[str, Any]) -> KvChange:
    name = event["type"]
    if name == "AllBlocksCleared":
        return KvChange(cleared=True)
    if name not in _MEDIUM_AT or event.get("medium") not in GPU:
        return KvChange()
    hashes = _hashes(event["block_hashes"])
    return KvChange(stored=hashes) if name == "BlockStored" else KvChange(removed=hashes)


def _hashes(values: Iterable[int | bytes]) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(v.to_bytes(8, "big") if isinstance(v, int) else bytes(v)) for v in values)
