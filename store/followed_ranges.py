"""A follower's state of each range of keys, and the master it came from. Pure.

Several masters own parts of the 64 ranges, and each reports its own only. The follower uses a map of the masters: it
has a stream from each owner, and takes from a stream only events of ranges that the map gives to that master, in the
term in which they were requested from it. A range that changes hands is requested from its next owner, whose snapshot
is compared with what the follower has reported before: its user receives the differences only, and always has the
latest known state. So the keys have to be remembered, with their holders. Beyond ``most_keys`` of them they are not;
then a range that changes hands makes the user begin again with everything.

Example: A owns the ranges 0 to 31, B the others, and all have been reported. A is killed; B takes over. The follower
loses A's stream, continues with B's, and when the map gives B everything asks it to resume behind its last event of the
ranges 32 to 63, and for snapshots of the others. They name all keys but one, which A had reported and a node has
evicted since: the user receives the removal of this one, and nothing else.

A single master, whose map has version 0, reports everything; its events are passed on unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tanghulu.store.protocol.directory_events import DirectoryEvent, DirectoryEventKind
from tanghulu.store.protocol.key_slots import ALL_BITS, NUM_RANGES, bits_of, range_of
from tanghulu.store.protocol.range_map import RangeMap
from tanghulu.types import Address

#: Pairs of a key and a holder to remember, about 150 bytes each.
MOST_KEYS = 1 << 20
#: Keys of one event.
_EVENT_KEYS = 8192
_K = DirectoryEventKind


class EventCursor:
    """The last known event of one master: all events up to it are known for the ranges ``synced``, a bit each."""

    def __init__(self, master_generation: int = 0, sequence: int = 0, synced: int = 0) -> None:
        self.master_generation, self.sequence, self.synced = master_generation, sequence, synced

    @property
    def resumes_after(self) -> int:
        """The sequence to request; 0 (a snapshot) unless a snapshot was complete."""
        return self.sequence if self.synced else 0

    def take(self, generation: int, events: Iterable[DirectoryEvent], first: int, last: int) -> bool:
        """Take a batch; False if something in front of it was lost, whereupon the cursor requests a snapshot."""
        if first:
            if generation != self.master_generation or first != self.sequence + 1:
                self.master_generation = self.sequence = self.synced = 0
                return False
            self.sequence = last
        for event in events:
            ranges = event.ranges or ALL_BITS
            if event.kind is _K.RESET:
                self.synced, self.sequence, self.master_generation = self.synced & ~ranges, event.sequence, generation
            elif event.kind is _K.SYNCED:
                self.synced, self.sequence, self.master_generation = self.synced | ranges, event.sequence, generation
            elif event.kind is _K.MOVED:
                self.synced &= ~ranges
        return True

    def __repr__(self) -> str:
        return f"EventCursor({self.master_generation:x}:{self.resumes_after})"


@dataclass(eq=False)
class OwnerStream:
    """Ranges to follow at one master, each in its term. ``is_whole``: it is the only one."""

    owner: Address
    terms: dict[int, int]
    cursor: EventCursor = field(default_factory=EventCursor)
    is_whole: bool = False
    is_open: bool = True

    @property
    def ranges(self) -> int:
        """The ranges it reports, a bit for each."""
        return bits_of(self.terms)

    def leave_out(self, number: int) -> None:
        """Take nothing more of that range from this stream."""
        self.terms.pop(number, None)
        self.cursor.synced &= ~(1 << number)


class KnownKeys:
    """The keys of each range by holder; and those of an incoming snapshot."""

    def __init__(self) -> None:
        self._held: list[dict[str, set[str]]] = [{} for _ in range(NUM_RANGES)]
        self._coming: dict[int, dict[str, set[str]]] = {}
        self.num_keys = 0

    def begin(self, number: int) -> None:
        """Begin a snapshot of that range."""
        self._coming[number] = {}

    def store(self, number: int, node_id: str, keys: Iterable[str]) -> set[str]:
        """Record that the node holds ``keys``; return the new ones."""
        if number in self._coming:
            self._coming[number].setdefault(node_id, set()).update(keys)
        held = self._held[number].setdefault(node_id, set())
        new = set(keys) - held
        held |= new
        self.num_keys += len(new)
        return new

    def remove(self, number: int, node_id: str, keys: Iterable[str]) -> set[str]:
        """Record that the node no longer holds ``keys``; return those that were known."""
        held = self._held[number].get(node_id, set())
        gone = held.intersection(keys)
        held -= gone
        self.num_keys -= len(gone)
        if not held:
            self._held[number].pop(node_id, None)
        return gone

    def settle(self, number: int) -> Iterator[tuple[str, set[str]]]:
        """End the snapshot of that range: remove and yield everything it did not name."""
        coming = self._coming.pop(number, {})
        for node_id, held in list(self._held[number].items()):
            gone = self.remove(number, node_id, held - coming.get(node_id, set()))
            if gone:
                yield node_id, gone

    def forget(self, number: int, node_id: str) -> set[str]:
        """Record that the node holds nothing of that range; return its former keys."""
        return self.remove(number, node_id, self._held[number].get(node_id, set()).copy())

    def knows(self, node_id: str) -> bool:
        """Return whether the node holds anything."""
        return any(node_id in held for held in self._held)

    def check(self) -> None:
        """Assert that the number of keys is right, and that no holder is kept without keys."""
        sets = [keys for held in self._held for keys in held.values()]
        assert all(sets)
        assert self.num_keys == sum(map(len, sets))


class FollowedRanges:
    """See the module. ``take_map``, then open the streams of ``to_open``, and ``take`` their batches."""

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self.map: RangeMap | None = None
        self._key_scope = ""
        self._most_keys = most_keys
        self._streams: dict[Address, OwnerStream] = {}
        self._given_up: dict[int, int] = {}  # range -> term in which its owner sent MOVED
        self._begin()

    def _begin(self) -> None:
        """Forget everything; the user gets RESET before anything else."""
        self._streams = {}
        self._keys: KnownKeys | None = KnownKeys()
        self._begun = 0  # ranges of which a snapshot has begun
        self._known = 0  # those of which a key was reported to the user
        self._coming = 0  # ranges with an incoming snapshot
        self._was_reset = self._was_synced = False
        self._sequence = 0

    # --- whom to follow

    def take_map(self, known: RangeMap, key_scope: str = "") -> None:
        """Use the map ``known``; the masters' prefix of the user's keys is part of what ranges are computed from."""
        before, self.map, self._key_scope = self.map, known, key_scope
        if before is not None and (before.cluster != known.cluster or bool(before.version) != bool(known.version)):
            self._begin()

    def to_open(self) -> list[OwnerStream]:
        """Return the streams to open now, each replacing the last one of its owner."""
        if self.map is None:
            return []
        if not self.map.version:
            return self._only()
        by_owner: dict[Address, dict[int, int]] = {}
        for number, (owner, term) in enumerate(zip(self.map.owners, self.map.terms, strict=True)):
            if owner is not None and self._given_up.get(number) != term:
                by_owner.setdefault(owner, {})[number] = term
        opened: list[OwnerStream] = []
        for owner in [each for each in self._streams if each not in by_owner]:
            del self._streams[owner]
        for owner, terms in by_owner.items():
            last = self._streams.get(owner)
            if last is not None:
                for number in [number for number, term in last.terms.items() if terms.get(number) != term]:
                    last.leave_out(number)
                if last.is_open and last.terms == terms:
                    continue
            before = EventCursor() if last is None else last.cursor
            cursor = EventCursor(before.master_generation, before.sequence, before.synced & bits_of(terms))
            opened.append(OwnerStream(owner, terms, cursor))
        self._streams.update((each.owner, each) for each in opened)
        return opened

    def _only(self) -> list[OwnerStream]:
        assert self.map is not None
        owner, last = self.map.owners[0], next(iter(self._streams.values()), None)
        if owner is None or (last is not None and last.is_open and last.owner == owner):
            return []
        cursor = EventCursor() if last is None else last.cursor  # the master reports whether it is the same one
        self._streams = {owner: OwnerStream(owner, dict.fromkeys(range(NUM_RANGES), 0), cursor, is_whole=True)}
        return list(self._streams.values())

    def is_current(self, stream: OwnerStream) -> bool:
        """Return whether ``stream`` is the current one of its owner."""
        return self._streams.get(stream.owner) is stream

    def lost(self, stream: OwnerStream) -> None:
        """Record the end of ``stream``; the next one of its owner resumes behind it."""
        stream.is_open = False

    @property
    def is_doubtful(self) -> bool:
        """Whether some ranges have no stream now and have to be looked up."""
        covered = [each.ranges for each in self._streams.values() if each.is_open]
        return sum(covered) != ALL_BITS  # no two have one in common

    # --- events of the streams

    def take(
        self, stream: OwnerStream, generation: int, events: list[DirectoryEvent], first: int, last: int
    ) -> list[DirectoryEvent] | None:
        """Return the user's events of a batch; None: something was lost, and the stream has to be closed."""
        if not self.is_current(stream):
            return []
        if not stream.cursor.take(generation, events, first, last):
            return None
        if stream.is_whole:
            return events
        changes: list[DirectoryEvent] = []
        for event in events:
            changes += self._changes(stream, event, is_change=bool(first))
            if not self.is_current(stream):
                return []  # everything restarts
        if self._keys is not None and self._keys.num_keys > self._most_keys:
            self._keys = None
        return self._with_reset(changes)

    def _changes(self, stream: OwnerStream, event: DirectoryEvent, *, is_change: bool) -> Iterator[DirectoryEvent]:
        match event.kind:
            case _K.STORED | _K.REMOVED:
                taken = stream.cursor.synced if is_change else self._coming & stream.ranges
                yield from self._of_keys(event, taken)
            case _K.NODE_GONE:
                yield from self._of_lost_node(event.node_id, stream.cursor.synced)
            case _K.RESET:
                self._begin_snapshots(event.ranges & stream.ranges)
            case _K.SYNCED:
                yield from self._end_snapshots(event.ranges & stream.ranges)
            case _K.MOVED:
                for number in _numbers(event.ranges & stream.ranges):
                    self._given_up[number] = stream.terms[number]
                    stream.leave_out(number)

    def _of_keys(self, event: DirectoryEvent, taken: int) -> Iterator[DirectoryEvent]:
        by_range: dict[int, list[str]] = {}
        for key in event.keys:
            number = range_of(self._key_scope + key)
            if taken >> number & 1:
                by_range.setdefault(number, []).append(key)
        self._known |= bits_of(by_range)
        if self._keys is None:
            keys = [key for some in by_range.values() for key in some]
        else:
            change = self._keys.store if event.kind is _K.STORED else self._keys.remove
            keys = [key for number, some in by_range.items() for key in change(number, event.node_id, some)]
        yield from self._events_of(event.kind, event.node_id, keys)

    def _of_lost_node(self, node_id: str, ranges: int) -> Iterator[DirectoryEvent]:
        if self._keys is None:
            self._begin()
            return
        gone = [key for number in _numbers(ranges) for key in self._keys.forget(number, node_id)]
        yield from self._events_of(_K.REMOVED, node_id, gone)
        if gone and not self._keys.knows(node_id):
            yield self._next(_K.NODE_GONE, node_id)

    def _begin_snapshots(self, ranges: int) -> None:
        if self._keys is None:
            if ranges & self._known:
                self._begin()
                return
        else:
            for number in _numbers(ranges):
                self._keys.begin(number)
        self._coming |= ranges
        self._begun |= ranges

    def _end_snapshots(self, ranges: int) -> Iterator[DirectoryEvent]:
        self._coming &= ~ranges
        if self._keys is not None:
            for number in _numbers(ranges):
                for node_id, gone in self._keys.settle(number):
                    yield from self._events_of(_K.REMOVED, node_id, list(gone))
        if not self._was_synced and self._begun == ALL_BITS and not self._coming:
            self._was_synced = True
            yield self._next(_K.SYNCED)

    def _events_of(self, kind: DirectoryEventKind, node_id: str, keys: list[str]) -> Iterator[DirectoryEvent]:
        for start in range(0, len(keys), _EVENT_KEYS):
            yield self._next(kind, node_id, tuple(keys[start : start + _EVENT_KEYS]))

    def _next(self, kind: DirectoryEventKind, node_id: str = "", keys: tuple[str, ...] = ()) -> DirectoryEvent:
        """Return an event with a number of the follower's own; those of different masters are unrelated."""
        self._sequence += 1
        return DirectoryEvent(self._sequence, kind, node_id, keys)

    def _with_reset(self, changes: list[DirectoryEvent]) -> list[DirectoryEvent]:
        if not changes or self._was_reset:
            return changes
        self._was_reset = True
        return [DirectoryEvent(0, _K.RESET), *changes]

    def check(self) -> None:
        """Assert that no range is taken from two masters, and that the map gives it to its source."""
        seen = 0
        for owner, stream in self._streams.items():
            assert owner == stream.owner
            assert not stream.ranges & seen
            seen |= stream.ranges
            assert stream.is_whole or not stream.cursor.synced & ~stream.ranges
        if self._keys is not None:
            self._keys.check()

    def __repr__(self) -> str:
        return f"FollowedRanges({len(self._streams)} streams, {self.map})"


def _numbers(bits: int) -> list[int]:
    return [number for number in range(NUM_RANGES) if bits >> number & 1]
