"""What goes to the store and when: pure policies in any order of events, and each of them behind a real engine."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.errors import StoreFull
from tanghulu.store.client.model import Status
from tanghulu.types import BlockHash, RequestId
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.engine.step import CommittedBlock
from tanghulu.workers.kv.store_policy import POLICIES, WriteAgain, make_store_policy
from tests.workers.rig import PROMPT, DictStore, Rig
from tests.workers.tiny import BLOCK


def _block(number: int) -> CommittedBlock:
    return CommittedBlock(RequestId("r"), number, number, BlockHash(bytes([number]) * 16))


def _names(kept: list[CommittedBlock]) -> str:
    return "".join(chr(ord("A") + each.block_id) for each in kept)


A, B, C = map(_block, range(3))


def test_the_worked_example():
    policy = WriteAgain(2)
    assert _names(policy.committed([A, B, C])) == ""
    assert (policy.num_dropped, policy.num_deferred) == (1, 2)
    assert _names(policy.reused([B])) == "B"
    assert _names(policy.idle(10)) == "C"
    assert _names(policy.committed([A])) == "A"
    assert _names(policy.idle(10)) == ""
    assert _names(policy.reused([A, B, C])) == "", "all are written"


def test_second_use_leaves_nothing_of_what_comes_once():
    policy = make_store_policy("second-use", 100)
    assert _names(policy.committed([A, B])) + _names(policy.idle(10)) == ""
    assert _names(policy.committed([B])) == "B"
    assert _names(policy.reused([A])) == "A"
    assert _names(policy.reused([A])) == ""
    assert _names(policy.committed([A])) == "A", "it was evicted and computed again: the store had lost it"


def test_what_was_lost_is_written_on_its_next_use():
    policy = WriteAgain(2)
    policy.committed([A, B])
    assert _names(policy.reused([A]) + policy.idle(10)) == "AB"
    policy.lost([B.block_hash, C.block_hash])
    policy.check()
    assert _names(policy.reused([A, B, C])) == "B"
    assert _names(policy.reused([A, B])) == ""


def test_all_and_none():
    assert _names(make_store_policy("all", 0).committed([A, B])) == "AB"
    none = make_store_policy("none", 0)
    assert _names(none.committed([A, B]) + none.reused([A]) + none.idle(5)) == ""


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 4),
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from(["committed", "reused", "idle"]), st.lists(st.integers(0, 7), max_size=4))),
)
def test_nothing_is_written_unused_or_waits_beyond_the_bound(max_deferred, remembered, events):
    policy = WriteAgain(max_deferred, remembered)
    uses = dict.fromkeys(range(8), 0)
    for what, numbers in events:
        if what == "idle":
            written = policy.idle(len(numbers))
            assert len(written) <= len(numbers)
            assert all(uses[each.block_id] > 0 for each in written)
        else:
            blocks = [_block(number) for number in dict.fromkeys(numbers)]
            written = getattr(policy, what)(blocks)
            assert all(uses[each.block_id] > 0 for each in written), "one use is not two"
            for block in blocks:
                uses[block.block_id] += 1
        assert len({each.block_id for each in written}) == len(written)
        policy.check()


def _all_written(rig: Rig) -> None:
    """Wait until the engine is idle and nothing is deferred or under way."""
    while rig.value("store_pending_blocks") or rig.value("store_deferred_blocks") or rig.value("blocks_in_use"):
        rig.next_report()


@pytest.mark.parametrize(("policy", "once", "twice"), [("all", 5, 5), ("second-use", 0, 5), ("none", 0, 0)])
def test_each_behind_an_engine(tiny_model, policy, once, twice):
    store = DictStore()
    rig = Rig(tiny_model, store, store_policy=policy)
    tokens, _ = rig.run("first", PROMPT, 2)
    rig.run_until_idle()
    assert len(store.chunks) == once
    assert rig.run("again", PROMPT, 2) == (tokens, 5 * BLOCK)
    rig.run_until_idle()
    assert len(store.chunks) == twice
    rig.close()


def test_what_does_not_fit_is_written_on_a_later_use(tiny_model):
    store = DictStore()
    size = KvLayout.of(tiny_model.config, BLOCK, "float32").block_bytes
    rig = Rig(tiny_model, store, store_policy="second-use", max_pending_bytes=2 * size)
    rig.run("first", PROMPT, 2)
    for count in 2, 4, 5:
        rig.run(f"until {count}", PROMPT, 2)
        rig.run_until_idle()
        assert len(store.chunks) == count
    rig.close()


def test_what_the_store_refused_is_written_on_a_later_use(tiny_model, monkeypatch):
    store = DictStore()
    rig = Rig(tiny_model, store, store_policy="second-use")
    rig.run("first", PROMPT, 2)
    with monkeypatch.context() as full:
        full.setattr(store, "put_many", lambda items, **_: [Status(key, error=StoreFull()) for key, _ in items])
        rig.run("second", PROMPT, 2)
        rig.run_until_idle()
    assert not store.chunks
    rig.run("third", PROMPT, 2)
    rig.run_until_idle()
    assert len(store.chunks) == 5
    rig.close()


def test_deferred_blocks_are_written_when_the_engine_is_idle_and_only_those_still_cached(tiny_model):
    store = DictStore()
    rig = Rig(tiny_model, store, store_policy="defer")
    rig.run("first", PROMPT, 2)
    _all_written(rig)
    assert len(store.chunks) == 5
    rig.thread.post(lambda core: rig.connector._policy.committed([_block(3)]) and None)  # no longer in the cache
    rig.run("second", PROMPT[::-1], 2)
    _all_written(rig)
    assert len(store.chunks) == 10
    assert BlockHash(bytes([3]) * 16) not in store.chunks
    rig.close()


def test_deferred_blocks_beyond_the_bound_are_dropped(tiny_model):
    store = DictStore()
    size = KvLayout.of(tiny_model.config, BLOCK, "float32").block_bytes
    rig = Rig(tiny_model, store, store_policy="defer", max_deferred_bytes=2 * size)
    rig.run("first", PROMPT, 2)
    _all_written(rig)
    assert len(store.chunks) == 2
    assert rig.value("store_dropped_total") == 3
    rig.close()


def test_names_are_those_of_the_flag():
    assert list(POLICIES) == ["all", "second-use", "defer", "none"]
