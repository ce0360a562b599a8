"""A node's KV events in vLLM's format: the blocks of workers that it holds, in memory (CPU) and on its SSD (STORAGE).

    {"type": "BlockStored", "block_hashes": [h1, h2], "parent_block_hash": null, "token_ids": [], "block_size": 0,
     "lora_id": null, "medium": "CPU", "lora_name": null}
    {"type": "BlockRemoved", "block_hashes": [h2], "medium": "CPU"}

A node knows names only: as from vLLM's offloading, events have no tokens, and followers know the blocks from the
workers that computed them. Of a block in several parts, one for each tensor-parallel rank, the first stands for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final

from tanghulu.hashing import vllm_event_hash
from tanghulu.runtime.kv_events import EventMap
from tanghulu.store.node.state.holdings import Holding
from tanghulu.store.protocol.types import Tier
from tanghulu.types import parse_kv_chunk_key

_MEDIA: Final = {Tier.MEMORY: "CPU", Tier.SSD: "STORAGE"}
_STORED: Final[EventMap] = {
    "parent_block_hash": None,
    "token_ids": [],
    "block_size": 0,
    "lora_id": None,
    "lora_name": None,
}


class HeldBlocks:
    """Gathers what a node holds and loses, and publishes it at each `flush`; ``has_ssd``: chunks change tiers."""

    def __init__(self, publish: Callable[[Sequence[EventMap]], None], *, has_ssd: bool) -> None:
        self._publish = publish
        self._has_ssd = has_ssd
        self._changes: list[tuple[bool, str, int]] = []

    def changed(self, chunk: Holding, held: bool) -> None:
        """Record that the node holds ``chunk`` in its tier from now on, and in no other, or no longer."""
        name = parse_kv_chunk_key(chunk.key)
        if name is None or name[2] != 0:
            return
        number, medium = vllm_event_hash(name[1]), _MEDIA[chunk.tier]
        self._changes.append((held, medium, number))
        if held and self._has_ssd:
            self._changes += [(False, other, number) for other in _MEDIA.values() if other != medium]

    def flush(self) -> None:
        """Publish the changes since the last call, in order, as one message."""
        changes, self._changes = self._changes, []
        runs = groupby(changes, lambda change: change[:2])
        self._publish([_event(held, medium, [number for *_, number in run]) for (held, medium), run in runs])


def _event(held: bool, medium: str, numbers: list[int]) -> EventMap:
    event: EventMap = {"type": "BlockStored" if held else "BlockRemoved", "block_hashes": numbers, "medium": medium}
    return event | _STORED if held else event
