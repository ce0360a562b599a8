"""Placement, the event ring, and the two memories in step."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.errors import Conflict
from tanghulu.store.followed_ranges import EventCursor
from tanghulu.store.master.core import Master
from tanghulu.store.master.directory import listing, ranges
from tanghulu.store.master.directory.events import SHRINK_WEIGHT, EventRing, Lagged
from tanghulu.store.master.directory.listing import list_keys
from tanghulu.store.master.directory.placement import NUM_SPARES, PlacementCandidate, PlacementRequest, PlacementTable
from tanghulu.store.master.directory.ranges import RangeDirectories
from tanghulu.store.master.directory.rebuild import ALONE_S
from tanghulu.store.protocol.announcements import ChunkEntry, NodeAnnouncement, Removal, ReportPiece
from tanghulu.store.protocol.directory_events import DirectoryEvent, DirectoryEventKind
from tanghulu.store.protocol.key_slots import NUM_SLOTS
from tanghulu.store.protocol.messages import Location
from tanghulu.types import Place, Role
from tests.store.master.running_master import instance


def candidate(
    name: str, where: str = "z/r/h", capacity: int = 1000, used: int = 0, draining: bool = False
) -> PlacementCandidate:
    return PlacementCandidate(name, Place.parse(where), capacity, used, draining)


def place(
    nodes: Sequence[PlacementCandidate], request: PlacementRequest, rng: random.Random
) -> list[PlacementCandidate]:
    table = PlacementTable()
    for node in nodes:
        table.set(node)
    chosen = table.place(request, rng)
    table.check()
    return chosen


def ids(chosen: list[PlacementCandidate]) -> list[str]:
    return [c.node_id for c in chosen]


def test_preferred_then_local_then_others() -> None:
    nodes = [candidate("far", "z/r/h2"), candidate("near", "z/r/h1", used=900), candidate("near2", "z/r/h1", used=100)]
    client = Place.parse("z/r/h1")
    assert ids(place(nodes, PlacementRequest(1, 1, "far", client), random.Random(0)))[0] == "far"
    assert ids(place(nodes, PlacementRequest(1, 1, "", client), random.Random(0)))[0] == "near2"
    assert ids(place(nodes, PlacementRequest(1, 1, "gone", client), random.Random(0)))[0] == "near2"
    assert len(place(nodes, PlacementRequest(1, 1), random.Random(0))) == 3


def test_the_worked_example() -> None:
    nodes = [
        candidate("A", "z/r1/h1", used=0),
        candidate("B", "z/r1/h1", used=500),
        candidate("C", "z/r1/h2"),
        candidate("D", "z/r2/h3"),
    ]
    for seed in range(20):
        request = PlacementRequest(1, 2, client_place=Place.parse("z/r1/h1"))
        assert ids(place(nodes, request, random.Random(seed))) == ["A", "D", "C", "B"]


def test_two_choices_prefer_the_emptier_without_herding() -> None:
    nodes = [candidate(f"n{n}", f"z/r/h{n}", used=100 * n) for n in range(8)]
    rng = random.Random(7)
    firsts = Counter(ids(place(nodes, PlacementRequest(1), rng))[0] for _ in range(4000))
    assert firsts["n7"] == 0, "the fullest loses every pairing"
    assert 0.2 < firsts["n0"] / 4000 < 0.3, "the emptiest wins those that it is drawn in: 7 of 28"


def test_among_many_nodes_it_is_as_among_few() -> None:
    """Of 200 nodes in 10 racks some drain and some are too small: what is drawn is what a look at all would allow."""
    nodes = [
        candidate(f"n{n}", f"z/r{n % 10}/h{n // 2}", capacity=100 if n % 3 else 10, used=n % 100, draining=n % 7 == 0)
        for n in range(200)
    ]
    able = {node.node_id for node in nodes if node.takes(50)}
    rng, drawn = random.Random(3), set[str]()
    for _ in range(2000):
        chosen = place(nodes, PlacementRequest(50, 3), rng)
        assert len({node.rack for node in chosen}) == len(chosen) == 3 + NUM_SPARES
        drawn.add(chosen[0].node_id)
        assert drawn <= able
    assert len(drawn) > len(able) * 0.9, "nobody is left out but the fullest"


def test_one_that_fits_among_many_that_do_not_is_found() -> None:
    nodes = [candidate(f"n{n}", f"z/r/h{n}", capacity=10) for n in range(500)] + [candidate("large")]
    assert ids(place(nodes, PlacementRequest(50), random.Random(1))) == ["large"]


def test_placement_follows_the_nodes() -> None:
    table, rng = PlacementTable(), random.Random(1)
    for n in range(40):
        table.set(candidate(f"n{n}", f"z/r/h{n}"))
    for n in range(39):
        table.set(candidate(f"n{n}", f"z/r/h{n}", draining=True)) if n % 2 else table.remove(f"n{n}")
        table.check()
    assert ids(table.place(PlacementRequest(1), rng)) == ["n39"]


@given(
    st.lists(
        st.tuples(st.sampled_from(["z/r1/h1", "z/r1/h2", "z/r2/h3"]), st.integers(0, 3), st.booleans()), max_size=8
    ),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_placement_always(nodes, size, replicas, seed) -> None:
    candidates = [candidate(str(n), where, cap, cap, drain) for n, (where, cap, drain) in enumerate(nodes)]
    chosen = place(candidates, PlacementRequest(size, replicas, "3", Place.parse("z/r1/h1")), random.Random(seed))
    able = [c for c in candidates if not c.draining and c.capacity_bytes >= max(size, 1)]
    assert len(set(ids(chosen))) == len(chosen) == min(len(able), replicas + NUM_SPARES)
    assert all(c in able for c in chosen)
    racks = {c.place.rack for c in able}
    if len(chosen) >= 2 and len(racks) == 2:
        assert chosen[0].place.rack != chosen[1].place.rack


@given(st.lists(st.integers(1, 6), max_size=40), st.integers(1, 10), st.integers(1, 10))
def test_ring_keeps_the_newest(weights, max_weight, read_weight) -> None:
    ring: EventRing[int] = EventRing(max_weight)
    kept: deque[tuple[int, int]] = deque()
    for number, weight in enumerate(weights, start=1):
        assert ring.append(number, weight) == number
        kept.append((number, weight))
        while sum(w for _, w in kept) > max_weight and len(kept) > 1:
            kept.popleft()
        ring.check()
    for after in range(-1, len(weights) + 2):
        if after > len(weights) or after + 1 < (kept[0][0] if kept else 1):
            with pytest.raises(Lagged):
                ring.read(after, read_weight)
            continue
        got, cursor = [], after
        while taken := ring.read(cursor, read_weight):
            assert len(taken) == 1 or sum(weights[n - 1] for n, _ in taken) <= read_weight
            assert all(number == event for number, event in taken)
            got += [number for number, _ in taken]
            cursor = taken[-1][0]
        assert got == list(range(after + 1, len(weights) + 1))


def test_a_ring_shrinks_a_few_events_at_a_time() -> None:
    """A million events that leave at once would hold up the master for half a second."""
    ring: EventRing[int] = EventRing(10 * SHRINK_WEIGHT)
    for number in range(10 * SHRINK_WEIGHT):
        ring.append(number)
    ring.max_weight = SHRINK_WEIGHT
    lengths = []
    for number in range(12):
        ring.append(number)
        ring.check()
        lengths.append(ring.last - ring.first + 1)
    assert lengths == [*range(9 * SHRINK_WEIGHT, SHRINK_WEIGHT - 1, -SHRINK_WEIGHT), *[SHRINK_WEIGHT] * 3]


def test_the_log_is_as_long_as_there_are_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that come and go leave a log no longer than what a snapshot would cost its reader."""
    monkeypatch.setattr(ranges, "MIN_LOG_WEIGHT", 16)
    directories = RangeDirectories(0.0)
    directories.node_registered(instance("n"), 0.0)
    for number in range(200):
        directories.announce(NodeAnnouncement("n", 7, [ChunkEntry(f"k{number}", 1, 1)]), 0.0)
    directories.tick(0.1)
    assert directories.log.max_weight == 200
    for number in range(200):
        directories.announce(NodeAnnouncement("n", 7, removed=[Removal(f"k{number}", 1)]), 0.2)
    directories.tick(0.3)
    assert directories.log.max_weight == 16
    directories.check()


def test_leases_and_directory_keep_in_step() -> None:
    master = Master(1, now_s=0.0)
    lease = master.register(instance("n"), 1.0, 0.0)
    master.register(instance("w", Role.BOTH), 9.0, 0.0)
    master.announce(NodeAnnouncement("n", 7, report_id=1, piece=ReportPiece(0, NUM_SLOTS)), 0.0)
    master.directory.tick(ALONE_S)
    assert master.directory.is_ready
    master.announce(NodeAnnouncement("n", 7, [ChunkEntry("k", 1, 1)]), 0.5)
    master.check()
    assert master.keep_alive("n", lease, 0.9)
    assert master.tick(1.8, 1.8) == []
    assert [i.id for i in master.tick(1.9, 0.1)] == ["n"]
    assert master.directory.locate(["k"]) == [None]
    assert not master.keep_alive("n", lease, 2.0)
    master.check()
    kinds = [event.kind for _, event in master.directory.log.read(1, 100)]  # behind READY's own
    assert kinds == [DirectoryEventKind.STORED, DirectoryEventKind.NODE_GONE]


def test_a_node_stays_in_the_directory_when_something_else_takes_its_id() -> None:
    master = Master(1, now_s=0.0)
    master.register(instance("n"), 1.0, 0.0)
    with pytest.raises(Conflict, match="is a node and cannot register as a worker"):
        master.register(instance("n", Role.BOTH), 1.0, 0.0)
    master.check()
    assert master.directory.num_nodes == 1


def test_a_master_that_stood_still_does_not_blame_the_others() -> None:
    master = Master(1, now_s=0.0)
    master.register(instance("n"), 1.0, 0.0)
    assert master.tick(0.05, 0.05) == []
    assert master.tick(10.0, 0.05) == [], "its renewals may wait in the master's sockets"
    assert [i.id for i in master.tick(11.0, 0.95)] == ["n"]


def event(sequence: int, kind: DirectoryEventKind) -> DirectoryEvent:
    return DirectoryEvent(sequence, kind)


def test_cursor_resumes_only_behind_a_whole_snapshot() -> None:
    cursor = EventCursor()
    assert cursor.take(5, [event(9, DirectoryEventKind.RESET)], 0, 0)
    assert cursor.resumes_after == 0
    assert cursor.take(5, [event(9, DirectoryEventKind.SYNCED)], 0, 0)
    assert (cursor.resumes_after, cursor.master_generation) == (9, 5)
    assert cursor.take(5, [], 10, 12)
    assert cursor.resumes_after == 12
    assert not cursor.take(5, [], 14, 15), "13 was lost"
    assert cursor.resumes_after == 0
    assert not cursor.take(5, [], 15, 16)


def test_cursor_does_not_mix_masters() -> None:
    cursor = EventCursor()
    cursor.take(5, [event(9, DirectoryEventKind.SYNCED)], 0, 0)
    assert not cursor.take(6, [], 10, 10)


def test_a_page_does_not_walk_over_all_dead_keys_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller goes on behind the last one that was looked at; no living key is left out."""
    monkeypatch.setattr(listing, "MAX_DEAD", 4)
    living = {"k05": "node-a", "k11": "node-b"}

    class Table:
        def keys_from(self, first: str, *, inclusive: bool = True) -> list[str]:
            return [f"k{n:02}" for n in range(20) if f"k{n:02}" > first or (inclusive and f"k{n:02}" == first)]

        def find(self, key: str) -> Location | None:
            return Location(1, 1, ("n",), 1) if key in living else None

    after, got, num_pages = "", [], 0
    while True:
        page = list_keys(Table(), "k", after, 1)  # type: ignore[arg-type]
        got += [entry.key for entry in page.keys]
        num_pages += 1
        if not page.more:
            break
        after = page.walked_to or page.keys[-1].key
    assert got == ["k05", "k11"]
    assert num_pages > 3
