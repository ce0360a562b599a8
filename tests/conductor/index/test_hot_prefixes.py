"""Prefixes in demand: what is counted, what is asked for, and that the store is really asked."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.conductor.index.events import CacheMirror
from tanghulu.conductor.index.hot_prefixes import AGAIN_S, MAX_HOLDERS, MAX_PREFIXES, HotPrefixes
from tanghulu.conductor.replicating import Replicator
from tanghulu.errors import MasterUnavailable
from tanghulu.store.directory_feed import DirectoryEvent, DirectoryEventKind
from tanghulu.types import BlockHash, Fingerprint, kv_chunk_key

MODEL = Fingerprint(b"m" * 16)
DOCUMENT = [BlockHash(bytes([1, n]) * 8) for n in range(100)]


def fetch(hot, per_s, seconds, start_s=0.0, blocks=DOCUMENT, first=0):
    """Fetches at a steady rate, each with a tail of its own; returns when they ended."""
    for number in range(round(per_s * seconds)):
        own = BlockHash(b"tail%012d" % number)
        hot.fetched(MODEL, [*blocks, own], first, len(blocks) + 1, start_s + number / per_s)
        hot.check()
    return start_s + seconds


def test_the_longest_hot_prefix_gets_holders_by_its_rate():
    hot = HotPrefixes(10.0)
    now_s = fetch(hot, 25, 30)
    (wish,) = hot.wanted(now_s, lambda blocks: 1)
    assert (wish.fingerprint, wish.num_holders) == (MODEL, 3)
    assert wish.blocks == tuple(DOCUMENT[:96])


def test_enough_holders_are_not_asked_for():
    hot = HotPrefixes(10.0)
    now_s = fetch(hot, 25, 30)
    assert hot.wanted(now_s, lambda blocks: 3) == []
    assert HotPrefixes(0.0).wanted(0.0, lambda blocks: 0) == []


def test_what_is_rarely_fetched_or_found_at_the_worker_is_not_hot():
    hot = HotPrefixes(10.0)
    now_s = fetch(hot, 8, 30)
    assert hot.wanted(now_s, lambda blocks: 1) == []
    now_s = fetch(hot, 25, 30, now_s, first=64)
    (wish,) = hot.wanted(now_s, lambda blocks: 1)
    assert len(wish.blocks) == 96, "the first 64 blocks are at the workers, but are worth nothing alone"
    assert len(hot) <= MAX_PREFIXES


def test_a_common_beginning_is_asked_for_besides_where_it_needs_more_holders():
    system, hot = DOCUMENT[:8], HotPrefixes(10.0)
    documents = [[*system, *(BlockHash(bytes([7, d, n, 0]) * 4) for n in range(40))] for d in range(3)]
    for number in range(3 * 12 * 20):
        hot.fetched(MODEL, documents[number % 3], 0, 48, number / 36)
    wishes = {len(w.blocks): w.num_holders for w in hot.wanted(20.0, lambda blocks: 1)}
    assert wishes == {48: 2, 8: 4}


def test_it_is_asked_again_while_it_is_hot_and_not_afterwards():
    hot = HotPrefixes(10.0)
    now_s = fetch(hot, 25, 30)
    assert len(hot.wanted(now_s, lambda blocks: 1)) == 1
    assert hot.wanted(now_s + 1, lambda blocks: 1) == [], "just asked for"
    now_s = fetch(hot, 25, AGAIN_S, now_s)
    assert len(hot.wanted(now_s, lambda blocks: MAX_HOLDERS)) == 1, "so that the copies stay"
    assert hot.wanted(now_s + 60, lambda blocks: 1) == []


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40), st.floats(0, 3)), max_size=40))
def test_it_is_bounded_and_asks_for_prefixes_of_what_was_fetched(fetches):
    hot, now_s = HotPrefixes(0.5), 0.0
    chains = [[(c, n) for n in range(40)] for c in range(6)]
    for chain, stop, pause_s in fetches:
        now_s += pause_s
        hot.fetched(b"", chains[chain], 0, stop, now_s)
        hot.check()
        for wish in hot.wanted(now_s, lambda blocks: 1):
            assert 2 <= wish.num_holders <= MAX_HOLDERS
            assert any(list(wish.blocks) == chain[: len(wish.blocks)] for chain in chains)


class TestReplicator:
    """The shell asks for chunks by the keys that the store has them under."""

    class Clock:
        now = 0.0

        def now_s(self):
            return self.now

    @pytest.fixture
    def mirror(self):
        mirror = CacheMirror()
        keys = [kv_chunk_key(MODEL, block, part) for block in DOCUMENT for part in (0, 1)]
        sequence = count(1)
        for node, held in (("a", keys), ("b", keys[:20])):
            mirror.directory_event(DirectoryEvent(next(sequence), DirectoryEventKind.STORED, node, tuple(held)))
        return mirror

    async def test_it_asks_for_all_parts_of_the_prefix(self, mirror):
        hot, asked, taken = HotPrefixes(10.0), [], []
        clock = self.Clock()
        clock.now = fetch(hot, 15, 30)

        async def ask(keys, holders, for_s):
            asked.append((keys, holders, for_s))
            return len(keys)

        await Replicator(hot, mirror, ask, clock, taken.append).look()
        assert asked == [([kv_chunk_key(MODEL, b, part) for b in DOCUMENT[:96] for part in (0, 1)], 2, 30.0)]
        assert taken == [192]

    async def test_a_master_that_is_away_is_no_end(self, mirror):
        hot, clock = HotPrefixes(10.0), self.Clock()
        clock.now = fetch(hot, 15, 30)

        async def ask(keys, holders, for_s):
            raise MasterUnavailable("it is away")

        await Replicator(hot, mirror, ask, clock, pytest.fail).look()
