"""A worker's KV events in vLLM's format, for routers and caches that follow vLLM: the blocks that it can serve.

    {"type": "BlockStored", "block_hashes": [h1, h2], "parent_block_hash": h0, "token_ids": [… both blocks' …],
     "block_size": 64, "lora_id": null, "medium": "GPU", "lora_name": null}
    {"type": "BlockRemoved", "block_hashes": [h2], "medium": "GPU"}

A prompt of a tenant with a salt has an opaque ``extra_keys`` at its first block, so that followers who name blocks by
tokens keep tenants apart. Token ids travel in the clear.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from tanghulu.hashing import vllm_event_hash
from tanghulu.runtime.kv_events import EventMap
from tanghulu.types import BlockHash
from tanghulu.workers.engine.block_pool import KvEvent, KvEventKind


def sender(
    send: Callable[[Sequence[EventMap]], None] | None, plain_root: BlockHash
) -> Callable[[Sequence[KvEvent]], None]:
    """Return a function that publishes changes of the cache through ``send``; without it, one that does nothing.

    ``plain_root`` is the root of names without a salt.
    """
    return (lambda events: None) if send is None else lambda events: send([*event_maps(events, plain_root)])


def event_maps(events: Sequence[KvEvent], plain_root: BlockHash) -> Iterator[EventMap]:
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


def _origin(first: KvEvent, num_blocks: int, plain_root: BlockHash) -> EventMap:
    """Return the fields of a run of stored blocks that describe their tokens."""
    fields: EventMap = {"lora_id": None, "medium": "GPU", "lora_name": None}
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
