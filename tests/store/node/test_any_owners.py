"""Any sequence of puts, removals, messages and moves of ranges: each owner comes to know what the node holds."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tanghulu.store.node.state.chunk import Chunk
from tanghulu.store.node.state.outbox import MasterOutbox, ReportMessage
from tanghulu.store.node.state.outcomes import Reserved
from tanghulu.store.protocol.key_slots import NUM_RANGES, RANGE_SLOTS, range_of
from tanghulu.store.protocol.range_map import RangeMap
from tanghulu.store.protocol.terms import Term
from tanghulu.types import Address, ChunkKey
from tests.store.node.rig import GENERATION, make_state, new, put, reserve_or_wait

KEYS = [f"k{n}" for n in range(12)]
NUMBERS = sorted({range_of(key) for key in KEYS})
A, B = Address("a", 1), Address("b", 1)
owners = st.sampled_from([A, A, B, B, None])


class AnyOwners(RuleBasedStateMachine):
    """Two masters, each with what it knows of its own ranges, and a node that hears late who owns what."""

    def __init__(self) -> None:
        super().__init__()
        self.state = make_state()
        self.reports = self.state.reports
        self.true_map = RangeMap(1, 7, (A,) * NUM_RANGES, (1,) * NUM_RANGES)
        self.known: dict[tuple[Address, int], dict[str, int]] = {(A, number): {} for number in range(NUM_RANGES)}
        self.version = 1
        self.under_way: list[tuple[Address, MasterOutbox, ReportMessage]] = []
        self.num_removed = 0
        self.reports.take_map(self.true_map)
        self.state.begin_reports()

    def holds(self) -> dict[str, int]:
        found = (self.state.chunks.table.find(ChunkKey(key)) for key in KEYS)
        return {chunk.key: chunk.version for chunk in found if chunk is not None}

    # --- what happens at the node

    @rule(key=st.sampled_from(KEYS))
    def put(self, key: str) -> None:
        self.version += 1
        put(self.state, new(key, version=self.version))

    @rule(key=st.sampled_from(KEYS))
    def remove_and_wait(self, key: str) -> None:
        gone = self.holds().get(key)
        if self.state.chunks.remove(ChunkKey(key)):
            self.reports.flush(lambda: self.must_be_gone(key, gone))

    def must_be_gone(self, key: str, version: int | None) -> None:
        self.num_removed += 1
        for (_, number), known in self.known.items():
            assert number != range_of(key) or known.get(key) != version, f"{key} was said to be removed"

    @rule(key=st.sampled_from(KEYS))
    def evict(self, key: str) -> None:
        chunk = self.state.chunks.table.find(ChunkKey(key))
        if chunk is not None:
            self.state.chunks.evict(chunk)

    @rule()
    def report(self) -> None:
        self.state.begin_reports()
        while (chunks := self.reports.unsorted) is not None:
            chunks.sort(5)

    # --- the masters

    @rule(moves=st.lists(st.tuples(st.sampled_from(NUMBERS), owners), min_size=1, max_size=6), hears=st.booleans())
    def move(self, moves: list[tuple[int, Address | None]], hears: bool) -> None:
        self.version += 1
        owner_of, terms = list(self.true_map.owners), list(self.true_map.terms)
        for number, owner in moves:
            for each in (A, B):
                self.known.pop((each, number), None)
            owner_of[number] = owner
            if owner is not None:
                terms[number], self.known[owner, number] = self.version, {}
        self.true_map = RangeMap(self.version, 7, tuple(owner_of), tuple(terms))
        if hears:
            self.hear()

    @rule()
    def hear(self) -> None:
        if self.true_map.replaces(self.reports.map):
            self.reports.take_map(self.true_map)

    @rule(owner=st.sampled_from([A, B]))
    def send(self, owner: Address) -> None:
        outbox = self.reports.owners.get(owner)
        if outbox is not None and not any(each is outbox for _, each, _ in self.under_way):
            self.under_way.append((owner, outbox, outbox.take()))

    @rule(index=st.integers(0, 1), end=st.sampled_from(["answered", "answered", "lost", "answer lost"]))
    def arrive(self, index: int, end: str) -> None:
        if not self.under_way:
            return
        owner, outbox, message = self.under_way.pop(index % len(self.under_way))
        is_taken = end != "lost" and self.take(owner, message)
        if outbox is not self.reports.owners.get(owner):
            return  # a late answer of who owns nothing any more
        if not is_taken or end == "answer lost":
            outbox.requeue()
            return
        outbox.done()
        outbox.granted(2, bytes([RANGE_SLOTS] * NUM_RANGES))
        for chunk in message.added:
            if message.concerns(chunk.key):
                self.state.reported(chunk, accepted=True)

    def take(self, owner: Address, message: ReportMessage) -> bool:
        """All or nothing: whether every key is this master's."""
        told = [] if message.piece is None else message.piece.chunks
        removed = [*message.removed, *message.deleted]
        named = [chunk.key for chunk in (*message.added, *told)] + [key for key, _ in removed]
        if any((owner, range_of(key)) not in self.known for key in named):
            return False
        for key, version in removed:
            known = self.known[owner, range_of(key)]
            if known.get(key) == version:
                del known[key]
        for chunk in (*message.added, *told):
            self.known[owner, range_of(chunk.key)][chunk.key] = chunk.version
        return True

    # --- what must hold

    @invariant()
    def books_balance(self) -> None:
        self.state.check()

    def teardown(self) -> None:
        """When all ranges have owners, and nothing fails any more, every master knows what the node holds."""
        self.move([(number, A if number % 2 else B) for number in NUMBERS], hears=True)
        while self.under_way:
            self.arrive(0, "answered")
        for _ in range(200):
            self.report()
            for owner in list(self.reports.owners):
                self.send(owner)
            while self.under_way:
                self.arrive(0, "answered")
        assert not self.reports.is_reporting
        assert self.reports.removals_acknowledged
        known: dict[str, int] = {}
        for keys in self.known.values():
            known |= keys
        assert known == self.holds()


TestAnyOwners = AnyOwners.TestCase
TestAnyOwners.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


def test_what_is_under_way_to_the_old_owner_is_told_the_new_one() -> None:
    state = make_state()
    reports, number, flushed = state.reports, range_of("k1"), list[str]()
    reports.take_map(RangeMap(10, 7, (A,) * NUM_RANGES, (10,) * NUM_RANGES))
    put(state, new("k1"))
    put(state, new("k2"))
    old = reports.owners[A]
    state.chunks.remove(ChunkKey("k2"))
    put(state, new("k1-gone"))
    message = old.take()
    reports.flush(lambda: flushed.append("told"))
    owner_of = tuple(B if each == number else A for each in range(NUM_RANGES))
    reports.take_map(RangeMap(20, 7, owner_of, tuple(20 if each is B else 10 for each in owner_of)))
    (chunk,) = (each for each in message.added if each.key == "k1")
    assert not message.concerns(chunk.key), "what the old owner says of it means nothing"
    assert reports.is_pending(chunk)
    assert [each.key for each in reports.owners[B].take().added] == ["k1"]
    old.requeue()
    assert "k1" not in [each.key for each in old.take().added]
    old.done()
    assert not flushed, "the range that has moved may have had the removal"
    reports.owners[B].done()
    assert not flushed or reports.removals_acknowledged
    reports.check()


def test_a_flush_waits_for_what_came_behind_the_message_under_way() -> None:
    state = make_state()
    reports, number, flushed = state.reports, range_of("k1"), list[str]()
    other = next(key for key in KEYS if range_of(key) != number)
    owner_of = tuple(A if each == number else B for each in range(NUM_RANGES))
    reports.take_map(RangeMap(10, 7, owner_of, (10,) * NUM_RANGES))
    for key in ("k1", other):
        put(state, new(key))
        state.chunks.remove(ChunkKey(key))
    reports.flush(lambda: flushed.append("told"))
    heir = reports.owners[B]
    assert [key for key, _ in heir.take().deleted] == [other]
    terms = tuple(20 if owner is A else 10 for owner in owner_of)
    reports.take_map(RangeMap(20, 7, (B,) * NUM_RANGES, terms))
    heir.done()
    reports.check()
    assert not flushed, "the new owner has yet to hear of k1"
    assert [key for key, _ in heir.take().deleted] == ["k1"]
    heir.done()
    assert flushed == ["told"]


def test_a_commit_at_an_owner_whose_term_is_over_is_not_valid() -> None:
    state = make_state()
    key = ChunkKey("k1")
    reserved = reserve_or_wait(state, new(key), None)
    assert isinstance(reserved, Reserved)
    chunk = reserved.chunk
    assert isinstance(chunk, Chunk)
    terms = tuple(20 if number == range_of(key) else 10 for number in range(NUM_RANGES))
    state.reports.take_map(RangeMap(30, 7, (A,) * NUM_RANGES, terms))
    assert state.is_commit_valid(chunk, GENERATION, Term(20, 7))
    assert not state.is_commit_valid(chunk, GENERATION, Term(19, 7))
    assert state.is_commit_valid(chunk, GENERATION, Term(19, 8)), "maps of two etcds cannot be compared"
