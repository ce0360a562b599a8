"""Pages over all keys, each at the price of its own keys."""

from __future__ import annotations

import random

from tanghulu.store.node.rpc.admin_service import SortedKeys
from tanghulu.types import ChunkKey


async def test_every_key_comes_once_and_in_order() -> None:
    keys = [ChunkKey(f"k{number:06}") for number in range(40_000)]
    mixed = [*keys, *keys[:100]]
    random.Random(1).shuffle(mixed)
    listing = await SortedKeys.of(mixed, keys[9])
    taken = []
    while listing.more:
        taken.append(listing.take())
    assert taken == keys[10:]


async def test_there_may_be_none() -> None:
    assert not (await SortedKeys.of([], "")).more
    assert not (await SortedKeys.of([ChunkKey("a")], "a")).more
