"""The SSD tier's decisions and its file: a seeded life with crashes and torn writes; ``check()`` after every step."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from tanghulu.errors import ConfigError
from tanghulu.eviction import POLICIES, make_policy
from tanghulu.store.node.space.frames import MAX_FRAMES
from tanghulu.store.node.ssd.admission import Demotion, TierAdmission
from tanghulu.store.node.ssd.file import TierFile
from tanghulu.store.node.ssd.state import MAX_MADE_WAY, Instruction, LostChunk, TierState, Wipe, Write
from tanghulu.store.node.state.ssd_chunk import TRANSITIONS, SsdChunk, SsdChunkEvent, SsdChunkState
from tanghulu.store.node.state.ssd_record import (
    HEADER_BYTES,
    SUPERBLOCK_PLACES,
    UNIT,
    SsdRecord,
    decode_head,
    decode_superblock,
    encode_head,
)
from tanghulu.store.protocol import checksums as sums
from tanghulu.store.protocol.checksums import Checksums
from tanghulu.store.protocol.types import Pin
from tanghulu.types import ChunkKey
from tests.virtual.clock import ManualClock

CAPACITY = 64 * UNIT
QUEUE = 16 * UNIT


def make_state(clock: ManualClock | None = None, policy: str = "lru", capacity: int = CAPACITY) -> TierState:
    admission = TierAdmission("all", QUEUE)
    return TierState(capacity, lambda: make_policy(policy), admission, clock or ManualClock())


def record(key: str, size: int = 100, version: int = 1, value: bytes | None = None, **more: object) -> SsdRecord:
    checksums = sums.compute(value if value is not None else bytes(size))
    return SsdRecord(ChunkKey(key), version, len(value) if value is not None else size, checksums, **more)  # type: ignore[arg-type]


def evict(
    state: TierState, each: SsdRecord, expires_s: float | None = None
) -> tuple[SsdChunk | None, list[Instruction]]:
    entry, instructions = state.evicted(each, expires_s, 0, QUEUE)
    state.check()
    return entry, instructions


def store(state: TierState, each: SsdRecord, expires_s: float | None = None) -> SsdChunk:
    entry, _ = evict(state, each, expires_s)
    assert entry is not None
    assert state.written(entry, ok=True) == []
    state.check()
    return entry


# --- entries


def test_unknown_transitions_raise() -> None:
    for state in SsdChunkState:
        for event in SsdChunkEvent:
            if (state, event) not in TRANSITIONS:
                with pytest.raises(AssertionError):
                    SsdChunk(record("k"), 0, None, state).step(event)


def test_the_wipe_of_a_victim_comes_before_the_write_that_reuses_its_range() -> None:
    state = make_state()
    small = [store(state, record(f"k{i}")) for i in range(64)]
    entry, instructions = evict(state, record("large", 3 * UNIT))
    assert entry is not None
    kinds = [type(each) for each in instructions]
    assert kinds.index(Write) == len(kinds) - 1
    wiped = {each.offset for each in instructions if isinstance(each, Wipe)}
    lost = {each.entry for each in instructions if isinstance(each, LostChunk)}
    assert lost == {each for each in small if not each.held}
    assert wiped == {each.offset for each in lost} - {entry.offset}, "the write overwrites that one"


def test_a_large_record_among_small_ones_makes_room_a_few_at_a_time_unless_it_is_pinned_hard() -> None:
    num_small = 8 * MAX_MADE_WAY
    admission = TierAdmission("all", 1 << 40)
    state = TierState(num_small * UNIT, lambda: make_policy("lru"), admission, ManualClock())
    for i in range(num_small):
        placed(state, f"small{i}", 100)

    def put_large(key: str, pin: Pin) -> tuple[bool, int]:
        """Whether a record of half of the file found room, and how many others gave way."""
        large = SsdRecord(ChunkKey(key), 1, num_small // 2 * UNIT - HEADER_BYTES, Checksums(0, (1,)), pin)
        entry, instructions = state.evicted(large, None, 0, 1 << 40)
        state.check()
        return entry is not None, sum(isinstance(each, LostChunk) for each in instructions)

    tried = [put_large(f"large{tries}", Pin.NONE) for tries in range(4)]
    assert tried[:3] == [(False, MAX_MADE_WAY)] * 3
    assert tried[3][0]
    assert tried[3][1] <= MAX_MADE_WAY
    assert state.counters.admissions[Demotion.NO_ROOM] == 3
    found, made_way = put_large("pinned", Pin.HARD)
    assert found
    assert made_way > MAX_MADE_WAY


def test_entries_that_go_before_their_end_leave_nothing_behind() -> None:
    clock = ManualClock()
    state = make_state(clock)
    for i in range(1000):
        store(state, record(f"k{i}"), expires_s=86400.0 + i % 7)
    assert len(state._ends) == len(state) == 64
    clock.advance(86410.0)
    assert len([each for each in state.expire(clock.now_s()) if isinstance(each, LostChunk)]) == 64
    state.check()
    assert not state._ends


def placed(state: TierState, key: str, size: int) -> SsdChunk:
    """An entry of a size of which no bytes are made."""
    entry, _ = state.evicted(SsdRecord(ChunkKey(key), 1, size, Checksums(0, (1,))), None, 0, size + UNIT)
    assert entry is not None
    assert state.written(entry, ok=True) == []
    return entry


def test_a_window_is_cleared_beside_holes_and_across_frames() -> None:
    """In a file so large that its frames hold several units, as those of real ones do."""
    state = TierState(4 * MAX_FRAMES * UNIT, lambda: make_policy("lru"), TierAdmission("all", 1 << 40), ManualClock())
    rng = random.Random(5)
    stored = [placed(state, f"k{i}", (700 + i % 3) * UNIT) for i in range(4 * MAX_FRAMES // 704)]
    rng.shuffle(stored)
    for each in stored:
        state.touch(each)
    for number in range(60):
        placed(state, f"large{number}", rng.randrange(900, 5000) * UNIT)
    state.check()


def test_what_is_over_and_not_yet_dropped_gives_way_like_anything_else() -> None:
    clock = ManualClock()
    state = make_state(clock)
    for i in range(64):
        store(state, record(f"k{i}"), expires_s=5.0)
    clock.advance(5.0)
    assert state.find(ChunkKey("k0")) is None
    state.switch_policy(lambda: make_policy("sieve"))
    store(state, record("large", 3 * UNIT))
    assert len(state.expire(clock.now_s())) == 2 * 60


def test_a_range_that_is_being_read_is_not_used_again() -> None:
    state = make_state()
    entry = store(state, record("k"))
    state.begin_read(entry)
    assert [type(each) for each in state.drop(entry)] == [Wipe, LostChunk]
    state.check()
    assert entry.state is SsdChunkState.DOOMED
    for i in range(200):
        other, _ = evict(state, record(f"n{i}"))
        assert other is None or other.offset != entry.offset
        if other is not None:
            state.written(other, ok=True)
    state.end_read(entry)
    state.check()
    assert entry.state is SsdChunkState.GONE


def test_a_chunk_that_is_there_already_is_not_written_again() -> None:
    state = make_state()
    entry = store(state, record("k"))
    assert evict(state, record("k")) == (entry, [])
    newer, instructions = evict(state, record("k", version=2))
    assert newer is not None
    assert instructions[:2] == [Wipe(entry.offset), LostChunk(entry)]
    assert state.find(ChunkKey("k")) is newer


def test_a_failed_write_loses_the_chunk_and_pauses() -> None:
    clock = ManualClock()
    state = make_state(clock)
    entry, _ = evict(state, record("k"))
    assert entry is not None
    assert [type(each) for each in state.written(entry, ok=False)] == [Wipe, LostChunk]
    state.check()
    assert state.find(ChunkKey("k")) is None
    assert evict(state, record("l")) == (None, [])
    assert state.counters.admissions[Demotion.PAUSED] == 1
    clock.advance(1.0)
    assert evict(state, record("m"))[0] is not None


def test_on_a_full_disk_the_tier_lives_in_what_it_has() -> None:
    state = make_state(ManualClock())
    capacity_bytes = state.capacity_bytes
    stored, failing = evict(state, record("stored"))[0], evict(state, record("failing"))[0]
    assert stored is not None
    assert failing is not None
    state.written(stored, ok=True)
    backed_bytes = failing.offset
    state.written(failing, ok=False, pause=False)
    state.retire([(backed_bytes, capacity_bytes - backed_bytes)])
    state.check()
    assert (state.capacity_bytes, state.used_bytes) == (backed_bytes, stored.range_bytes)
    entry, instructions = evict(state, record("next"))
    assert entry is not None
    assert entry.offset == stored.offset
    assert state.counters.evictions == 1
    assert [type(each) for each in instructions] == [LostChunk, Write]
    state.retire([(0, capacity_bytes)])  # what is in use stays
    state.check()
    assert state.find(ChunkKey("next")) is entry


def test_a_file_says_what_has_no_room_on_the_disk_yet(path: Path) -> None:
    file = TierFile(path, 1 << 20)
    try:
        assert file.unbacked() == [(0, file.capacity_bytes)]
        unit = memoryview(mmap.mmap(-1, UNIT))
        file.write(16 * UNIT, unit)
        holes = file.unbacked()
        assert all(not begin <= 16 * UNIT < begin + length for begin, length in holes)
        assert sum(length for _, length in holes) < file.capacity_bytes
    finally:
        file.close()


def test_a_size_that_can_only_be_a_mistake_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = os.statvfs(path.parent)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=64, f_frsize=1 << 10))
    with pytest.raises(ConfigError, match=r"--ssd-size 1\.1 MiB: the file system of .* has 64\.0 KiB"):
        TierFile(path, (1 << 20) + (100 << 10))
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    with capture_logs() as logs:
        TierFile(path, 1 << 20).close()
    assert logs == [] or logs[0]["event"] == "tier.no_direct_io"


def test_soft_pinned_chunks_go_last_and_time_ends_others() -> None:
    clock = ManualClock()
    state = make_state(clock)
    soft = store(state, record("soft", pin=Pin.SOFT))
    brief = store(state, record("brief"), expires_s=5.0)
    for i in range(100):
        store(state, record(f"k{i}"))
    assert soft.held
    assert not brief.held, "evicted: it was the oldest"
    brief = store(state, record("brief"), expires_s=5.0)
    clock.advance(5.0)
    assert state.find(ChunkKey("brief")) is None
    entry, instructions = evict(state, record("brief"), expires_s=9.0)
    assert entry is not None
    assert LostChunk(brief) in instructions, "it was over, and nobody had noticed yet"
    state.written(entry, ok=True)
    clock.advance(4.0)
    assert state.expire(clock.now_s()) == [Wipe(entry.offset), LostChunk(entry)]
    state.check()


def test_hard_pinned_chunks_are_never_evicted_here_either() -> None:
    """Not one by one, not where a large record wants a window of neighbours; and not after a new start."""
    state = make_state()
    pinned = [store(state, record(f"hard{i}", pin=Pin.HARD)) for i in range(4)]
    for i in range(100):
        store(state, record(f"k{i}"))
    entry, _ = evict(state, record("long", QUEUE - UNIT))
    assert entry is not None
    again = make_state()
    for each in pinned:
        assert each.held
        assert again.recover(each.record, each.offset, 0.0) == []
    for i in range(100):
        store(again, record(f"k{i}"))
    assert all(again.find(each.key) is not None for each in pinned)
    again.drop(pinned[0])
    store(again, record("hard0", version=2, pin=Pin.HARD))
    assert again.find(ChunkKey("hard1")) is not None


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_orders_the_tier(policy: str) -> None:
    state = make_state(policy=policy)
    rng = random.Random(policy)
    for _ in range(400):
        evicted = record(f"k{rng.randrange(120)}", rng.choice((100, 5000, 9000)))
        entry, _ = evict(state, evicted)
        if entry is not None and entry.state is SsdChunkState.WRITING:
            state.written(entry, ok=True)
        hit = state.find(ChunkKey(f"k{rng.randrange(120)}"))
        if hit is not None and hit.state is SsdChunkState.STORED:
            state.begin_read(hit)
            state.promoted(hit)
            state.end_read(hit)
    assert state.counters.evictions > 50
    state.switch_policy(lambda: make_policy("lru"))
    state.check()
    assert state.used_bytes > CAPACITY / 2


def test_wall_clock_jumps_never_lengthen_a_life() -> None:
    """Ends are kept as wall time, because only that outlives a restart; what was left at the write bounds it."""
    for jump_s, left_s in ((0.0, 60.0), (-1e9, 100.0), (30.0, 30.0)):
        clock = ManualClock(7.0)
        state = make_state(clock)
        ends = SsdRecord(ChunkKey("k"), 1, 100, Checksums(0, (1,)), Pin.NONE, 1_000_100.0, 100.0)
        assert state.recover(ends, 0, 1_000_040.0 + jump_s) == []
        entry = state.find(ChunkKey("k"))
        assert entry is not None
        assert entry.expires_s == 7.0 + left_s
        assert make_state(clock).recover(ends, 0, 1_000_100.0) == [Wipe(0)]


# --- the file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tier"


def test_heads_are_of_their_file_and_place() -> None:
    each = SsdRecord(ChunkKey("ключ"), 7, 5000, Checksums(4096, (1, 2)), Pin.SOFT, 12.5, 2.0)
    head = encode_head(each, 3 * UNIT, b"i" * 16)
    assert decode_head(head + b"rest", 3 * UNIT, b"i" * 16) == each
    assert decode_head(head, 4 * UNIT, b"i" * 16) is None
    assert decode_head(head, 3 * UNIT, b"j" * 16) is None
    rng = random.Random(1)
    for _ in range(2000):
        bad = bytearray(head)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        assert decode_head(bytes(bad), 3 * UNIT, b"i" * 16) is None
        assert decode_head(rng.randbytes(rng.randrange(200)), 0, b"i" * 16) is None


def test_foreign_and_busy_files_are_refused(path: Path) -> None:
    path.write_bytes(b"somebody's letters")
    with pytest.raises(ConfigError, match="not an SSD tier"):
        TierFile(path, CAPACITY)
    assert path.read_bytes() == b"somebody's letters"
    path.unlink()
    file = TierFile(path, CAPACITY)
    with pytest.raises(ConfigError, match="another node"):
        TierFile(path, CAPACITY)
    file.close()


def _damage(path: Path, *places: int) -> None:
    with path.open("r+b") as file:
        for place in places:
            file.seek(place + 12)
            (byte,) = file.read(1)
            file.seek(place + 12)
            file.write(bytes([byte ^ 0xFF]))


def test_one_bad_superblock_costs_nothing_and_two_cost_what_lies_behind(path: Path) -> None:
    file = TierFile(path, CAPACITY)
    each = record("k")
    with mmap.mmap(-1, each.record_bytes) as area, memoryview(area) as view:
        view[: each.head_bytes] = encode_head(each, 0, file.file_id)
        file.write(0, view)
    file.close()
    for place in SUPERBLOCK_PLACES:
        _damage(path, place)
        again = TierFile(path, CAPACITY)
        assert again.file_id == file.file_id
        assert [found for _, found in again.scan()] == [each]
        again.close()
        with path.open("r+b") as wiped:
            wiped.seek(place)
            wiped.write(bytes(UNIT))
        TierFile(path, CAPACITY).close()
    assert all(decode_superblock(path.read_bytes()[place:]) == file.file_id for place in SUPERBLOCK_PLACES)
    _damage(path, *SUPERBLOCK_PLACES)
    again = TierFile(path, CAPACITY)
    assert list(again.scan()) == []
    assert again.file_id != file.file_id
    again.close()


def test_a_superblock_that_cannot_be_read_is_passed_over(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = TierFile(path, CAPACITY)
    file.close()
    bad: set[int] = set()
    preadv = os.preadv

    def failing(fd: int, buffers: Any, offset: int) -> int:
        if offset in bad:
            raise OSError(errno.EIO, "bad sector")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    for place in SUPERBLOCK_PLACES:
        bad = {place}
        again = TierFile(path, CAPACITY)
        assert again.file_id == file.file_id
        again.close()
    bad = set(SUPERBLOCK_PLACES)
    with pytest.raises(ConfigError, match="cannot be read"):
        TierFile(path, CAPACITY)


def test_a_file_of_another_format_is_refused(path: Path) -> None:
    before = b"THTIER01".ljust(UNIT, b"i") + b"THCHUNK1".ljust(CAPACITY, b"v")
    path.write_bytes(before)
    with pytest.raises(ConfigError, match="of format 1, and this release reads format 2"):
        TierFile(path, CAPACITY)
    assert path.read_bytes() == before


@pytest.mark.parametrize("newer_first", [False, True])
def test_of_two_records_of_one_key_the_one_written_later_stands(newer_first: bool, path: Path) -> None:
    """Power was lost before the wipe of the older one was on the medium; the newer may lie anywhere."""
    disk, state, values = Disk(path), make_state(), {1: b"old" * 100, 2: b"new" * 100}
    filler, _ = evict(state, record("filler", 5000))
    assert filler is not None
    first, _ = evict(state, record("k", 300, 1, values[1], sequence=state.next_sequence(100.0)))
    assert first is not None
    disk.queue.append(Write(first))
    disk.values[first] = values[1]
    state.written(first, ok=True)
    state.begin_read(first)  # so its range is not the newer one's
    if newer_first:
        state.drop(filler)
    second, todo = evict(state, record("k", 300, 2, values[2], sequence=state.next_sequence(50.0)))
    assert second is not None
    disk.values[second] = values[2]
    assert (second.offset < first.offset) is newer_first
    assert second.offset != first.offset
    assert Wipe(first.offset) in todo
    disk.queue.append(Write(second))  # and no wipe
    while disk.queue:
        disk.perform(None)
    for _ in range(2):
        again = disk.restart(ManualClock())
        (entry,) = again.entries()
        assert disk.read(entry) == values[2]
        assert again.counters.recovered == 1
        assert again.next_sequence(0.0) > second.record.sequence
    disk.file.close()


def test_no_garbage_collection_looks_at_entries() -> None:
    """Ten million of them would make each last for seconds."""
    state = make_state()
    entry = store(state, record("k"))
    assert not gc.is_tracked(entry)
    assert not gc.is_tracked(entry.record)
    assert not gc.is_tracked(entry.checksums)


class Disk:
    """A real file under a TierState; ``crash`` performs only a part of what was asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[SsdChunk, bytes] = {}
        self.queue: list[Write | Wipe] = []
        self.buffer = mmap.mmap(-1, QUEUE)
        self.open()

    def open(self) -> None:
        self.file = TierFile(self.path, CAPACITY + HEADER_BYTES)

    def perform(self, state: TierState | None, torn_units: int | None = None) -> None:
        """The first of the queue; ``torn_units``: only so much of it reaches the disk."""
        each = self.queue.pop(0)
        if isinstance(each, Wipe):
            self.file.wipe(each.offset)
            return
        entry, value = each.entry, self.values[each.entry]
        head = encode_head(entry.record, entry.offset, self.file.file_id)
        size = entry.range_bytes
        self.buffer[:size] = (head + value).ljust(size, b"\0")
        length = size if torn_units is None else min(torn_units * UNIT, size)
        with memoryview(self.buffer)[:length] as view:
            if length:
                self.file.write(entry.offset, view)
        if state is not None:
            state.written(entry, ok=True)

    def read(self, entry: SsdChunk) -> bytes | None:
        with memoryview(self.buffer)[: entry.range_bytes] as view:
            try:
                self.file.read(entry.offset, view)
            except OSError:
                return None
            if decode_head(view, entry.offset, self.file.file_id) != entry.record:
                return None
            head = entry.record.head_bytes
            value = bytes(view[head : head + entry.size_bytes])
        return value if sums.matches(value, entry.checksums) else None

    def restart(self, clock: ManualClock) -> TierState:
        self.file.close()
        self.open()
        state = make_state(clock)
        for offset, found in self.file.scan():
            for each in state.recover(found, offset, 0.0):
                assert isinstance(each, Wipe)
                self.file.wipe(each.offset)
        state.check()
        return state


@pytest.mark.parametrize("seed", range(6))
def test_a_life_with_crashes_returns_no_wrong_byte_and_nothing_removed(seed: int, path: Path) -> None:
    """Removals that were confirmed hold over every crash; values are right or missing."""
    rng, clock = random.Random(seed), ManualClock()
    disk, state = Disk(path), make_state(clock)
    truth: dict[tuple[str, int], bytes] = {}
    gone: set[str] = set()
    version = num_found = num_torn = 0
    for _ in range(1500):
        action = rng.random()
        key = f"k{rng.randrange(60)}"
        if action < 0.45:
            if state.find(ChunkKey(key)) is None:
                version += 1
                value = rng.randbytes(rng.choice((50, 3000, 5000, 14000)))
                truth[key, version] = value
                gone.discard(key)
                entry, todo = evict(state, record(key, version=version, value=value))
                if entry is not None:
                    disk.values[entry] = value
                disk.queue += [each for each in todo if not isinstance(each, LostChunk)]
        elif action < 0.75 and disk.queue:
            disk.perform(state)
        elif action < 0.9:
            entry = state.find(ChunkKey(key))
            if entry is not None and entry.state is SsdChunkState.STORED:
                value = disk.read(entry)
                num_found += value is not None
                assert value is None or value == truth[key, entry.version]
                if value is None:  # torn before a crash
                    num_torn += 1
                    disk.queue += [e for e in state.not_read(entry, corrupt=True) if not isinstance(e, LostChunk)]
        elif action < 0.97:
            entry = state.find(ChunkKey(key))
            if entry is not None:
                disk.queue += [each for each in state.drop(entry) if not isinstance(each, LostChunk)]
            while disk.queue:
                disk.perform(state)
            gone.add(key)
        elif disk.queue:
            for _ in range(rng.randrange(len(disk.queue))):
                disk.perform(None)
            disk.perform(None, torn_units=rng.randrange(4))
            disk.queue.clear()
            state = disk.restart(clock)
            assert not gone & {str(entry.key) for entry in state}, "removed chunks came back"
        state.check()
    assert num_found > 50
    assert num_torn > 0 or seed
    disk.file.close()


def test_the_scan_finds_everything_between_holes(path: Path) -> None:
    disk, state = Disk(path), make_state()
    rng = random.Random(3)
    kept: dict[str, bytes] = {}
    for i in range(40):
        value = rng.randbytes(rng.choice((10, 4000, 9000)))
        entry, todo = evict(state, record(f"k{i}", version=i, value=value))
        assert entry is not None
        disk.values[entry] = value
        disk.queue += [each for each in todo if not isinstance(each, LostChunk)]
        while disk.queue:
            disk.perform(state)
        if i % 3 == 0:
            disk.queue += [each for each in state.drop(entry) if not isinstance(each, LostChunk)]
    while disk.queue:
        disk.perform(state)
    kept = {str(entry.key): disk.values[entry] for entry in state}
    again = disk.restart(ManualClock())
    assert {str(entry.key): disk.read(entry) for entry in again} == kept
    assert again.counters.recovered == len(kept)
    disk.file.close()


def test_the_scan_reads_long_heads_and_jumps_over_long_records(path: Path) -> None:
    """Heads of several units behind records of every length, at every place in the scan's windows."""
    file = TierFile(path, 64 << 20)
    rng, place = random.Random(4), 0
    written: list[tuple[int, SsdRecord]] = []
    while place < 24 << 20:
        parts = rng.choice((1, 1, 1, 300, 1200, 4000))
        size = max(rng.choice((100, 5000, 70_000, 300_000, 2_000_000)), parts)
        part_bytes = 0 if parts == 1 else -(-size // parts)
        num_parts = 1 if parts == 1 else -(-size // part_bytes)
        each = SsdRecord(ChunkKey(f"k{place}"), place, size, Checksums(part_bytes, (7,) * num_parts))
        with mmap.mmap(-1, each.record_bytes) as area, memoryview(area) as view:
            view[: each.head_bytes] = encode_head(each, place, file.file_id)
            file.write(place, view)
        written.append((place, each))
        place += each.record_bytes + rng.choice((0, 0, UNIT, 300 * UNIT))
    assert list(file.scan()) == written
    file.close()
