"""The decisions of a node's SSD tier: the contents of its file, admission, and eviction when room is needed there.

Pure: events and times go in, instructions come out, in the order in which they must be performed. The driver (``tier``)
moves the bytes. One rule makes reuse of the file safe: writes and wipes are performed one after the other, in the order
of the instructions. So a range is free at once when its chunk is dropped (unless it is being read), because the next
write to it comes behind the wipe of the old head. And no head of a dropped chunk survives in a hole, where the next
start would find it: its wipe comes before the write that reuses its range, unless that write overwrites the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

from sortedcontainers import SortedList

from tanghulu.eviction.base import Policy
from tanghulu.runtime.clock import Clock
from tanghulu.store.node.space.allocator import OffsetAllocator
from tanghulu.store.node.space.space import Space
from tanghulu.store.node.ssd.admission import Demotion, EvictedChunk, TierAdmission
from tanghulu.store.node.state.ssd_chunk import SsdChunk, SsdChunkEvent, SsdChunkState
from tanghulu.store.node.state.ssd_record import UNIT, SsdRecord
from tanghulu.store.protocol.types import Pin
from tanghulu.types import ChunkKey


@dataclass(frozen=True, slots=True)
class Write:
    """Write the entry's record; then call ``written``."""

    entry: SsdChunk


@dataclass(frozen=True, slots=True)
class Wipe:
    """Overwrite the unit at ``offset``, so that the record there is no longer found."""

    offset: int


@dataclass(frozen=True, slots=True)
class LostChunk:
    """The entry is no longer available here: unless memory has it, the master must be informed."""

    entry: SsdChunk


Instruction: TypeAlias = Write | Wipe | LostChunk


@dataclass(slots=True)
class TierCounters:
    """Counts since the start; ``metrics`` publishes them. ``admissions``: evicted chunks by outcome."""

    admissions: dict[Demotion, int] = field(default_factory=lambda: dict.fromkeys(Demotion, 0))
    already_there: int = 0
    written: int = 0
    written_bytes: int = 0
    write_errors: int = 0
    hits: int = 0
    promoted: int = 0
    read_bytes: int = 0
    read_errors: int = 0
    corrupt: int = 0
    evictions: int = 0
    expired: int = 0
    recovered: int = 0


@dataclass(frozen=True, slots=True)
class _Residents:
    """The owners of ranges in the file; an expired entry has its range until it is dropped."""

    entries: dict[ChunkKey, SsdChunk]
    doomed: dict[int, SsdChunk]

    def find(self, key: ChunkKey) -> SsdChunk | None:
        """Return the entry of ``key``."""
        return self.entries.get(key)

    def __iter__(self) -> Iterator[SsdChunk]:
        return chain(self.entries.values(), self.doomed.values())


#: Most entries dropped for another, unless it is pinned hard: a large one among small ones would block
#: the node for seconds. It is not written then, and the next large one finds the room made for it.
MAX_MADE_WAY = 128


class TierState:
    """See the module. ``capacity_bytes``: of the file behind its superblock, a multiple of the unit."""

    def __init__(
        self, capacity_bytes: int, make_policy: Callable[[], Policy], admission: TierAdmission, clock: Clock
    ) -> None:
        self.admission = admission
        self.counters = TierCounters()
        self._clock = clock
        self._entries: dict[ChunkKey, SsdChunk] = {}
        self._doomed: dict[int, SsdChunk] = {}  # by offset
        self._residents = _Residents(self._entries, self._doomed)
        self._space: Space[SsdChunk] = Space(OffsetAllocator(capacity_bytes, UNIT), self._residents, make_policy)
        self._retired: list[tuple[int, int]] = []  # (offset, length) without room on the disk
        self._retired_bytes = 0
        self._ends = SortedList()  # (expires_s, id, entry) of those in _entries with an end
        self._sequence = 0

    @property
    def capacity_bytes(self) -> int:
        """Bytes that the file can hold."""
        return self._space.allocator.capacity_bytes - self._retired_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the file that are not free."""
        return self._space.allocator.used_bytes - self._retired_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[SsdChunk]:
        return iter(self._residents)

    def entries(self) -> list[SsdChunk]:
        """Return a copy of the list of readable entries."""
        return list(self._entries.values())

    def find(self, key: ChunkKey) -> SsdChunk | None:
        """Return the entry of ``key``, unless it has expired."""
        entry = self._entries.get(key)
        if entry is None or (entry.expires_s is not None and entry.expires_s <= self._clock.now_s()):
            return None
        return entry

    # --- down

    def next_sequence(self, now_unix_s: float) -> int:
        """Return the sequence of the next record to write: higher than any in the file, now or before its wipes.

        Microseconds of the wall clock, because the next start sees nothing of wiped records; it never decreases if the
        clock does.
        """
        self._sequence = max(self._sequence + 1, int(now_unix_s * 1e6))
        return self._sequence

    def evicted(
        self, record: SsdRecord, expires_s: float | None, num_hits: int, queue_bytes: int
    ) -> tuple[SsdChunk | None, list[Instruction]]:
        """Take a chunk that leaves memory. Return its entry here, if it stays available, and the instructions.

        ``queue_bytes``: the largest record that can be queued for writing now.
        """
        current = self._entries.get(record.key)
        if current is not None and current.version == record.version and self.find(record.key) is current:
            self.counters.already_there += 1
            return current, []
        instructions = [] if current is None else self.drop(current)
        now_s = self._clock.now_s()
        left_s = None if expires_s is None else expires_s - now_s
        hard = record.pin is Pin.HARD
        chunk = EvictedChunk(record.key, record.record_bytes, num_hits, left_s, queue_bytes, pinned=hard)
        outcome = self.admission.decide(chunk, now_s)
        entry = None
        if outcome is Demotion.ADMIT:
            entry, more = self._place(record, expires_s)
            instructions += more
            outcome = Demotion.ADMIT if entry is not None else Demotion.NO_ROOM
        self.counters.admissions[outcome] += 1
        return entry, instructions

    def _place(self, record: SsdRecord, expires_s: float | None) -> tuple[SsdChunk | None, list[Instruction]]:
        instructions: list[Instruction] = []

        def evict(victim: SsdChunk) -> None:
            self.counters.evictions += 1
            instructions.extend(self._drop(victim, evicted=True))

        if record.record_bytes > self.capacity_bytes:
            return None, instructions
        max_dropped = len(self) if record.pin is Pin.HARD else MAX_MADE_WAY
        offset = self._space.take(record.record_bytes, evict, max_dropped)
        if offset is None:
            return None, instructions
        entry = SsdChunk(record, offset, expires_s)
        self._enter(entry)
        kept = [each for each in instructions if each != Wipe(offset)]  # the write does that
        return entry, [*kept, Write(entry)]

    def _enter(self, entry: SsdChunk) -> None:
        stale = self._entries.get(entry.key)
        assert stale is None, f"{entry.key!r} is in the tier already"
        self._entries[entry.key] = entry
        self._space.settle(entry)
        self._space.end_batch()
        if entry.expires_s is not None:
            self._ends.add((entry.expires_s, id(entry), entry))

    def retire(self, unbacked: Sequence[tuple[int, int]]) -> None:
        """Use the free parts of these (offset, length) no more, until the next start, as the disk is full."""
        for start, length in self._space.allocator.holes():
            for offset, size_bytes in unbacked:
                begin, end = max(start, offset), min(start + length, offset + size_bytes)
                if begin < end and self._space.allocator.claim(begin, end - begin):
                    self._retired.append((begin, end - begin))
                    self._retired_bytes += end - begin

    def written(self, entry: SsdChunk, *, ok: bool, pause: bool = True) -> list[Instruction]:
        """Take the result of the write of ``entry``; after a failure the chunk is lost, and its record is wiped.

        Without ``pause`` others are written nevertheless: the tier makes room for them if the disk has some.
        """
        self.admission.write_ended(ok or not pause, self._clock.now_s())
        if ok:
            self.counters.written += 1
            self.counters.written_bytes += entry.range_bytes
        else:
            self.counters.write_errors += 1
        if entry.state is not SsdChunkState.WRITING:
            return []  # dropped meanwhile
        if not ok:
            return self.drop(entry)
        entry.step(SsdChunkEvent.WRITTEN)
        self._space.refresh(entry)
        return []

    # --- up

    def begin_read(self, entry: SsdChunk) -> None:
        """Keep the entry's range unchanged until ``end_read``; asserts that it is STORED."""
        assert entry.state is SsdChunkState.STORED, f"{entry.key!r} is {entry.state.value}"
        entry.num_readers += 1
        self._space.refresh(entry)

    def end_read(self, entry: SsdChunk) -> None:
        """End a read."""
        entry.num_readers -= 1
        if entry.state is not SsdChunkState.DOOMED:
            self._space.refresh(entry)
        elif not entry.num_readers:
            self._free(entry)

    def promoted(self, entry: SsdChunk) -> None:
        """Record that the chunk was promoted; its copy here stays, so that demoting it needs no write."""
        self.counters.promoted += 1
        if entry.held:
            self._space.touch(entry)
            self._space.end_batch()

    def not_read(self, entry: SsdChunk, *, corrupt: bool) -> list[Instruction]:
        """Drop an entry whose bytes could not be read, or do not match."""
        if not entry.held:
            return []  # it was dropped during the read, whose result is void
        if corrupt:
            self.counters.corrupt += 1
        else:
            self.counters.read_errors += 1
        return self.drop(entry)

    def touch(self, entry: SsdChunk) -> None:
        """Record a put or a read of the key."""
        self._space.touch(entry)
        self._space.end_batch()

    # --- the end

    def drop(self, entry: SsdChunk) -> list[Instruction]:
        """Drop ``entry``, if it still exists."""
        return self._drop(entry, evicted=False) if entry.held else []

    def expire(self, now_s: float) -> list[Instruction]:
        """Drop expired entries."""
        instructions: list[Instruction] = []
        while self._ends and self._ends[0][0] <= now_s:
            self.counters.expired += 1
            instructions += self.drop(self._ends[0][2])
        return instructions

    def switch_policy(self, make_policy: Callable[[], Policy]) -> None:
        """Let another policy order the evictions; see Space."""
        self._space.switch_policy(make_policy)

    def _drop(self, entry: SsdChunk, *, evicted: bool) -> list[Instruction]:
        self._space.leave(entry, evicted=evicted)
        del self._entries[entry.key]
        if entry.expires_s is not None:
            self._ends.remove((entry.expires_s, id(entry), entry))
        entry.step(SsdChunkEvent.DROP)
        if entry.num_readers:
            self._doomed[entry.offset] = entry
        else:
            self._free(entry)
        return [Wipe(entry.offset), LostChunk(entry)]

    def _free(self, entry: SsdChunk) -> None:
        entry.step(SsdChunkEvent.LAST_READER_LEFT)
        self._doomed.pop(entry.offset, None)
        self._space.allocator.free(entry.offset, entry.range_bytes)

    # --- a new start

    def recover(self, record: SsdRecord, offset: int, now_unix_s: float) -> list[Instruction]:
        """Enter the results of a scan, unless expired, too large, or older than another record of the key.

        Returns the wipes of the others. The wall clock may have jumped: a chunk lives no longer than it had left when
        it was written.
        """
        self._sequence = max(self._sequence, record.sequence)
        left_s = None
        if record.ends_unix_s is not None:
            left_s = min(record.ends_unix_s - now_unix_s, record.left_s)
        is_over = left_s is not None and left_s <= 0
        other = self._entries.get(record.key)
        is_older = other is not None and other.record.sequence >= record.sequence
        if is_over or is_older or not self._space.allocator.claim(offset, record.record_bytes):
            return [Wipe(offset)]
        wipes: list[Instruction] = []
        if other is not None:  # not yet reported to anybody
            wipes = [each for each in self._drop(other, evicted=False) if isinstance(each, Wipe)]
            self.counters.recovered -= 1
        expires_s = None if left_s is None else self._clock.now_s() + left_s
        self._enter(SsdChunk(record, offset, expires_s, SsdChunkState.STORED))
        self.counters.recovered += 1
        return wipes

    def check(self) -> None:
        """Assert that entries and free ranges tile the file, and that all but hard pins can be evicted."""
        self.admission.check()
        self._space.check()
        self._space.allocator.check_tiles(chain(((each.offset, each.range_bytes) for each in self), self._retired))
        for key, entry in self._entries.items():
            assert entry.key == key
            assert entry.held, f"{entry!r} is found"
            assert (entry in self._space) != (entry.pin is Pin.HARD), f"{entry!r} in the order of evictions"
            assert entry.num_readers >= 0
        assert len(self._ends) == sum(entry.expires_s is not None for entry in self._entries.values())
        assert all(self._entries.get(entry.key) is entry for _, _, entry in self._ends)
        for offset, entry in self._doomed.items():
            assert entry.offset == offset
            assert entry.state is SsdChunkState.DOOMED
            assert entry.num_readers > 0, f"{entry!r} should be gone"

    def __repr__(self) -> str:
        return f"TierState({len(self._entries)} chunks, {self.used_bytes}/{self.capacity_bytes} B)"
