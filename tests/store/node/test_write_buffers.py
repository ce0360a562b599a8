"""WriteBuffers at their node: what it makes of them, and when memory and heads are free again."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tanghulu.store.node.state import write_buffers as buffers
from tanghulu.store.node.state.chunk import ChunkState
from tanghulu.store.node.state.confirmations import ReportOutcome
from tanghulu.store.node.state.outcomes import CommittedBy
from tanghulu.store.protocol.types import Pin
from tanghulu.store.protocol.write_buffer import BufferWriter, Record
from tanghulu.types import ChunkKey
from tests.store.node.rig import new
from tests.store.node.write_buffer_rig import CAPACITY, SESSION, Rig


def test_what_is_published_becomes_a_chunk_where_it_lies() -> None:
    rig = Rig()
    writer = rig.open()
    rig.put(writer, "a", b"abc" * 20)
    rig.put(writer, "b", b"d" * 100, pin=Pin.SOFT)
    assert rig.state.chunks.find(ChunkKey("a")) is None
    assert rig.state.drain_buffers() == 2
    assert rig.state.drain_buffers() == 0
    assert rig.held("a") == b"abc" * 20
    found = rig.state.chunks.find(ChunkKey("b"))
    assert found is not None
    assert found.pin is Pin.SOFT
    assert [chunk.key for chunk in rig.state.reports.leader.take().added] == ["a", "b"]
    rig.check()


def test_a_message_does_not_leave_for_them_alone() -> None:
    rig = Rig()
    rig.put(rig.open(), "a")
    rig.state.drain_buffers()
    queue = rig.state.reports.leader
    assert not queue.urgent
    assert not queue.empty
    chunk = rig.state.chunks.find(ChunkKey("a"))
    assert chunk is not None
    rig.state.reports.confirm([chunk], 9.0, lambda words: None)
    assert queue.urgent
    rig.state.chunks.remove(ChunkKey("a"))
    assert not queue.urgent


def test_an_idle_buffer_is_closed_and_its_rest_is_free_while_its_head_is_not() -> None:
    rig = Rig()
    writer = rig.open()
    rig.put(writer, "a", b"a" * 64)
    rig.later(0.1)
    used = rig.state.chunks.used_bytes
    assert used == CAPACITY * buffers.ONE_FRACTION
    rig.later(buffers.IDLE_S + 0.1)
    assert writer.closed
    assert rig.state.chunks.used_bytes == used, "a use may have begun in this moment"
    rig.later(0.01)
    assert rig.state.chunks.used_bytes == 64
    assert rig.held("a") == b"a" * 64
    assert rig.buffers.knows(SESSION), "the client may still look at the head"
    assert writer.begin(64) is None
    writer.leave()
    rig.later(0.01)
    assert not rig.buffers.knows(SESSION)


def test_a_buffer_that_was_left_makes_room_for_the_next_at_once() -> None:
    rig = Rig()
    for i in range(100):
        writer = rig.open()
        rig.put(writer, f"k{i}", b"k" * 64)
        writer.leave()
    rig.check()
    assert rig.buffers.num_open == 1
    assert rig.held("k98") == b"k" * 64


def test_a_writer_that_nobody_refers_to_has_left() -> None:
    rig = Rig()
    writer = rig.open()
    rig.put(writer, "k", b"k" * 64)
    del writer
    rig.later(0.01)
    assert not rig.buffers.knows(SESSION)
    assert rig.held("k") == b"k" * 64


def test_memory_is_not_free_while_a_use_is_open() -> None:
    rig = Rig()
    writer = rig.open()
    place = writer.begin(64)
    assert place is not None
    rig.later(10)
    rig.later(10)
    assert rig.state.chunks.used_bytes > 64, "the client was stopped while it wrote"
    writer.fill(place, memoryview(b"z" * 64))
    writer.publish(Record("late", 1, place, 64, xxhash.xxh3_64_intdigest(b"z" * 64)))
    rig.later(0.01)
    assert rig.held("late") == b"z" * 64
    rig.later(0.01)
    assert rig.state.chunks.used_bytes == 64


@pytest.mark.parametrize("leaves", [False, True])
def test_a_record_that_is_seen_after_the_end_of_its_use_is_not_lost(leaves: bool) -> None:
    """On a processor that does not keep the order of stores: what was stored first is seen last."""
    rig = Rig()
    writer = rig.open()
    rig.put(writer, "a", b"a" * 64)
    rig.later(0.01)
    late = rig.memory[CAPACITY:]
    before = bytes(late)
    rig.put(writer, "b", b"b" * 64)
    if leaves:
        writer.leave()
    after = bytes(late)
    late[:] = before
    head = slice(0, 64)  # the first head's, of the client: begun, ended, written, left
    words, now = late[head].cast("Q"), memoryview(after)[head].cast("Q")
    words[0] = now[0]
    if not leaves:
        rig.state.close_session(SESSION)
        rig.later(1)
    words[1], words[3] = now[1], now[3]
    rig.later(buffers.GRACE_S / 2)
    assert rig.buffers.num_open == 1
    late[head] = after[head]
    rig.later(buffers.GRACE_S / 4)
    assert rig.buffers.num_open == 1
    late[64:] = after[64:]  # the record, too
    rig.later(buffers.GRACE_S)
    rig.later(buffers.GRACE_S)
    assert rig.buffers.num_open == 0
    assert rig.held("a") == b"a" * 64
    assert rig.held("b") == b"b" * 64


@pytest.mark.parametrize("closed", [False, True])
def test_a_process_that_has_ended_leaves_what_it_published(closed: bool) -> None:
    rig = Rig()
    writer = rig.open()
    rig.put(writer, "a", b"a" * 64)
    assert writer.begin(64) is not None
    if closed:
        rig.state.close_session(SESSION)
    rig.state.session_exited(SESSION)
    rig.check()
    assert rig.held("a") == b"a" * 64
    assert rig.state.chunks.used_bytes == 64
    assert not rig.buffers.knows(SESSION)


def test_a_lost_session_keeps_its_memory_until_it_is_quiet() -> None:
    rig = Rig()
    writer = rig.open()
    place = writer.begin(64)
    rig.state.close_session(SESSION)
    rig.later(1)
    assert rig.state.chunks.used_bytes > 64
    writer.abandon(place or 0, 64)
    rig.later(0.01)
    rig.later(0.01)
    assert rig.state.chunks.used_bytes == 0


def test_no_buffer_while_others_wait_for_room_or_the_node_drains() -> None:
    rig = Rig()
    writer = rig.open()
    rig.state.draining = True
    assert rig.state.grant_buffer(SESSION, 64) is None
    rig.later(0.01)
    assert writer.closed
    rig = Rig()
    writer = rig.open()
    assert rig.state.reserve(new("big", CAPACITY), None) is None
    rig.state.wait_for_room(new("big", CAPACITY), None)
    assert rig.state.grant_buffer(SESSION, 64) is None
    rig.later(0.01)
    rig.later(0.01)
    served = rig.state.admit_waiters()
    assert len(served) == 1, "the whole memory can be had"


def test_buffers_take_a_bounded_part_and_evict_for_it() -> None:
    rig = Rig()
    fill = [f"old{i}" for i in range(64)]
    for i, key in enumerate(fill):
        reserved = rig.state.reserve(new(key, CAPACITY // 64, version=i), None)
        assert reserved is not None
        rig.state.commit(reserved.chunk, new(key).checksums, CommittedBy.NODE_UNAWAITED)  # type: ignore[arg-type]
        rig.state.chunks.space.end_batch()
    given = []
    for session in range(100):
        place = rig.state.grant_buffer(session, 64)
        if place is None:
            break
        given.append(place)
    rig.check()
    assert sum(place.length for place in given) == CAPACITY * buffers.ALL_FRACTION
    gone = [key for key in fill if rig.state.chunks.find(ChunkKey(key)) is None]
    assert gone == fill[: len(gone)], "the oldest"
    assert len(gone) == 8
    assert Rig(64 * 64).state.grant_buffer(SESSION, 4096) is None, "too little memory for any"


@pytest.mark.parametrize(
    "record",
    [
        Record("k", 1, 65_536 + 1, 64, 0),  # crooked
        Record("k", 1, 1 << 40, 64, 0),
        Record("k", 1, 65_536, 0, 0),
        Record("k", 1, 65_536, 1 << 40, 0),
        Record("", 1, 65_536, 64, 0),
    ],
)
def test_a_record_that_no_client_writes_closes_the_buffer(record: Record) -> None:
    rig = Rig()
    writer = rig.open()
    rig.put(writer, "before")
    writer.begin(64)
    writer.publish(record)
    rig.state.drain_buffers()
    assert writer.closed
    assert rig.held("before") is not None
    rig.later(0.1)
    assert rig.state.chunks.used_bytes == 64


def test_a_client_that_may_not_put_kv_cannot_publish_it() -> None:
    rig = Rig()
    for key, scope in (("kv/1", ""), ("kv/1", "@acme/"), ("@acme/sgl/1", "")):
        place = rig.state.grant_buffer(SESSION, 64, scope, puts_kv=False)
        assert place is not None
        writer = BufferWriter(rig.memory, place)
        rig.put(writer, "doc")
        rig.put(writer, key)
        rig.later(0.1)
        assert rig.held(scope + "doc") is not None
        assert rig.held(scope + key) is None


def test_a_part_of_a_buffer_becomes_one_chunk_only() -> None:
    rig = Rig()
    writer = rig.open()
    place = writer.begin(128)
    assert place is not None
    writer.publish(Record("k", 1, place, 128, 0))
    writer.begin(64)
    writer.publish(Record("again", 2, place + 64, 64, 0))
    rig.state.drain_buffers()
    rig.check()
    assert rig.held("again") is None
    assert writer.closed


def test_more_records_than_there_are_close_the_buffer() -> None:
    rig = Rig()
    writer = rig.open()
    writer._words[2] = 1 << 40
    rig.state.drain_buffers()
    assert writer.closed


def test_it_displaces_what_the_master_has_not_confirmed() -> None:
    rig = Rig()
    writer = rig.open()
    words: list[list[ReportOutcome]] = []  # of the master, that somebody waits for
    for key, confirmed in (("mine", False), ("theirs", True)):
        reserved = rig.state.reserve(new(key, version=1), None)
        assert reserved is not None
        rig.state.commit(reserved.chunk, new(key).checksums, CommittedBy.NODE)  # type: ignore[arg-type]
        rig.state.reports.confirm([reserved.chunk], 9.0, words.append)
        if confirmed:
            message = rig.state.reports.leader.take()
            for chunk in message.added:
                rig.state.reported(chunk, accepted=True)
            rig.state.reports.leader.done()
        rig.put(writer, key, version=2)
        rig.state.drain_buffers()
        rig.check()
        found = rig.state.chunks.table.find(ChunkKey(key))
        assert found is not None
        assert found.version == (1 if confirmed else 2)
        assert found.state is ChunkState.LIVE
    assert words == [[False], [True]]


def test_a_record_of_a_chunk_that_stands_already_frees_its_part() -> None:
    rig = Rig()
    writer = rig.open()
    rig.put(writer, "k", version=5)
    rig.put(writer, "k", version=5)
    rig.state.drain_buffers()
    writer.leave()
    rig.later(0.1)
    rig.later(0.1)
    assert rig.state.chunks.used_bytes == 64


class AnyWriteBuffers(RuleBasedStateMachine):
    """Writers, evictions, exits and time in any order: the books balance, and published values are whole."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(1 << 18)
        self.sessions = 100
        self.writers: dict[int, BufferWriter] = {}
        self.uses: list[tuple[int, int, int]] = []  # session, place, size
        self.version = 0

    @rule(size=st.sampled_from([10, 300, 1000]))
    def ask(self, size: int) -> None:
        self.sessions += 1
        place = self.rig.state.grant_buffer(self.sessions, size)
        if place is not None:
            self.writers[self.sessions] = BufferWriter(self.rig.memory, place)

    @rule(data=st.data(), size=st.integers(1, 1500))
    def begin(self, data: st.DataObject, size: int) -> None:
        if self.writers:
            session = data.draw(st.sampled_from(sorted(self.writers)))
            place = self.writers[session].begin(size)
            if place is not None:
                self.uses.append((session, place, size))

    @rule(data=st.data(), key=st.sampled_from("abcdef"), publishes=st.booleans())
    def end(self, data: st.DataObject, key: str, publishes: bool) -> None:
        if self.uses:
            session, place, size = self.uses.pop(data.draw(st.integers(0, len(self.uses) - 1)))
            value = bytes([ord(key)]) * size
            self.version += 1
            if publishes:
                self.writers[session].fill(place, memoryview(value))
                self.writers[session].publish(Record(key, self.version, place, size, xxhash.xxh3_64_intdigest(value)))
            else:
                self.writers[session].abandon(place, size)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.writers:
            self.writers[data.draw(st.sampled_from(sorted(self.writers)))].leave()

    @rule(data=st.data())
    def exit(self, data: st.DataObject) -> None:
        if self.writers:
            session = data.draw(st.sampled_from(sorted(self.writers)))
            self.rig.state.session_exited(session)
            del self.writers[session]
            self.uses = [use for use in self.uses if use[0] != session]

    @rule(key=st.sampled_from("abcdefgh"), size=st.integers(1, 60_000))
    def put(self, key: str, size: int) -> None:
        self.version += 1
        outcome = self.rig.state.reserve(new(key, size, version=self.version), None)
        if outcome is not None and hasattr(outcome, "lease_id"):
            offset = outcome.chunk.offset
            self.rig.memory[offset : offset + size] = bytes([ord(key)]) * size
            self.rig.state.commit(outcome.chunk, new(key).checksums, CommittedBy.NODE_UNAWAITED)

    @rule(key=st.sampled_from("abcdefgh"))
    def remove(self, key: str) -> None:
        self.rig.state.drain_buffers()
        self.rig.state.chunks.remove(ChunkKey(key))

    @rule(seconds=st.sampled_from([0.001, 0.01, 3.0]))
    def wait(self, seconds: float) -> None:
        self.rig.later(seconds)

    @invariant()
    def sound(self) -> None:
        self.rig.check()
        for key in self.rig.state.chunks.table.keys():  # noqa: SIM118 - a table is no dict
            value = self.rig.held(key)
            assert value is None or set(value) == {ord(key)}, f"{key} was overwritten"


TestAnyWriteBuffers = AnyWriteBuffers.TestCase
TestAnyWriteBuffers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
