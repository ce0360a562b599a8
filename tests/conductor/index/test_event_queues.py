"""Events in slices: in order for each holder, bounded, and the index comes out as if all had been applied at once."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.conductor.index import events
from tanghulu.conductor.index.events import SLICE_BLOCKS, CacheMirror, EventQueues
from tanghulu.conductor.index.prefix_index import Cleared, PrefixIndex, Removed, Stored
from tanghulu.session.load import WorkerLoad
from tanghulu.session.messages import SessionWelcome
from tanghulu.session.outputs import KvChange
from tanghulu.types import BlockHash, InstanceId
from tests.conductor.cluster import running_cluster

HOLDERS = [InstanceId(name) for name in "abcd"]
CHAIN = [BlockHash(number.to_bytes(16, "little")) for number in range(40)]
STRETCH = st.tuples(st.integers(0, 39), st.integers(1, 40)).map(lambda at: CHAIN[at[0] : at[0] + at[1]])
EVENTS = st.one_of(
    st.builds(Stored, st.sampled_from(HOLDERS), STRETCH),
    st.builds(Removed, st.sampled_from(HOLDERS), STRETCH),
    st.builds(Cleared, st.sampled_from(HOLDERS)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.integers(0, 3)), max_size=25), st.sampled_from([20, 1000]))
def test_the_index_comes_out_the_same(steps, most):
    """Slices of three blocks, applied now and then."""
    at_once, index = PrefixIndex(), PrefixIndex()
    sliced = EventQueues(index.apply, max_waiting_blocks=most)
    before, events.SLICE_BLOCKS = events.SLICE_BLOCKS, 3
    try:
        for event, turns in steps:
            at_once.apply(event)
            assert sliced.put(event) == sliced.waits
            sliced.check()
            for _ in range(turns):
                sliced.apply_some()
        while sliced.apply_some():
            sliced.check()
    finally:
        events.SLICE_BLOCKS = before
    assert sliced.waiting_blocks == 0
    assert sliced.waiting_holders == set()
    for start in range(0, 40, 7):
        assert index.match(CHAIN[start:]) == at_once.match(CHAIN[start:])
    index.check()


def blocks(num: int, seed: int) -> list[BlockHash]:
    names = random.Random(seed).randbytes(16 * num)
    return [BlockHash(names[at : at + 16]) for at in range(0, len(names), 16)]


async def test_a_snapshot_does_not_hold_others_up():
    """Half a million blocks of one worker: another's event counts at once, and the loop turns all the while."""
    mirror, snapshot, few = CacheMirror(), blocks(500_000, 1), blocks(64, 2)
    applying = asyncio.create_task(mirror.apply_events())
    await asyncio.sleep(0)
    big, small = InstanceId("big"), InstanceId("small")
    mirror.welcome(small, SessionWelcome(small, 1, (), 1, WorkerLoad()))
    mirror.welcome(big, SessionWelcome(big, 1, tuple(snapshot), 1, WorkerLoad()))
    assert mirror.events.waiting_blocks == 500_000
    mirror.worker_events(small, 1, [KvChange(stored=tuple(few))])
    assert mirror.hits(few).workers == {small: 64}
    mirror.worker_events(big, 1, [KvChange(removed=(snapshot[-1],))])
    turns = 0
    while mirror.events.waits:
        await asyncio.sleep(0)
        mirror.check() if turns == 3 else None
        turns += 1
    assert turns >= 500_000 // SLICE_BLOCKS
    assert mirror.workers.num_blocks_of(big) == 499_999
    mirror.worker_gone(big)
    assert mirror.workers.holders == [small]
    applying.cancel()
    await asyncio.gather(applying, return_exceptions=True)


async def test_a_snapshot_puts_right_what_events_left_wrong(tmp_path: Path):
    """The worker's cache changes without an event; the conductor asks, and decides by what is there."""
    async with running_cluster(tmp_path, snapshot_every_s=0.05) as cluster:
        worker = await cluster.add()
        index = cluster.dispatcher.mirror.workers
        gone, kept, new = blocks(3, 3)
        worker.cached |= {gone, kept}
        await cluster.until(lambda: index.blocks_of(worker.id) == {gone, kept})
        worker.cached ^= {gone, new}
        await cluster.until(lambda: index.blocks_of(worker.id) == {kept, new})
        assert len(worker.sessions) == 1
        answer = await cluster.http.post("/v1/completions", json={"model": "tiny", "prompt": "x" * 40, "max_tokens": 2})
        assert answer.status_code == 200, "its events go on behind the snapshot"
        await cluster.until(lambda: index.blocks_of(worker.id) == worker.cached)
        cluster.dispatcher.check()


def test_what_a_holder_has():
    index = PrefixIndex()
    for holder, held in (("a", CHAIN[:30]), ("b", CHAIN[:10]), ("a", CHAIN[35:])):
        index.apply(Stored(InstanceId(holder), held))
    index.apply(Removed(InstanceId("a"), CHAIN[3:5]))
    assert index.blocks_of(InstanceId("a")) == {*CHAIN[:3], *CHAIN[5:30], *CHAIN[35:]}
    assert index.blocks_of(InstanceId("b")) == set(CHAIN[:10])
    assert index.blocks_of(InstanceId("c")) == set()
