"""The packed messages carry what the schema says, whole, and refuse whatever is not a message."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.errors import ChunkNotFound, InvalidRequest, StoreFull, TanghuluError
from tanghulu.protos import directory_pb2, store_pb2
from tanghulu.store.protocol import packed, packed_directory, packed_node, packed_stream
from tanghulu.store.protocol import packed_write_buffer as packed_desk
from tanghulu.store.protocol.checksums import Checksums
from tanghulu.store.protocol.packed_directory import LocateReply, LocateRequest, Location
from tanghulu.store.protocol.packed_node import CommitRequest, Found, GetRequest, PutRequest, Reservation, UnpinRequest
from tanghulu.store.protocol.packed_stream import SettleRequest, StreamRequest
from tanghulu.store.protocol.types import LastWord, NewChunk, Pin, Proclamation, Verdict
from tanghulu.store.protocol.write_buffer import DeskPlace
from tanghulu.types import ChunkKey

U64 = st.integers(0, (1 << 64) - 1)
KEYS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
SUMS = st.one_of(
    st.just(Checksums()),
    st.builds(lambda part: Checksums(0, (part,)), U64),
    st.builds(lambda a, b: Checksums(8, (a, b)), U64, U64),
)


def error(text: str) -> TanghuluError:
    return ChunkNotFound(text)


def same(left: Any, right: Any) -> bool:
    """Equality in which errors are compared by code and text."""
    if isinstance(left, TanghuluError):
        return isinstance(right, TanghuluError) and (left.code, left.message) == (right.code, right.message)
    return bool(left == right)


@pytest.mark.parametrize(
    ("message", "fields", "elsewhere"),
    [
        # Values are behind the message, not in it; the key's word is in the schema's sub-messages.
        (store_pb2.PutRequest, PutRequest._fields, {"inline_data"}),
        (store_pb2.ReserveRequest, PutRequest._fields, set()),
        (store_pb2.StreamRequest, StreamRequest._fields, set()),
        (store_pb2.SettleRequest, SettleRequest._fields, set()),
        (store_pb2.PutItem, (*NewChunk._fields, "ttl_ms"), set()),
        (store_pb2.Checksums, Checksums._fields, set()),
        (store_pb2.Reservation, (*Reservation._fields, "status", "existed"), set()),
        (store_pb2.CommitRequest, CommitRequest._fields, set()),
        (store_pb2.GetRequest, GetRequest._fields, set()),
        (store_pb2.GetReply, ("items", "lease_ms"), {"inline_data"}),
        (store_pb2.GetItem, (*Found._fields, "status"), set()),
        (store_pb2.UnpinRequest, UnpinRequest._fields, set()),
        (store_pb2.DeskRequest, ("value_bytes",), set()),
        (store_pb2.DeskReply, DeskPlace._fields, set()),
        (directory_pb2.ProclaimRequest, Proclamation._fields, set()),
        (directory_pb2.ProclaimReply, ("verdict",), set()),
        (directory_pb2.ProclaimManyRequest, (*Proclamation._fields, "keys", "versions", "sizes"), set()),
        (directory_pb2.ProclaimManyReply, ("verdicts",), set()),
        (directory_pb2.LocateRequest, LocateRequest._fields, set()),
        (directory_pb2.LocateReply, (*LocateReply._fields, "node_ids", "found"), {"status"}),
        (directory_pb2.Location, (*Location._fields, "nodes"), set()),
    ],
)
def test_every_field_of_the_schema_is_packed(
    message: type[Message], fields: tuple[str, ...], elsewhere: set[str]
) -> None:
    assert {field.name for field in message.DESCRIPTOR.fields} <= set(fields) | elsewhere


@given(st.lists(KEYS, max_size=30))
def test_keys_come_back(keys: list[str]) -> None:
    data = packed.pack_keys(keys)
    assert packed.unpack_keys(data, 0, len(data)) == keys
    sized = b"xx" + packed.pack_sized(keys) + b"yy"
    assert packed.unpack_sized(sized, 2) == (keys, len(sized) - 2)


@given(
    st.lists(st.tuples(KEYS, U64, SUMS, st.sampled_from(Pin), st.one_of(st.none(), st.integers(1, 9999))), max_size=5),
    st.booleans(),
    st.integers(0, 1 << 31),
)
def test_put(rows: list[tuple[str, int, Checksums, Pin, int | None]], visible: bool, deadline_ms: int) -> None:
    items = [
        NewChunk(
            ChunkKey(key),
            version,
            max(8 * len(sums.parts), 1),
            sums,
            pin,
            None if ttl is None else ttl / 1000,
            1 + len(key) % 9,
        )
        for key, version, sums, pin, ttl in rows
    ]
    assert packed_node.unpack_put(packed_node.pack_put(items, visible, deadline_ms)) == (items, visible, deadline_ms)


def test_the_example_of_the_documentation() -> None:
    new = NewChunk(ChunkKey("ab"), 7, 3, Checksums(0, (9,)))
    text = "e8030000 01000000 01000000 0700000000000000 0300000000000000 0000000000000000 00000000 0200 0100 00010000"
    assert packed_node.pack_put([new], True, 1000) == bytes.fromhex(text + "0900000000000000 6162")
    assert packed.__doc__ is not None
    assert "0700000000000000 0300000000000000 0000000000000000 00000000 0200 0100 00010000" in packed.__doc__


@given(st.lists(st.one_of(st.booleans(), st.builds(error, KEYS)), max_size=6))
def test_outcomes(outcomes: list[bool | TanghuluError]) -> None:
    back = packed_node.unpack_outcomes(packed_node.pack_outcomes(outcomes))
    assert len(back) == len(outcomes)
    assert all(map(same, back, outcomes))


@given(st.lists(st.one_of(st.none(), st.builds(error, KEYS), st.builds(Reservation, U64, U64, st.booleans()))))
def test_reservations(outcomes: list[Reservation | TanghuluError | None]) -> None:
    back = packed_node.unpack_reservations(packed_node.pack_reservations(outcomes))
    assert len(back) == len(outcomes)
    assert all(map(same, back, outcomes))


@given(st.lists(st.tuples(U64, SUMS), max_size=4), st.lists(U64, max_size=4), st.booleans())
def test_commit(items: list[tuple[int, Checksums]], aborted: list[int], visible: bool) -> None:
    request = CommitRequest(items, aborted, visible, 77)
    assert packed_node.unpack_commit(packed_node.pack_commit(request)) == request


@given(U64, U64, SUMS, st.sampled_from(LastWord), KEYS, st.booleans())
def test_streams(stream_id: int, generation: int, sums: Checksums, word: LastWord, key: str, visible: bool) -> None:
    said = SettleRequest(stream_id, word, generation, sums)
    assert packed_stream.unpack_settle(packed_stream.pack_settle(said)) == said
    request = StreamRequest(stream_id, NewChunk(ChunkKey(key), generation, 100, pin=Pin.SOFT), visible, 77)
    assert packed_stream.unpack_stream(packed_stream.pack_stream(request)) == request


def test_a_stream_of_several_values_is_none() -> None:
    items = [NewChunk(ChunkKey(key), 1, 9) for key in "ab"]
    for some in (items, []):
        with pytest.raises(InvalidRequest):
            packed_stream.unpack_stream(packed.U64.pack(1) + packed_node.pack_put(some, True, 5))


@given(st.lists(KEYS, min_size=1, max_size=4), st.booleans())
def test_get(keys: list[str], verify: bool) -> None:
    assert packed_node.unpack_get(packed_node.pack_get(GetRequest(keys, 4096, verify, 9))) == (keys, 4096, verify, 9)


@given(st.lists(st.one_of(st.builds(error, KEYS), st.builds(Found, U64, U64, SUMS, U64, U64, st.booleans()))))
def test_found(items: list[Found | TanghuluError]) -> None:
    back = packed_node.unpack_found(packed_node.pack_found(items, 5))
    assert len(back) == len(items)
    assert all(map(same, back, items))


@given(U64, U64, U64, st.integers(0, (1 << 32) - 1))
def test_desks(head: int, offset: int, length: int, num_records: int) -> None:
    place = DeskPlace(head, head, num_records, offset, length)
    assert packed_desk.unpack_desk(packed_desk.pack_desk(place)) == (place if length else None)
    assert packed_desk.unpack_desk(packed_desk.pack_desk(None)) is None
    assert packed_desk.unpack_desk_request(packed_desk.pack_desk_request(head)) == head


@given(KEYS, U64, KEYS, U64, st.integers(0, (1 << 44) - 1), st.sampled_from(Verdict))
def test_proclamations(node: str, generation: int, key: str, version: int, size: int, verdict: Verdict) -> None:
    said = Proclamation(node, generation, ChunkKey(key), version, size)
    assert packed_desk.unpack_proclaim(packed_desk.pack_proclaim(said)) == said
    assert packed_desk.unpack_verdict(packed_desk.pack_verdict(verdict)) is verdict


@given(KEYS, U64, st.lists(st.tuples(KEYS, U64, st.integers(0, (1 << 44) - 1)), min_size=1, max_size=9))
def test_proclamations_of_many(node: str, generation: int, rows: list[tuple[str, int, int]]) -> None:
    said = [Proclamation(node, generation, ChunkKey(key), version, size) for key, version, size in rows]
    assert packed_desk.unpack_proclaim_many(packed_desk.pack_proclaim_many(said)) == said
    verdicts = [list(Verdict)[version % 3] for _, version, _ in rows]
    assert packed_desk.unpack_verdicts(packed_desk.pack_verdicts(verdicts)) == verdicts


def test_the_example_of_a_proclamation() -> None:
    text = "0200000000000000 0700000000000000 0500000000000000 0100 6e 6b"
    assert packed_desk.pack_proclaim(Proclamation("n", 2, ChunkKey("k"), 7, 5)) == bytes.fromhex(text)
    assert packed_desk.__doc__ is not None
    assert " ".join(text.split()) in " ".join(packed_desk.__doc__.split())


@pytest.mark.parametrize("data", [b"", b"\x03", b"\x01\x01"])
def test_a_verdict_that_is_none(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        packed_desk.unpack_verdict(data)


@given(st.lists(U64, max_size=4), U64, st.lists(KEYS, max_size=4), st.lists(KEYS, max_size=4))
def test_unpin(leases: list[int], num_bytes: int, corrupt: list[str], read: list[str]) -> None:
    back = packed_node.unpack_unpin(packed_node.pack_unpin(UnpinRequest(leases, num_bytes, corrupt, read)))
    assert (list(back.lease_ids), back.bytes_read, back.corrupt, back.read) == (leases, num_bytes, corrupt, read)


def test_answers_of_the_master() -> None:
    assert packed_directory.unpack_locate(packed_directory.pack_locate(["a", "b"], True)) == (["a", "b"], True)
    located = [Location(("n1", "n2"), 5, 6, 1), Location(), Location(("n2",), 7, 8)]
    assert packed_directory.unpack_located(packed_directory.pack_located(located, True)) == (located, True)
    for found in ([True] * 3, [True, False, True], []):
        assert packed_directory.unpack_existence(packed_directory.pack_existence(bytes(found), False)) == (found, False)


UNPACKERS = [
    (packed_node.unpack_put, packed_node.pack_put([NewChunk(ChunkKey("k"), 1, 9, Checksums(0, (3,)))], True, 5)),
    (packed_node.unpack_outcomes, packed_node.pack_outcomes([True, StoreFull("no")])),
    (packed_node.unpack_reservations, packed_node.pack_reservations([Reservation(1, 2, True), StoreFull("no")])),
    (packed_node.unpack_commit, packed_node.pack_commit(CommitRequest([(1, Checksums(0, (2,)))], [3], True, 4))),
    (packed_node.unpack_get, packed_node.pack_get(GetRequest(["a", "b"], 5))),
    (packed_node.unpack_found, packed_node.pack_found([Found(1, 2, Checksums(0, (1,)), 4, 5, True)], 6)),
    (packed_node.unpack_unpin, packed_node.pack_unpin(UnpinRequest([1], 2, ["a"], ["b"]))),
    (packed_stream.unpack_stream, packed_stream.pack_stream(StreamRequest(1, NewChunk(ChunkKey("k"), 1, 9), True, 5))),
    (packed_stream.unpack_settle, packed_stream.pack_settle(SettleRequest(1, LastWord.DROP, 2, Checksums(0, (3,))))),
    (packed_desk.unpack_proclaim_many, packed_desk.pack_proclaim_many([Proclamation("n", 1, ChunkKey("k"), 2, 3)] * 2)),
    (packed_desk.unpack_verdicts, packed_desk.pack_verdicts([Verdict.EXISTS])),
    (packed_directory.unpack_locate, packed_directory.pack_locate(["a"], False)),
    (packed_directory.unpack_located, packed_directory.pack_located([Location(("n",), 1, 2)], False)),
]


@pytest.mark.parametrize(("unpack", "good"), UNPACKERS)
def test_mutated_bytes_are_refused_or_understood_but_nothing_else(unpack: Any, good: bytes) -> None:
    rng = random.Random(11)
    unpack(good)
    for size in range(len(good)):
        _try(unpack, good[:size])
    for _ in range(500):
        mutant = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            mutant[rng.randrange(len(mutant))] = rng.randrange(256)
        _try(unpack, bytes(mutant))


def _try(unpack: Any, data: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        unpack(data)
