"""What a node tells of its most-read chunks."""

from __future__ import annotations

from tanghulu.store.node.state.counters import MAX_KEYS, MAX_REPORTED, SAMPLE, HotKeys
from tanghulu.types import ChunkKey


def test_the_most_read_are_told_once_and_cold_ones_do_not_push_them_out() -> None:
    hot = HotKeys()
    for _ in range(50):
        hot.saw(ChunkKey("hot"))
    for index in range(3 * MAX_KEYS):
        hot.saw(ChunkKey(f"cold{index}"))
        hot.saw(ChunkKey("warm"))
        hot.check()
    told = hot.take()
    assert len(told) == MAX_REPORTED
    assert [key for key, _ in told[:2]] == ["warm", "hot"]
    assert dict(told)[ChunkKey("hot")] == 50 * SAMPLE
    assert hot.take() == []
