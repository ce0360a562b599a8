from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.conductor.index.events import CacheMirror
from tanghulu.conductor.index.prefix_index import Cleared, PrefixIndex, Removed, Stored
from tanghulu.session.load import WorkerLoad
from tanghulu.session.messages import SessionWelcome
from tanghulu.session.outputs import KvChange
from tanghulu.store.directory_feed import DirectoryEvent, DirectoryEventKind
from tanghulu.types import BlockHash, Fingerprint, InstanceId, kv_chunk_key

A, B, C = (InstanceId(name) for name in "abc")


def blocks(*numbers: int) -> list[BlockHash]:
    return [BlockHash(n.to_bytes(16, "big")) for n in numbers]


def test_hits_are_leading_runs():
    index = PrefixIndex()
    index.apply(Stored(A, blocks(0, 1, 2, 3)))
    index.apply(Stored(B, blocks(0, 1)))
    index.apply(Stored(C, blocks(1, 2, 3)))  # without block 0 the others are of no use
    assert index.match(blocks(0, 1, 2, 3, 4)) == {A: 4, B: 2}
    assert index.match(blocks(9)) == {}
    assert index.match([]) == {}
    assert index.num_blocks == 4
    assert index.num_blocks_of(C) == 3
    index.apply(Removed(A, blocks(1, 77)))
    assert index.match(blocks(0, 1, 2)) == {A: 1, B: 2}
    assert index.leading_blocks(blocks(0, 1, 2, 3, 4)) == 4
    index.remove_holder(B)
    assert index.match(blocks(0, 1)) == {A: 1}
    index.apply(Cleared(A))
    index.apply(Cleared(C))
    assert index.num_blocks == 0
    index.check()


NUMBERS = st.lists(st.integers(0, 7), max_size=6)
EVENTS = st.one_of(
    st.tuples(st.just("stored"), st.sampled_from([A, B, C]), NUMBERS),
    st.tuples(st.just("removed"), st.sampled_from([A, B, C]), NUMBERS),
    st.tuples(st.just("cleared"), st.sampled_from([A, B, C]), st.just([])),
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(EVENTS, max_size=20),
    st.permutations(range(8)),
    st.lists(st.integers(1, 8), min_size=1, max_size=3),
)
def test_against_brute_force(history, chain, lengths):
    """Events in any order, prompts of one chain: a block stands for all in front of it, so it cannot be in two."""
    index = PrefixIndex()
    truth: dict[InstanceId, set[int]] = {A: set(), B: set(), C: set()}
    for kind, holder, numbers in history:
        if kind == "stored":
            index.apply(Stored(holder, blocks(*numbers)))
            truth[holder] |= set(numbers)
        elif kind == "removed":
            index.apply(Removed(holder, blocks(*numbers)))
            truth[holder] -= set(numbers)
        else:
            index.apply(Cleared(holder))
            truth[holder] = set()
        index.check()
    assert index.num_blocks == len(set().union(*truth.values()))
    for prompt in (chain[:length] for length in lengths):
        expected = {h: _run(held, prompt) for h, held in truth.items() if _run(held, prompt)}
        assert index.match(blocks(*prompt)) == expected
        assert index.leading_blocks(blocks(*prompt)) == _run(set().union(*truth.values()), prompt)


def _run(held: set[int], prompt: list[int]) -> int:
    return next((i for i, n in enumerate(prompt) if n not in held), len(prompt))


def test_a_long_prompt_is_matched_fast():
    index = PrefixIndex()
    chain = blocks(*range(2000))  # 128k tokens
    for number in range(8):
        index.apply(Stored(InstanceId(f"w{number}"), chain[: 250 * (number + 1)]))
    start = time.process_time()
    for _ in range(10):
        index.match(chain)
    assert (time.process_time() - start) / 10 < 0.01
    assert index.match(chain)[InstanceId("w7")] == 2000


def _welcome(*numbers: int, sequence: int = 1) -> SessionWelcome:
    return SessionWelcome(A, 1, tuple(blocks(*numbers)), sequence, WorkerLoad())


def test_worker_events_go_on_from_the_snapshot_and_a_gap_is_noticed():
    mirror = CacheMirror()
    mirror.welcome(A, _welcome(0, 1, sequence=5))
    mirror.worker_events(A, 5, [KvChange(tuple(blocks(2))), KvChange(removed=tuple(blocks(1)))])
    mirror.worker_events(A, 7, [KvChange(tuple(blocks(1)))])
    assert mirror.hits(blocks(0, 1, 2)).workers == {A: 3}
    assert not mirror.worker_events(A, 9, [KvChange(tuple(blocks(3)))])
    assert mirror.worker_events(A, 10, [KvChange(tuple(blocks(6)))]), "a snapshot is on its way"
    assert mirror.hits(blocks(0, 1, 2, 3)).workers == {A: 3}
    assert mirror.hits(blocks(6)).workers == {}
    mirror.check()
    mirror.snapshot(A, _welcome(4, sequence=20))
    assert mirror.workers.num_blocks == 1
    mirror.worker_events(A, 20, [KvChange(tuple(blocks(5)), cleared=True)])
    assert mirror.hits(blocks(5)).workers == {A: 1}
    assert mirror.hits(blocks(4)).workers == {}
    mirror.check()
    mirror.worker_gone(A)
    mirror.check()
    assert mirror.workers.num_blocks == 0


def test_the_directory_is_mirrored():
    mirror = CacheMirror()
    keys = [kv_chunk_key(Fingerprint(b"f" * 16), b) for b in blocks(0, 1, 2)]

    def tell(kind: DirectoryEventKind, node: str = "", *names: str) -> None:
        mirror.directory_event(DirectoryEvent(1, kind, InstanceId(node), tuple(names)))

    tell(DirectoryEventKind.RESET)
    tell(DirectoryEventKind.STORED, "n1", keys[0], keys[2], "somebody's own key")
    tell(DirectoryEventKind.STORED, "n2", keys[1])
    tell(DirectoryEventKind.SYNCED)
    assert mirror.hits(blocks(0, 1, 2)).store == 3  # a run may lie on several nodes
    tell(DirectoryEventKind.REMOVED, "n1", keys[2])
    assert mirror.hits(blocks(0, 1, 2)).store == 2
    tell(DirectoryEventKind.NODE_GONE, "n2")
    assert mirror.hits(blocks(0, 1, 2)).store == 1
    other_rank = kv_chunk_key(Fingerprint(b"f" * 16), blocks(1)[0], part=1)
    tell(DirectoryEventKind.STORED, "n2", other_rank)
    assert mirror.hits(blocks(0, 1)).store == 1
    tell(DirectoryEventKind.RESET)
    assert mirror.store.num_blocks == 0
    mirror.check()
