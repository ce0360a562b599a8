"""The memory that client and node share in a write buffer: records, numbers, uses."""

from __future__ import annotations

import struct
import threading

from hypothesis import given
from hypothesis import strategies as st

from tanghulu.store.protocol import write_buffer as layout
from tanghulu.store.protocol.types import Pin
from tanghulu.store.protocol.write_buffer import (
    BufferPlace,
    BufferReader,
    BufferWriter,
    Record,
    pack_record,
    unpack_record,
)

RECORDS = st.builds(
    Record,
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=50),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**63),
    st.integers(0, 2**63),
    st.integers(0, 2**64 - 1),
    st.sampled_from([Pin.NONE, Pin.SOFT]),
    st.integers(0, 2**32 - 1),
)


@given(RECORDS, st.integers(0, 2**40))
def test_a_record_comes_back_as_what_it_was_and_at_its_number_only(record: Record, number: int) -> None:
    data = pack_record(record, number)
    assert len(data) <= layout.RECORD_BYTES
    padded = data.ljust(layout.RECORD_BYTES, b"\xff")
    assert unpack_record(padded, number) == record
    assert unpack_record(padded, number + layout.RECORD_BYTES) is None


@given(RECORDS, st.integers(0, 255), st.integers(1, 255))
def test_a_torn_record_is_none(record: Record, place: int, flip: int) -> None:
    data = bytearray(pack_record(record, 3))
    data[place % len(data)] ^= flip
    assert unpack_record(bytes(data).ljust(layout.RECORD_BYTES, b"\0"), 3) is None


def test_the_longest_key() -> None:
    record = Record("k" * layout.MAX_KEY_BYTES, 1, 64, 1, 2)
    assert unpack_record(pack_record(record, 0), 0) == record


def test_the_head_is_as_documented() -> None:
    memory = memoryview(bytearray(1 << 20))
    place = BufferPlace(0, 4096, 256, 1 << 19, 8192)
    reader, writer = BufferReader(memory, place), BufferWriter(memory, place)
    where = writer.begin(4096)
    assert where == 0
    assert writer.begin(4097) is None
    writer.fill(where, memoryview(b"v" * 4096))
    assert struct.unpack_from("<4Q", memory) == (1, 0, 0, 0)
    assert not reader.fresh
    writer.publish(Record("k", 7, where, 4096, 9))
    assert struct.unpack_from("<4Q", memory) == (1, 1, 1, 0)
    assert reader.fresh
    assert list(reader.take()) == [Record("k", 7, where, 4096, 9)]
    assert struct.unpack_from("<2Q", memory, 64) == (1, 0)
    writer.leave()
    assert struct.unpack_from("<4Q", memory) == (1, 1, 1, 2), "left: one more than the records"
    assert reader.left


def test_a_writer_waits_for_a_node_that_is_behind() -> None:
    memory = memoryview(bytearray(1 << 20))
    place = BufferPlace(0, 4096, 4, 8192, 1 << 16)
    reader, writer = BufferReader(memory, place), BufferWriter(memory, place)
    places = [writer.begin(64) for _ in range(4)]
    assert None not in places
    assert writer.begin(64) is None, "four uses are open"
    writer.abandon(places[3] or 0, 64)
    for i, where in enumerate(places[:3]):
        writer.publish(Record(f"k{i}", i, where or 0, 64, 0))
    assert writer.begin(64) == places[3], "what was given up is used again"
    assert writer.begin(64) is None, "three records were not taken"
    assert [record.key for record in reader.take() if record is not None] == ["k0", "k1", "k2"]
    assert writer.begin(64) is not None
    assert writer.fits(64)
    assert not writer.fits(1 << 16)


def test_a_use_that_begins_when_the_buffer_is_closed_counts_as_ended() -> None:
    memory = memoryview(bytearray(1 << 20))
    place = BufferPlace(0, 4096, 4, 8192, 1 << 16)
    reader, writer = BufferReader(memory, place), BufferWriter(memory, place)
    where = writer.begin(64)
    assert where is not None
    reader.close()
    assert writer.begin(64) is None
    assert not reader.quiet
    writer.leave()
    assert not reader.left, "a use is open"
    writer.abandon(where, 64)
    assert reader.quiet
    assert reader.left


def test_a_writer_of_many_threads_loses_nothing() -> None:
    memory = memoryview(bytearray(1 << 20))
    place = BufferPlace(0, 4096, 256, 1 << 17, 1 << 19)
    reader, writer = BufferReader(memory, place), BufferWriter(memory, place)
    seen: list[str] = []

    def use(number: int) -> None:
        for i in range(200):
            where = writer.begin(64)
            while where is None:
                where = writer.begin(64)
            writer.publish(Record(f"{number}-{i}", 1, where, 64, 0))

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    while len(seen) < 800:
        seen += [record.key for record in reader.take() if record is not None]
    for thread in threads:
        thread.join()
    assert sorted(seen) == sorted(f"{n}-{i}" for n in range(4) for i in range(200))
    assert reader.quiet


def test_who_has_left_does_not_touch_the_head_again() -> None:
    memory = memoryview(bytearray(8192))
    place = BufferPlace(0, 128, 4, 4096, 4096)
    first_reader, first = BufferReader(memory, place), BufferWriter(memory, place)
    first.leave()
    assert first_reader.left
    reader, writer = BufferReader(memory, place), BufferWriter(memory, place)  # the head is given to the next buffer
    del first
    assert not reader.left, "only its own client may say so"
    del writer
    assert reader.left


def test_a_use_ends_once() -> None:
    """Who was interrupted behind the publishing of a record abandons it too; its value is the node's by then."""
    memory = memoryview(bytearray(1 << 20))
    place = BufferPlace(0, 4096, 256, 1 << 19, 8192)
    reader, writer = BufferReader(memory, place), BufferWriter(memory, place)
    where = writer.begin(4096)
    assert where is not None
    writer.publish(Record("k", 1, where, 4096, 2))
    other = writer.begin(64)
    assert other == 4096
    writer.abandon(where, 4096)
    assert not reader.quiet
    writer.abandon(other, 64)
    writer.abandon(other, 64)
    assert reader.quiet
    assert writer.begin(64) == 4096
