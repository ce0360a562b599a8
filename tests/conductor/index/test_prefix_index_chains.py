"""The prefix index against brute force on real chains: told in any order, with holes, by holders that come and go."""

from __future__ import annotations

import random
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tanghulu.conductor.index import nodes as index_node
from tanghulu.conductor.index import prefix_index
from tanghulu.conductor.index.nodes import IndexNode, leading_ones, ranges, slots
from tanghulu.conductor.index.prefix_index import Cleared, PrefixIndex, Removed, Stored
from tanghulu.hashing import as_tokens, chain_hashes, root_hash
from tanghulu.types import BlockHash, Fingerprint, InstanceId

ROOT = root_hash(Fingerprint(b"f" * 16))
HOLDERS = [InstanceId(f"w{number}") for number in range(5)]


def chain_of(tokens: list[int]) -> list[BlockHash]:
    return chain_hashes(ROOT, as_tokens(tokens), 1)


class Oracle:
    """Sets, and loops over them."""

    def __init__(self) -> None:
        self.held: dict[InstanceId, set[BlockHash]] = {}

    def apply(self, event: Stored | Removed | Cleared) -> None:
        held = self.held.setdefault(event.holder, set())
        if isinstance(event, Stored):
            held |= set(event.blocks)
        else:
            held -= set(event.blocks) if isinstance(event, Removed) else set(held)

    def match(self, prompt: list[BlockHash]) -> dict[InstanceId, int]:
        runs = {holder: _run(held, prompt) for holder, held in self.held.items()}
        return {holder: run for holder, run in runs.items() if run}

    def union(self) -> set[BlockHash]:
        return set().union(*self.held.values())


def _run(held: set[BlockHash], prompt: list[BlockHash]) -> int:
    return next((i for i, block in enumerate(prompt) if block not in held), len(prompt))


@pytest.fixture(autouse=True, params=["small", "usual"])
def bounds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small bounds short chains take every path: bisection, several nodes an event, nodes that are not joined."""
    if request.param == "small":
        monkeypatch.setattr(index_node, "COMPARED_BLOCKS", 1)
        monkeypatch.setattr(prefix_index, "MAX_EVENT_BLOCKS", 5)
        monkeypatch.setattr(prefix_index, "MAX_NODE_BLOCKS", 8)
        monkeypatch.setattr(prefix_index, "SMALL_EVENT_BLOCKS", 2)
        monkeypatch.setattr(prefix_index, "SHRINK_MIN_BLOCKS", 4)
        monkeypatch.setattr(prefix_index, "MAX_PARTIAL_HOLDERS", 2)


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
PIECES = st.tuples(PROMPTS, st.integers(0, 13), st.sampled_from(["ahead", "backwards", "mixed"]))
STEPS = st.one_of(
    st.tuples(st.just("ask"), PROMPTS),
    st.tuples(st.just("clear"), st.sampled_from(HOLDERS)),
    *(st.tuples(st.just(kind), st.sampled_from(HOLDERS), st.lists(PIECES, max_size=3)) for kind in ("store", "remove")),
)


def _blocks(pieces: list[tuple[list[int], int, str]]) -> list[BlockHash]:
    """Parts of chains, one behind the other or shuffled, as a worker's step may tell them."""
    told: list[BlockHash] = []
    for tokens, start, order in pieces:
        piece = chain_of(tokens)[start:]
        told += piece[::-1] if order == "backwards" else piece
        if order == "mixed":
            random.Random(len(told)).shuffle(told)
    return told


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.lists(STEPS, max_size=30), st.lists(PROMPTS, max_size=5))
def test_no_answer_differs_from_brute_force(steps, prompts):
    index, oracle = PrefixIndex(), Oracle()
    for kind, *what in [*steps, *(("ask", prompt) for prompt in prompts)]:
        if kind == "ask":
            prompt = chain_of(what[0])
            assert index.match(prompt) == oracle.match(prompt)
            assert index.leading_blocks(tuple(prompt)) == _run(oracle.union(), prompt)
        else:
            event = Cleared(what[0])
            if kind != "clear":
                event = (Stored if kind == "store" else Removed)(what[0], _blocks(what[1]))
            index.apply(event)
            oracle.apply(event)
        index.check()
    assert index.num_blocks == len(oracle.union())
    assert {h: index.num_blocks_of(h) for h in HOLDERS} == {h: len(oracle.held.get(h, ())) for h in HOLDERS}
    assert set(index.holders) == {h for h, held in oracle.held.items() if held}


@pytest.mark.parametrize("seed", range(3))
def test_long_chains_with_holes_and_branches(seed):
    """Chains of up to 300 blocks that branch, evicted from the tail and in the middle, while sessions go on."""
    chance = random.Random(seed)
    index, oracle = PrefixIndex(), Oracle()
    chains = [chain_of([1] * 300)]
    for step in range(250):
        chains.append(_grown(chance, chance.choice(chains[-8:]), step))
        chain, holder = chance.choice(chains), chance.choice(HOLDERS)
        start, stop = sorted(chance.choices(range(len(chain) + 1), k=2))
        event = chance.choice(
            [
                Stored(holder, chain),
                Stored(holder, chain[:stop]),
                Stored(holder, chain[start:stop]),
                Removed(holder, chain[:start:-1]),
                Removed(holder, chance.sample(chain, min(len(chain), 7))),
                Removed(holder, chain[start:stop]) if chance.random() < 0.8 else Cleared(holder),
            ]
        )
        index.apply(event)
        oracle.apply(event)
        for prompt in chance.choices(chains, k=3):
            assert index.match(prompt) == oracle.match(prompt), f"seed {seed}, step {step}"
        if step % 10 == 0:
            index.check()
    index.check()


def _grown(chance: random.Random, chain: list[BlockHash], step: int) -> list[BlockHash]:
    kept = chain[: chance.randrange(1, len(chain) + 1)]
    return kept + chain_hashes(kept[-1], as_tokens([step] * chance.randrange(1, 40)), 1)


def test_a_session_told_block_by_block_becomes_one_node(bounds):
    index = PrefixIndex()
    chains = [chain_of([number, *range(6)]) for number in range(2)]
    for blocks in zip(*chains, strict=True):  # two sequences decode side by side
        index.apply(Stored(HOLDERS[0], blocks))
    assert [index.match(chain) for chain in chains] == [{HOLDERS[0]: 7}] * 2
    index.check()
    assert "14 blocks in 2 nodes" in repr(index)


def test_eviction_from_the_tail_by_one_of_two_holders_leaves_one_node(bounds):
    index = PrefixIndex()
    chain = chain_of(list(range(5)))
    for holder in HOLDERS[:2]:
        index.apply(Stored(holder, chain))
    for kept in (4, 3, 2, 1):
        index.apply(Removed(HOLDERS[0], chain[kept : kept + 1]))
        assert index.match(chain) == {HOLDERS[0]: kept, HOLDERS[1]: 5}
    assert "5 blocks in 1 nodes" in repr(index)


@pytest.mark.parametrize("bounds", ["usual"], indirect=True)
def test_the_worked_example_of_the_docs(bounds):
    a, b = HOLDERS[:2]
    index = PrefixIndex()
    h = chain_of(list(range(8)))
    index.apply(Stored(a, h[:6]))
    index.apply(Stored(b, h[:4]))
    index.apply(Removed(a, h[2:3]))
    (node,) = index._nodes
    assert (node.blocks, node.full, node.partial, node.chained) == (h[:6], 0, {1: 0b001111, 0: 0b111011}, 1)
    assert index.match(h) == {a: 2, b: 4}
    assert node.chained == 6
    index.apply(Removed(b, h[2:3]))
    assert (node.full, node.partial, node.chained) == (0b01, {1: 0b00111}, 2)
    assert index.match(h) == {a: 2, b: 2}
    assert sorted(n.blocks for n in index._nodes) == sorted([h[:2], h[3:6]])
    index.apply(Stored(a, h[2:3]))
    assert index.match(h) == {a: 6, b: 2}
    assert index.match(h) == {a: 6, b: 2}
    (node,) = index._nodes
    assert (node.blocks, node.chained) == (h[:6], 6)


def test_a_request_under_way_is_a_holder_like_others():
    """It will have its whole prompt, of which some is there already; when it ends others' claims stay."""
    index = PrefixIndex()
    chain = chain_of(list(range(9)))
    requests = [InstanceId("request 1"), InstanceId("request 2")]
    index.apply(Stored(requests[0], chain[:6]))
    index.apply(Stored(requests[1], chain))
    assert index.match(chain) == {requests[0]: 6, requests[1]: 9}
    index.apply(Cleared(requests[1]))
    assert index.match(chain) == {requests[0]: 6}
    assert index.num_blocks == 6
    index.check()


def test_a_prefix_that_many_hold_stays_apart_from_what_few_hold(bounds):
    """So a look-up takes the many at once, and does not go through a bitmap for each."""
    index = PrefixIndex()
    prompt = chain_of(list(range(7)))
    many = [InstanceId(f"worker {number}") for number in range(100)]
    for holder in many:
        index.apply(Stored(holder, prompt[:4]))
    index.apply(Stored(many[0], prompt))
    for _ in range(2):
        assert index.match(prompt) == dict.fromkeys(many, 4) | {many[0]: 7}
    assert "7 blocks in 2 nodes, 100 holders" in repr(index)
    index.check()


def test_the_cap_forgets_what_nobody_asks_for_and_events_go_on():
    index = PrefixIndex(max_blocks=12)
    chains = [chain_of([number, 0, 0, 0]) for number in range(4)]
    for number in range(3):
        index.apply(Stored(HOLDERS[number], chains[number]))
    assert index.match(chains[0]) == {HOLDERS[0]: 4}  # so this one has a second chance
    index.apply(Stored(HOLDERS[3], chains[3]))
    index.check()
    assert [index.num_blocks_of(holder) for holder in HOLDERS[:4]] == [4, 0, 4, 4]
    index.apply(Removed(HOLDERS[1], chains[1]))  # forgotten meanwhile: no error
    index.apply(Stored(HOLDERS[1], chains[1]))
    assert [index.match(chain) for chain in chains] == [{HOLDERS[0]: 4}, {HOLDERS[1]: 4}, {}, {HOLDERS[3]: 4}]
    index.check()


def test_memory_is_given_back_when_holders_go():
    index = PrefixIndex()
    for number in range(100):
        index.apply(Stored(HOLDERS[number % 5], chain_of([number] * 100)))
    full = sys.getsizeof(index._node_of)
    for holder in HOLDERS:
        index.remove_holder(holder)
        index.check()
    assert (index.num_blocks, index.holders) == (0, [])
    assert sys.getsizeof(index._node_of) <= full / 8
    index.apply(Stored(HOLDERS[4], chain_of([7])))
    assert index._slots.find(HOLDERS[4]) == 0  # slots are given again, so masks stay small


def test_bitmaps():
    assert list(slots(0b1001)) == [0, 3]
    assert [leading_ones(bits) for bits in (0, 1, 0b10111, 0b110)] == [0, 1, 3, 0]
    assert list(ranges(0b110011)) == [(4, 6), (0, 2)]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.integers(0, 255), min_size=1, max_size=4), st.integers(1, 7))
def test_a_node_cut_and_joined_again_is_what_it_was(bitmaps, cut):
    blocks = chain_of(list(range(8)))
    node = IndexNode(list(blocks), full=1 << 20, chained=8)
    for slot, bits in enumerate(bitmaps):
        node.hold(slot, bits)
    before = {slot: node.bits(slot) for slot in range(21)}
    front = node.take(0, cut)
    node.check()
    front.check()
    node.chained = len(node)
    front.join(node)
    front.check()
    assert (front.blocks, front.chained) == (blocks, 8)
    assert {slot: front.bits(slot) for slot in range(21)} == before


@pytest.mark.parametrize("held", [0, 0b1, 0b1111, 0b111111, 0b11111111])
def test_a_stretch_is_found_wherever_its_holder_ends(bounds, held):
    """What a holder has last is only where to look first."""
    chain = chain_of(list(range(8)))
    node = IndexNode(list(chain), full=1)
    assert node.stretch(chain[3:1:-1], held) == 0b1100
    assert node.stretch(chain[1:4], held) == 0b1110
    assert node.stretch([chain[3], chain[1]], held) == 0
