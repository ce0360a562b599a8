"""The names of what vLLM has cached: whatever events come, what was told adds up to what is there."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tanghulu.engines.vllm_worker.engine import CachedNames
from tanghulu.session.outputs import KvChange
from tanghulu.types import BlockHash
from tanghulu.workers.engine.block_pool import KvEventKind

NAMES = st.sampled_from([BlockHash(bytes([i]) * 32) for i in range(5)])
CHANGES = st.one_of(
    st.builds(KvChange, stored=st.lists(NAMES, max_size=4).map(tuple)),
    st.builds(KvChange, removed=st.lists(NAMES, max_size=4).map(tuple)),
    st.just(KvChange(cleared=True)),
)


@given(st.lists(CHANGES, max_size=30))
def test_events_add_up_to_the_names(changes):
    mirror, blocks, told = CachedNames(), Counter[BlockHash](), set[BlockHash]()
    for change in changes:
        if change.cleared:
            blocks.clear()
        blocks.update(change.stored)
        for name in change.removed:
            blocks[name] = max(blocks[name] - 1, 0)
        for event in mirror.apply(change):
            if event.kind is KvEventKind.STORED:
                assert event.block_hash not in told
                told.add(event.block_hash)
            else:
                told.remove(event.block_hash)
        mirror.check()
        assert told == set(mirror.names) == {name for name, count in blocks.items() if count}
        assert len(mirror) == len(told)


def test_the_leading_names_that_are_there():
    names = [BlockHash(bytes([i])) for i in range(4)]
    mirror = CachedNames()
    mirror.apply(KvChange(stored=(names[0], names[1], names[3])))
    assert mirror.num_leading(names) == 2
    assert mirror.num_leading(names[:1]) == 1
    assert mirror.num_leading([]) == 0
