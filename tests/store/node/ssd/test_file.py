"""The tier's aligned buffers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tanghulu.store.node.ssd.file import Arena
from tanghulu.store.node.state.ssd_record import UNIT

CAPACITY = 64 * UNIT
QUEUE = 16 * UNIT


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(8 * UNIT)
    yield arena
    arena.close()


def test_the_arena_is_bounded_and_aligned(arena: Arena) -> None:
    first, second = arena.take(4 * UNIT), arena.take(3 * UNIT)
    assert first is not None
    assert second is not None
    assert arena.take(2 * UNIT) is None
    assert arena.largest_free_bytes == UNIT
    arena.give_back(first)
    assert arena.used_bytes == 3 * UNIT
    arena.give_back(second)
