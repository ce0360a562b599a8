from __future__ import annotations

import itertools
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.errors import InvalidRequest
from tanghulu.rpc.frames import (
    HEAD,
    MAX_ATTACHMENT_BYTES,
    MAX_BODY_BYTES,
    FrameReader,
    call_id_of,
    decode_head,
    encode_head,
)

frames = st.lists(
    st.tuples(st.integers(0, 0xFFFF), st.integers(0, 0xFFFFFFFF), st.binary(max_size=200), st.binary(max_size=200)),
    max_size=20,
)


def encode(method: int, call_id: int, body: bytes, attachment: bytes) -> bytes:
    return encode_head(method, call_id, len(body), len(attachment)) + body + attachment


def read(reader: FrameReader, data: bytes) -> list[tuple[int, int, bytes, bytes]]:
    return [(f.method, f.call_id, f.body, bytes(f.attachment)) for f in reader.feed(data)]


@given(frames, st.data())
def test_frames_survive_any_split(sent, data) -> None:
    stream = b"".join(encode(*frame) for frame in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=30)))
    reader = FrameReader()
    got = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += read(reader, stream[start:end])
    assert got == sent


@pytest.mark.parametrize("size", [1, 1 << 20, 2 << 20, 9_000_001])
def test_a_large_frame_that_comes_in_pieces(size: int) -> None:
    """Its memory grows with what has come."""
    value = bytes(range(256)) * (size // 256 + 1)
    stream = encode(7, 8, b"body", value) + encode(1, 2, b"next", b"")
    reader, got = FrameReader(), []
    for start in range(0, len(stream), 100_000):
        got += read(reader, stream[start : start + 100_000])
        if reader.partial is not None:
            assert len(reader.partial.rest) <= max(start + 100_000, 2 << 20)
    assert got == [(7, 8, b"body", value), (1, 2, b"next", b"")]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5 << 20), st.lists(st.integers(1 << 16, 2 << 20), min_size=1))
def test_a_partial_frame_that_is_read_into(size: int, counts: list[int]) -> None:
    value = b"\x07" * size
    frame = encode(7, 8, b"body", value)
    reader = FrameReader()
    assert read(reader, frame[:20]) == []
    assert reader.partial is not None
    position = 20
    for count in itertools.cycle(counts):
        rest = reader.partial.rest
        count = min(count, len(rest))
        rest[:count] = frame[position : position + count]
        reader.partial.filled(count)
        position += count
        if not reader.partial.missing:
            break
    whole = reader.finish()
    assert (whole.method, whole.call_id, whole.body, bytes(whole.attachment)) == (7, 8, b"body", value)
    assert reader.partial is None


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200_000), st.lists(st.integers(500, 100_000), min_size=1), st.booleans())
def test_an_attachment_is_received_where_it_belongs(size: int, counts: list[int], welcome: bool) -> None:
    """Whatever the pieces; small ones, those that come with their head and those without a place come as ever."""
    value = bytes(range(256)) * (size // 256 + 1)
    stream = encode(7, 8, b"body", value) + encode(1, 2, b"next", b"more")
    places: list[memoryview] = []

    def place(method: int, body: bytes, num_bytes: int) -> memoryview | None:
        assert (method, body, num_bytes) == (7, b"body", len(value))
        places.append(memoryview(bytearray(num_bytes)))
        return places[0] if welcome else None

    reader, got, position = FrameReader(place), [], 0
    for count in itertools.cycle(counts):
        got += read(reader, stream[position : position + count])
        position += count
        if position >= len(stream):
            break
    assert got == [(7, 8, b"body", value), (1, 2, b"next", b"more")]
    assert len(places) <= 1
    if places and welcome:
        assert places[0] == value


@given(frames)
def test_frames_survive_byte_by_byte(sent) -> None:
    reader = FrameReader()
    stream = b"".join(encode(*frame) for frame in sent)
    assert [frame for byte in stream for frame in read(reader, bytes([byte]))] == sent


@given(st.lists(st.binary(max_size=100), max_size=20))
def test_arbitrary_bytes_are_frames_or_a_typed_error(pieces) -> None:
    reader = FrameReader()
    try:
        for piece in pieces:
            read(reader, piece)
    except InvalidRequest:
        pass


@pytest.mark.parametrize(("body", "attachment"), [(MAX_BODY_BYTES + 1, 0), (0, MAX_ATTACHMENT_BYTES + 1)])
def test_oversize_is_refused_on_both_sides(body: int, attachment: int) -> None:
    with pytest.raises(InvalidRequest, match="send fewer keys"):
        encode_head(1, 1, body, attachment)
    head = HEAD.pack(body, attachment, 1, 0, 1)
    with pytest.raises(InvalidRequest, match="the peer announced a frame of"):
        decode_head(head)
    with pytest.raises(InvalidRequest):
        list(FrameReader().feed(head))


def test_a_good_frame_in_front_of_a_bad_head_is_read() -> None:
    good = encode(1, 2, b"body", b"more")
    bad = struct.pack("<IIHHI", 0xFFFFFFFF, 0, 0, 0, 0)
    reader = FrameReader().feed(good + bad)
    assert next(reader).body == b"body"
    with pytest.raises(InvalidRequest):
        next(reader)


def test_a_large_frame_in_small_pieces_is_not_copied_again_and_again() -> None:
    frame = encode(1, 1, b"", bytes(48 << 20))
    reader = FrameReader()
    started = time.process_time()
    got = [f for start in range(0, len(frame), 64 << 10) for f in reader.feed(frame[start : start + (64 << 10)])]
    assert len(got[0].attachment) == 48 << 20
    assert time.process_time() - started < 1.0  # quadratic copying takes about ten seconds


def test_call_ids_go_round_and_leave_out_zero() -> None:
    assert [call_id_of(n) for n in (0, 1, (1 << 32) - 2, (1 << 32) - 1)] == [1, 2, (1 << 32) - 1, 1]
