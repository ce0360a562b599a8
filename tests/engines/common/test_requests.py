"""What is loaded and saved for an engine's requests, in any order of what may happen to them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tanghulu.engines.common.requests import Block, Loaded, LoadJob, PendingSaves, RequestBook, SaveJob

BLOCK_TOKENS, NUM_RANKS, BLOCK_BYTES = 4, 2, 10


def names(count: int) -> list[bytes]:
    return [bytes([index]) for index in range(count)]


def new_book(max_blocks: int = 100, num_ranks: int = 1) -> RequestBook:
    return RequestBook(BLOCK_TOKENS, PendingSaves(num_ranks, BLOCK_BYTES, max_blocks * BLOCK_BYTES))


def matched(book: RequestBook, num_tokens: int, num_computed: int, num_stored: int) -> int:
    book.arrive("r")
    assert book.may_load("r", 0)
    return book.match("r", num_tokens, num_computed, num_stored)


@pytest.mark.parametrize(
    ("num_tokens", "num_computed", "num_stored", "to_load"),
    [
        (17, 0, 4, 16),
        (16, 0, 4, 12),  # the last token must be computed
        (17, 8, 4, 8),
        (17, 16, 4, 0),
        (17, 12, 1, 0),  # the engine has more than the store
        (17, 6, 4, 0),  # half a block of its own
        (3, 0, 0, 0),
    ],
)
def test_how_much_is_loaded(num_tokens, num_computed, num_stored, to_load):
    assert matched(new_book(), num_tokens, num_computed, num_stored) == to_load


def test_too_few_blocks_are_not_loaded():
    book = RequestBook(BLOCK_TOKENS, PendingSaves(1, 1, 1), min_blocks=3)
    assert matched(book, 17, 0, 2) == 0
    assert matched(book, 17, 0, 3) == 12


def test_one_load_then_what_is_new_is_saved():
    book = new_book()
    assert matched(book, 21, 4, 3) == 8
    book.allocate("r", 8, names(5), [10, 11, 12])
    assert book.take_loads() == [LoadJob("r", (Block(b"\x01", 11), Block(b"\x02", 12)))]
    assert book.take_loads() == []
    assert not book.may_load("r", 0), "its load is under way"
    assert not book.computes
    book.load_ended("r", set())
    assert book.computes
    assert not book.may_load("r", 0), "it was loaded already"
    book.allocate("r", 0, names(5), [10, 11, 12, 13, 14, 15])
    assert book.computed("r", 15, names(5), [10, 11, 12, 13]) is None
    job = book.computed("r", 21, names(5), [10, 11, 12, 13, 14, 15])
    assert job == SaveJob(0, (Block(b"\x03", 13), Block(b"\x04", 14)))
    assert book.computed("r", 21, names(5), [10, 11, 12, 13, 14, 15]) is None


def test_what_failed_to_load_is_saved_again_and_not_loaded_again():
    book = new_book()
    matched(book, 17, 0, 4)
    book.allocate("r", 16, names(4), [10, 11, 12, 13])
    book.load_ended("r", {11, 12, 13})
    assert not book.may_load("r", 0)
    job = book.computed("r", 17, names(4), [10, 11, 12, 13, 14])
    assert job is not None
    assert [block.block_id for block in job.blocks] == [11, 12, 13]
    assert book.may_load("r", 1), "preempted: its blocks are lost, and the store may have them"
    book.match("r", 17, 0, 4)
    book.allocate("r", 16, names(4), [20, 21, 22, 23])
    book.load_ended("r", set())
    assert book.leave("r") == Loaded(ordered=16, arrived=4), "before it ran for the first time"


def test_a_request_that_leaves_in_a_load_is_waited_for():
    book = new_book()
    matched(book, 17, 0, 4)
    book.allocate("r", 16, names(4), [10, 11, 12, 13])
    book.leave("r")
    assert len(book) == 1
    book.check()
    book.load_ended("r", {10})
    assert len(book) == 0
    with pytest.raises(KeyError):
        book.load_ended("r", set())


def test_saves_beyond_the_budget_lose_their_end():
    saves = PendingSaves(NUM_RANKS, BLOCK_BYTES, 3 * BLOCK_BYTES + 1)
    blocks = [Block(name, index) for index, name in enumerate(names(4))]
    job = saves.order(blocks[:2])
    more = saves.order(blocks[2:])
    assert more is not None
    assert (more.blocks, saves.num_skipped, saves.num_pinned) == ((blocks[2],), 1, 3)
    assert saves.order(blocks[3:]) is None
    assert saves.acknowledge(job.job_id) == []
    assert saves.acknowledge(job.job_id) == [0, 1]
    assert saves.acknowledge(more.job_id, 2) == [2]
    assert not saves
    saves.check()
    with pytest.raises(KeyError):
        saves.acknowledge(job.job_id)


class Engine(RuleBasedStateMachine):
    """A scheduler with its pool of blocks, two ranks that transfer, and a book beside it that must lose nothing.

    As in vLLM: the blocks of a request that ends in a load are kept until the load ended; pins count as references.
    """

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.book = new_book(max_blocks=12, num_ranks=NUM_RANKS)
        self.references: Counter[int] = Counter()
        self.next_block = 0
        self.blocks: dict[str, list[int]] = {}
        self.preempted: Counter[str] = Counter()
        self.allowed: Counter[str] = Counter()  # loads: one, and one a preemption
        self.loads: dict[str, tuple[LoadJob, list[int]]] = {}  # under way, and the ranks that still transfer
        self.bad: dict[str, set[int]] = {}
        self.num_loads: Counter[str] = Counter()
        self.saves: dict[int, tuple[SaveJob, list[int]]] = {}
        self.computing: set[str] = set()
        self.gone: set[str] = set()
        self.num_seen = 0

    @rule(target=requests)
    def arrive(self):
        name = f"r{self.num_seen}"
        self.num_seen += 1
        self.book.arrive(name)
        self.blocks[name] = []
        return name

    def take_blocks(self, request: str, count: int) -> None:
        fresh = range(self.next_block, self.next_block + count)
        self.next_block += count
        self.blocks[request] += fresh
        self.references.update(fresh)

    def give_back(self, request: str) -> None:
        self.references.subtract(self.blocks[request])
        self.blocks[request] = []

    @rule(request=requests, num_tokens=st.integers(1, 30), stored=st.integers(0, 8), room=st.booleans())
    def schedule(self, request, num_tokens, stored, room):
        if request in self.gone or request in self.loads or request in self.computing:
            return
        to_load = 0
        if self.book.may_load(request, self.preempted[request]):
            to_load = self.book.match(request, num_tokens, 0, min(stored, num_tokens // BLOCK_TOKENS))
            assert 0 <= to_load < num_tokens
        if not room:
            return  # asked again later
        self.take_blocks(request, -(-num_tokens // BLOCK_TOKENS))
        self.book.allocate(request, to_load, names(num_tokens // BLOCK_TOKENS), self.blocks[request])
        if not to_load:
            self.computing.add(request)
        for job in self.book.take_loads():
            assert job.request_id == request
            assert job.request_id not in self.loads
            self.loads[request] = job, list(range(NUM_RANKS))
            self.bad[request] = set()
            self.num_loads[request] += 1
            assert self.num_loads[request] <= 1 + self.preempted[request]

    @rule(data=st.data(), fails_at=st.none() | st.integers(0, 7))
    def a_rank_ends_a_load(self, data, fails_at):
        if not self.loads:
            return
        request = data.draw(st.sampled_from(sorted(self.loads)))
        job, ranks = self.loads[request]
        ranks.pop()
        assert all(self.references[block.block_id] > 0 for block in job.blocks), "written to after it was given away"
        if fails_at is not None:
            self.bad[request] |= {block.block_id for block in job.blocks[fails_at:]}
        if ranks:
            return
        del self.loads[request]
        bad = self.bad.pop(request)
        self.book.load_ended(request, bad)
        if request in self.gone:
            self.give_back(request)
        elif bad and job.blocks[0].block_id in bad:
            self.give_back(request)  # nothing is left: the engine begins again, and asks again
        else:
            self.computing.add(request)

    @rule(request=requests, num_tokens=st.integers(1, 40))
    def step(self, request, num_tokens):
        if request not in self.computing:
            return
        missing = -(-num_tokens // BLOCK_TOKENS) - len(self.blocks[request])
        self.take_blocks(request, max(0, missing))
        job = self.book.computed(request, num_tokens, names(num_tokens // BLOCK_TOKENS), self.blocks[request])
        if job is not None:
            self.references.update(block.block_id for block in job.blocks)
            self.saves[job.job_id] = job, list(range(NUM_RANKS))

    @rule(data=st.data())
    def a_rank_ends_a_save(self, data):
        if not self.saves:
            return
        job, ranks = self.saves[data.draw(st.sampled_from(sorted(self.saves)))]
        ranks.pop()
        assert all(self.references[block.block_id] > 0 for block in job.blocks), "read from after it was given away"
        freed = self.book.saves.acknowledge(job.job_id)
        self.references.subtract(freed)
        assert (freed == []) == bool(ranks)
        if not ranks:
            assert freed == [block.block_id for block in job.blocks]
            del self.saves[job.job_id]

    @rule(request=requests)
    def preempt(self, request):
        if request in self.computing:
            self.computing.discard(request)
            self.preempted[request] += 1
            self.give_back(request)

    @rule(request=consumes(requests))
    def leave(self, request):
        self.gone.add(request)
        self.computing.discard(request)
        self.book.leave(request)
        if request not in self.loads:
            self.give_back(request)

    @invariant()
    def nothing_is_lost(self):
        self.book.check()
        assert all(count >= 0 for count in self.references.values())
        assert self.book.saves.num_pinned == sum(len(job.blocks) for job, _ in self.saves.values())
        assert bool(self.book.saves) == bool(self.saves)

    def teardown(self):
        """Everything ends: no pin is left, no request, and no load that nobody heard the end of."""
        while self.loads:
            request = next(iter(self.loads))
            job, _ = self.loads.pop(request)
            self.book.load_ended(request, {block.block_id for block in job.blocks})
        for request in [name for name in self.blocks if name not in self.gone]:
            self.book.leave(request)
        for request in self.blocks:
            self.give_back(request)
        for job, ranks in self.saves.values():
            self.references.subtract(self.book.saves.acknowledge(job.job_id, len(ranks)))
        assert len(self.book) == 0
        assert self.book.take_loads() == []
        assert not self.book.saves
        assert self.book.saves.num_pinned == 0
        assert not +self.references


TestAnyOrder = Engine.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
