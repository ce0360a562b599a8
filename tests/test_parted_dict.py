"""A dict in parts, against a dict."""

from __future__ import annotations

import gc
import random

from tanghulu.eviction.simple import Lru
from tanghulu.parted_dict import PartedDict
from tanghulu.types import ChunkKey


def test_it_is_as_a_dict() -> None:
    rng, parted, plain = random.Random(1), PartedDict[str, int](), dict[str, int]()
    for step in range(3000):
        key = f"k{rng.randrange(500)}"
        if key in plain and rng.random() < 0.4:
            del parted[key], plain[key]
        else:
            parted[key] = plain[key] = step
        assert len(parted) == len(plain)
        assert (key in parted) is (key in plain)
        assert parted.get(key) == plain.get(key)
        assert key not in plain or parted[key] == plain[key]
    parted.check()
    assert dict(parted.items()) == plain
    assert sorted(parted) == sorted(plain)
    assert sorted(parted.values()) == sorted(plain.values())


def test_no_part_grows_with_all_keys() -> None:
    order = Lru()
    for n in range(100_000):
        order.add(ChunkKey(f"k{n}"), 1)
    order.check()
    gc.collect()
    assert max(map(len, order._places._parts)) < 300
    assert not any(map(gc.is_tracked, order._places._parts))
