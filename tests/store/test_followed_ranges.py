"""What a follower knows of ranges that change hands: masters in memory, random moves, losses and late maps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import pytest

from tanghulu.store.followed_ranges import FollowedRanges, OwnerStream
from tanghulu.store.protocol.directory_events import DirectoryEvent, DirectoryEventKind
from tanghulu.store.protocol.key_slots import NUM_RANGES, bits_of, range_of
from tanghulu.store.protocol.range_map import RangeMap
from tanghulu.types import Address

K = DirectoryEventKind
NODES = ("a", "b", "c")
KEYS = [f"key{number}" for number in range(300)]
MASTERS = [Address("10.0.0.1", 7000 + number) for number in range(3)]
Pairs = set[tuple[str, str]]


@dataclass(eq=False)
class Master:
    """The log of one generation of a master, as it answers followers."""

    generation: int
    log: list[DirectoryEvent] = field(default_factory=list)

    def tell(self, kind: DirectoryEventKind, node: str = "", keys: tuple[str, ...] = (), ranges: int = 0) -> None:
        self.log.append(DirectoryEvent(len(self.log) + 1, kind, node, keys, ranges))


class World:
    """Owners of ranges, what nodes hold, and a follower whose streams break, lag, and are told of moves late."""

    def __init__(self, seed: int, most_keys: int) -> None:
        self.rng = Random(seed)
        self.follower = FollowedRanges(most_keys)
        self.version = 1
        self.masters = {address: Master(number + 1) for number, address in enumerate(MASTERS)}
        for master in self.masters.values():
            master.tell(K.RESET)
        self.owners: list[Address] = [self.rng.choice(MASTERS) for _ in range(NUM_RANGES)]
        self.terms = [1] * NUM_RANGES
        self.held: Pairs = set()
        self.mirror: Pairs = set()
        self.synced = False
        self.streams: dict[OwnerStream, Iterator[tuple[list[DirectoryEvent], int, int]]] = {}

    # --- masters

    def map(self) -> RangeMap:
        return RangeMap(self.version, 5, tuple(self.owners), tuple(self.terms))

    def change(self) -> None:
        node, key = self.rng.choice(NODES), self.rng.choice(KEYS)
        master, pair = self.masters[self.owners[range_of(key)]], (node, key)
        if pair in self.held:
            self.held.remove(pair)
            master.tell(K.REMOVED, node, (key,))
        else:
            self.held.add(pair)
            master.tell(K.STORED, node, (key,))

    def lose_node(self) -> None:
        node = self.rng.choice(NODES)
        self.held = {pair for pair in self.held if pair[0] != node}
        for master in self.masters.values():
            master.tell(K.NODE_GONE, node)

    def move(self) -> None:
        """Some ranges get another owner, or come back to the same one in another term; the old one tells so."""
        self.version += 1
        for number in self.rng.sample(range(NUM_RANGES), self.rng.randint(1, 30)):
            self.masters[self.owners[number]].tell(K.MOVED, ranges=1 << number)
            self.owners[number], self.terms[number] = self.rng.choice(MASTERS), self.version

    def restart(self) -> None:
        """A master dies and comes back with nothing; who follows it loses the stream."""
        self.version += 1
        address = self.rng.choice(MASTERS)
        self.masters[address] = Master(self.version + 100)
        self.masters[address].tell(K.RESET)
        for number in range(NUM_RANGES):
            if self.owners[number] == address:
                self.terms[number] = self.version
        for stream in [each for each in self.streams if each.owner == address]:
            self.cut(stream)

    # --- the follower

    def cut(self, stream: OwnerStream) -> None:
        self.streams.pop(stream, None)
        self.follower.lost(stream)

    def cut_some(self) -> None:
        if self.streams:
            self.cut(self.rng.choice(list(self.streams)))

    def look_up(self) -> None:
        self.follower.take_map(self.map())
        self.open()

    def open(self) -> None:
        for stream in self.follower.to_open():
            owned = {n: self.terms[n] for n in range(NUM_RANGES) if self.owners[n] == stream.owner}
            if stream.terms.keys() - owned.keys():
                self.follower.lost(stream)  # KeysMoved
            else:
                self.streams[stream] = self.batches(stream, self.masters[stream.owner])
        self.streams = {each: batches for each, batches in self.streams.items() if self.follower.is_current(each)}
        self.follower.check()

    def batches(self, stream: OwnerStream, master: Master) -> Iterator[tuple[list[DirectoryEvent], int, int]]:
        """What a master tells that stream; each step at another time."""
        cursor, wanted = stream.cursor, stream.ranges
        resumes = cursor.master_generation == master.generation and 0 < cursor.resumes_after <= len(master.log)
        told = cursor.synced if resumes else 0
        pending, at, began = wanted & ~told, cursor.resumes_after if told else len(master.log), len(master.log)
        sent = at
        if pending:
            yield [DirectoryEvent(at, K.RESET, ranges=pending)], 0, 0
        while True:
            if at < len(master.log):
                event = master.log[at]
                at += 1
                if event.kind is K.MOVED:
                    gone = event.ranges & (told | (pending if at > began else 0))
                    told, pending = told & ~gone, pending & ~gone
                    event = DirectoryEvent(event.sequence, K.MOVED, ranges=gone)
                    if not gone:
                        continue
                first, sent = sent + 1, at
                yield [event], first, at
            elif pending:
                sent = at
                number = self.rng.choice([n for n in range(NUM_RANGES) if pending >> n & 1])
                some = bits_of(
                    {number, *(n for n in range(NUM_RANGES) if pending >> n & 1 and self.rng.random() < 0.5)}
                )
                yield [DirectoryEvent(at, K.RESET, ranges=some)], 0, 0
                here = {n for n in range(NUM_RANGES) if some >> n & 1}
                lives = [self.terms[n] for n in here]
                for node in NODES:
                    keys = tuple(key for holder, key in self.held if holder == node and range_of(key) in here)
                    if keys:
                        yield [DirectoryEvent(at, K.STORED, node, keys)], 0, 0
                if lives == [self.terms[n] for n in here]:
                    told, pending = told | some, pending & ~some
                    yield [DirectoryEvent(at, K.SYNCED, ranges=some)], 0, 0
            else:
                yield [], 0, 0

    def step(self, stream: OwnerStream) -> bool:
        """One batch of that stream reaches the follower; whether it had any event."""
        events, first, last = next(self.streams[stream])
        master = self.masters[stream.owner]
        told = self.follower.take(stream, master.generation, events, first, last)
        if told is None:
            self.cut(stream)
        for event in told or ():
            self.apply(event)
        self.follower.check()
        return bool(events)

    def apply(self, event: DirectoryEvent) -> None:
        pairs = {(event.node_id, key) for key in event.keys}
        if event.kind is K.RESET:
            self.mirror, self.synced = set(), False
        elif event.kind is K.STORED:
            self.mirror |= pairs
        elif event.kind is K.REMOVED:
            self.mirror -= pairs
        elif event.kind is K.NODE_GONE:
            assert event.node_id not in {node for node, _ in self.mirror}, "its keys were told before"
        else:
            assert event.kind is K.SYNCED
            self.synced = True

    def settle(self) -> None:
        """Nothing happens any more: the follower hears everything."""
        for _ in range(3000):
            if self.follower.is_doubtful:
                self.look_up()
            num_told = sum(self.step(stream) for stream in list(self.streams))
            if not num_told and not self.follower.is_doubtful:
                return
        raise AssertionError("it never comes to rest")


@pytest.mark.parametrize("most_keys", [1 << 20, 40])
@pytest.mark.parametrize("seed", range(6))
def test_a_follower_knows_what_is_held_whatever_moves(seed: int, most_keys: int) -> None:
    world = World(seed, most_keys)
    world.look_up()
    happens = [world.change] * 12 + [world.cut_some, world.move, world.restart, world.lose_node, world.look_up]
    for _ in range(400):
        world.rng.choice(happens)()
        if world.streams and world.rng.random() < 0.7:
            world.step(world.rng.choice(list(world.streams)))
    world.settle()
    assert world.synced
    assert world.mirror == world.held


def test_a_range_that_moves_is_told_as_what_changed_with_it() -> None:
    world = World(0, 1 << 20)
    world.owners = [MASTERS[0]] * NUM_RANGES
    for _ in range(100):
        world.change()
    world.look_up()
    world.settle()
    before = set(world.mirror)
    _, lost = pair = sorted(world.held)[0]
    told: list[DirectoryEvent] = []
    world.apply, apply = lambda event: (told.append(event), apply(event))[1], world.apply  # type: ignore[method-assign]
    world.masters[MASTERS[0]].tell(K.MOVED, ranges=1 << range_of(lost))
    world.version += 1
    world.owners[range_of(lost)], world.terms[range_of(lost)] = MASTERS[1], world.version
    world.held.remove(pair)  # evicted while nobody owned it
    world.settle()
    assert [(event.kind, event.node_id, event.keys) for event in told] == [(K.REMOVED, pair[0], (lost,))]
    assert world.mirror == before - {pair}


def test_what_an_old_owner_still_says_is_not_taken() -> None:
    world = World(0, 1 << 20)
    world.owners = [MASTERS[0]] * NUM_RANGES
    world.look_up()
    world.settle()
    (old,) = world.streams
    deposed, key = world.masters[MASTERS[0]], KEYS[0]
    world.version += 1
    world.owners[range_of(key)], world.terms[range_of(key)] = MASTERS[1], world.version
    world.look_up()
    deposed.tell(K.STORED, "a", (key,))
    told = world.follower.take(old, deposed.generation, [deposed.log[-1]], len(deposed.log), len(deposed.log))
    assert not told
    world.settle()
    assert not world.mirror


def test_what_its_owner_gave_up_is_asked_for_when_the_map_says_who_has_it() -> None:
    follower, every = FollowedRanges(), (1 << NUM_RANGES) - 1
    follower.take_map(RangeMap(1, 5, (MASTERS[0],) * NUM_RANGES, (1,) * NUM_RANGES))
    (stream,) = follower.to_open()
    follower.take(stream, 7, [DirectoryEvent(4, K.RESET, ranges=every)], 0, 0)
    follower.take(stream, 7, [DirectoryEvent(4, K.SYNCED, ranges=every)], 0, 0)
    assert not follower.is_doubtful
    follower.take(stream, 7, [DirectoryEvent(5, K.MOVED, ranges=1 << 3)], 5, 5)
    assert follower.is_doubtful
    assert not follower.to_open(), "the map that is known names the owner that gave it up"
    owners = tuple(MASTERS[number == 3] for number in range(NUM_RANGES))
    follower.take_map(RangeMap(2, 5, owners, tuple(1 + (number == 3) for number in range(NUM_RANGES))))
    (other,) = follower.to_open()
    assert (other.owner, other.ranges, other.cursor.resumes_after) == (MASTERS[1], 1 << 3, 0)
    assert not follower.is_doubtful
    assert follower.is_current(stream), "it goes on with the rest"
