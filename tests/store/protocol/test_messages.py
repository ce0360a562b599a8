"""The fast lane's messages: bytes that do not change unseen, every bound, and only InvalidRequest for nonsense."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tanghulu.auth.tenants import Identity, Right
from tanghulu.errors import ChunkNotFound, InvalidRequest, StoreFull, TanghuluError, VersionMismatch
from tanghulu.rpc.methods import PROTOCOL_VERSION, HelloReply, HelloRequest
from tanghulu.rpc.wire import FastMessage, encode, parser_of
from tanghulu.store.protocol import messages, methods
from tanghulu.store.protocol.announcements import (
    AnnounceReply,
    ChunkEntry,
    CopyOrder,
    DropOrder,
    KnownRange,
    NodeAnnouncement,
    Orders,
    Removal,
    ReportPiece,
)
from tanghulu.store.protocol.checksums import MAX_PARTS, Checksums
from tanghulu.store.protocol.directory_events import DirectoryEvent, DirectoryEventKind, EventBatch, EventsRequest
from tanghulu.store.protocol.directory_messages import (
    KeyInfo,
    ListKeysReply,
    ListKeysRequest,
    NodesReply,
    NodesRequest,
    NodeView,
    PlaceReply,
    PlaceRequest,
    ReplicateReply,
    ReplicateRequest,
    WaitReply,
    WaitRequest,
)
from tanghulu.store.protocol.messages import (
    ChunkInfo,
    CommitItem,
    CommitKeysReply,
    CommitKeysRequest,
    CommitRequest,
    Done,
    DrainRequest,
    Evicted,
    EvictionPolicy,
    EvictRequest,
    Failure,
    Found,
    GetReply,
    GetRequest,
    KeysReply,
    KeysRequest,
    LocateReply,
    LocateRequest,
    Location,
    MastersReply,
    MastersRequest,
    NodeHello,
    OpenBufferReply,
    OpenBufferRequest,
    ProveReply,
    ProveRequest,
    PutReply,
    PutRequest,
    RemoveRequest,
    Reservation,
    ReserveReply,
    ReserveRequest,
    StatReply,
    TenantFigures,
    TenantsReply,
    TenantsRequest,
    UnpinRequest,
    Verified,
    VerifiedPage,
    VerifyRequest,
    Welcome,
)
from tanghulu.store.protocol.shared_index import IndexPlace
from tanghulu.store.protocol.terms import Signature, Term
from tanghulu.store.protocol.types import ClientCommit, CommitResult, NewChunk, Pin, Tier
from tanghulu.store.protocol.write_buffer import BufferPlace
from tanghulu.transfer_engine.core.segment import Endpoint, SegmentDescriptor, SessionKey
from tanghulu.types import MAX_KEY_BYTES, ChunkKey

GOLDEN = Path(__file__).parent / "golden_messages.txt"
SUMS = Checksums(4096, (1, (1 << 64) - 1))
NEW = NewChunk(ChunkKey("kv/ключ"), 1 << 63, 8192, SUMS, Pin.HARD, 1.5, 3)
FAILURE = Failure.of(StoreFull("no room"))
NINE = Term(9, 77)
SIGNED = Signature(NINE, 5)
SAID = ClientCommit("node-1", 2, ChunkKey("k"), 7, 5, NINE)
SEGMENT = SegmentDescriptor("store", 1 << 40, "host", 3, (Endpoint("shm", "/run/s"), Endpoint("tcp", "a:1", "eth1", 1)))
WELCOME = Welcome(
    PROTOCOL_VERSION, "node-1", 3, SessionKey(9, bytes(range(16))), SEGMENT, IndexPlace(64, 1 << 14, 7), "@acme/"
)
EXAMPLES: list[FastMessage] = [
    NodeHello(PROTOCOL_VERSION, "acme", "secret", "client", "host", True, [5, 6]),
    WELCOME,
    PutRequest([NEW, NewChunk(ChunkKey("ab"), 7, 3)], True, 1000, 3000),
    PutReply([True, False, FAILURE], NINE),
    ReserveRequest([NEW], 1000),
    ReserveReply([Reservation(1, 64, True), None, FAILURE]),
    CommitRequest([CommitItem(1, SUMS)], [2, 3], True, 1000, 1, 4, NINE),
    GetRequest(["a", "b"], 65536, 1000),
    GetReply([Found(8192, 7, SUMS, 1, 64, True, True), FAILURE], 5000, NINE),
    UnpinRequest([1, 2], 8192, ["a"], ["b", "c"]),
    Done(),
    KeysRequest(["a", "b"]),
    RemoveRequest(["a", "b"], 1000),
    KeysReply(b"\0\1"),
    StatReply([ChunkInfo("", 8192, 7, (), SUMS, Pin.HARD, 1, 2.5, 3, Tier.SSD, 2, 1.5), None]),
    EvictionPolicy("lru"),
    DrainRequest(True),
    EvictRequest(["a", "b"], 4096),
    Evicted(2, 8192),
    VerifyRequest("a", 100, True, True),
    VerifiedPage([Verified("a", 7, 5, True), Verified("b", 8, 6)], True),
    TenantsRequest(),
    TenantsReply([TenantFigures("acme", 100, 1000, 50, 2, 3, 4, 5, 6, 7)]),
    OpenBufferRequest(4096),
    OpenBufferReply(BufferPlace(128, 256, 1024, 1 << 20, 1 << 22)),
    LocateRequest(["a", "b"], True),
    LocateReply(True, [Location(7, 8192, ("node-1", "node-2"), 1), None], b"\0\1", SIGNED),
    CommitKeysRequest([SAID, SAID]),
    CommitKeysReply([CommitResult.EXISTS, CommitResult.ACCEPTED, CommitResult.ASK_NODE], SIGNED),
    ProveRequest(),
    ProveReply(SIGNED, 4, 3000),
    MastersRequest(9, 77),
    MastersReply(9, 77, ["a:1", "b:2"], bytes([0, 1, 255, 0] * 16), [3, 4, 5, 9] * 16, "t/"),
]
VIEW = NodeView("n1", "h:1", "/run/n", "h:2", "z/r/h", "host", 9, 8, 7, True, 0.5, 6, 5, 4, True)
ORDERS = Orders([CopyOrder("k", 1, "n2")], [DropOrder("l", 2, True)], [VIEW])
PIECE = ReportPiece(1, 8, [(ChunkKey("k"), (1 << 64) - 1, 5, True)])
GONE = [Removal(ChunkKey("a"), 1), Removal(ChunkKey("b"), 2)]
ENTRIES = [ChunkEntry(ChunkKey("kv/ключ"), 1 << 63, 8192, True, True), ChunkEntry(ChunkKey("ab"), 7, 3)]
COPIED: dict[str, Any] = {"replicated": [("k", 3)], "quiet": True, "hot": [("k", 9)], "failed_copies": ["l"]}
TERM: dict[str, Any] = {"tenants": {"acme": 5}, "map_version": 9, "owned": (1 << 64) - 1, "term": NINE}
EXAMPLES += [
    NodeAnnouncement("n1", 2, ENTRIES, GONE, GONE, GONE, 3, PIECE, frozenset({63}), 9, 8, 7, 6, **COPIED, **TERM),
    AnnounceReply([True], [0], [1], True, 9, [KnownRange(63, 4, True)], 7, ORDERS, {"acme": 5}, 3, SIGNED),
    PlaceRequest(1000, 2, "n1", "z/r/h"),
    PlaceReply([VIEW], SIGNED),
    NodesRequest(1, 2, True, 3),
    NodesReply([VIEW], True, 1, 2, 3, False, 4, True, True, SIGNED),
    ListKeysRequest("kv/", "kv/a", 9, 3),
    ListKeysReply([KeyInfo("k", 5, 7, ("n1", "n2"))], True, SIGNED),
    WaitRequest(["a", "b"], 1000),
    WaitReply(b"\0\1", SIGNED),
    ReplicateRequest(["a", "b"], 3, 5.5),
    ReplicateReply(2, SIGNED),
    EventsRequest("kv/", 5, 2, 3, 1),
    EventBatch(2, [DirectoryEvent(5, DirectoryEventKind.STORED, "n1", ("a", "b"), 3)], 5, 6),
]
U64 = st.integers(0, (1 << 64) - 1)


def read_golden() -> dict[str, bytes]:
    """name -> bytes; each line of the file is a message's name and its bytes in hex."""
    lines = (line.split() for line in GOLDEN.read_text().splitlines())
    return {name: bytes.fromhex(text) for name, text in lines}


def back(message: FastMessage) -> FastMessage:
    return parser_of(type(message))(encode(message))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_the_layout_is_what_it_was(example: FastMessage) -> None:
    """Where this fails, read FastMessage's rules: a peer of the last version must understand what you send."""
    data = read_golden()[type(example).__name__]
    assert encode(example) == data
    assert parser_of(type(example))(data) == example


def test_every_message_of_the_table_has_golden_bytes() -> None:
    kinds = {kind for method in methods.METHODS for kind in (method.request, method.reply)}
    fast = {kind.__name__ for kind in kinds if issubclass(kind, FastMessage)}
    assert fast == set(read_golden()) == {type(example).__name__ for example in EXAMPLES}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_fields_of_a_later_version_are_ignored(example: FastMessage) -> None:
    longer = msgspec.msgpack.encode([*msgspec.msgpack.decode(encode(example)), "later", {"more": [1]}])
    assert parser_of(type(example))(longer) == example


def test_the_example_of_the_documentation() -> None:
    data = encode(PutRequest([NewChunk(ChunkKey("ab"), 7, 3, Checksums(0, (9,)))], True, 1000))
    text = "94 91 97 a26162 07 03 92 00 91 09 a46e6f6e65 c0 01 c3 cd03e8 00"
    assert data == bytes.fromhex(text)
    assert messages.__doc__ is not None
    assert f"{len(data)} bytes" in messages.__doc__
    assert text in messages.__doc__


@given(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
    U64,
    st.lists(U64, max_size=5),
    st.sampled_from(Pin),
    st.one_of(st.none(), st.floats(0.001, 4e6)),
)
def test_what_is_put_comes_back(key: str, version: int, parts: list[int], pin: Pin, ttl_s: float | None) -> None:
    new = NewChunk(ChunkKey(key), version, 8 * len(parts) or 1, Checksums(8, tuple(parts)), pin, ttl_s)
    request = PutRequest([new], False, 5)
    assert back(request) == request


def test_what_callers_have_instead_of_plain_values() -> None:
    class Text(str):
        def __str__(self) -> str:
            return "not the key"

    given: Any = NewChunk(ChunkKey(Text("k")), 1, np.int64(9), Checksums(np.int64(0), (3,)), ttl_s=np.float64(5))
    assert back(PutRequest([given], True, 1)) == PutRequest([given], True, 1)
    keys: Any = {"a": 1, np.str_("b"): 2}.keys()
    assert back(GetRequest(keys, 1)) == GetRequest(["a", "b"], 1)
    with pytest.raises(TypeError):
        encode(GetRequest([object()], 1))  # type: ignore[list-item]


def test_errors_come_back_typed() -> None:
    outcomes: list[bool | TanghuluError] = [True, ChunkNotFound("nowhere"), False]
    first, error, last = parser_of(PutReply)(encode(PutReply.of(outcomes))).results
    assert (first, last) == (True, False)
    assert isinstance(error, ChunkNotFound)
    assert error.message == "nowhere"
    assert len(Failure.of(ChunkNotFound("x" * 100_000)).message) == 65535


def test_existence() -> None:
    for found in ([True] * 3, [True, False, True], []):
        assert LocateReply(False, found=bytes(found)).existence == found


LONG = "x" * (MAX_KEY_BYTES + 1)
#: 1,024 characters, which are 2,048 bytes.
WIDE = "ю" * MAX_KEY_BYTES
WRONG_CHUNKS: list[Any] = [(-1, Pin.SOFT, Tier.SSD), (1, "medium", Tier.SSD), (1, Pin.SOFT, "tape")]
OUT_OF_BOUNDS: list[FastMessage] = [
    *(PutRequest([NewChunk(ChunkKey(key), 1, 1)], True, 1) for key in ("", LONG, WIDE)),
    *(ReserveRequest([NewChunk(ChunkKey(key), 1, 1)], 1) for key in ("", LONG, WIDE)),
    *(CommitKeysRequest([ClientCommit("n", 1, ChunkKey(key), 1, 1)]) for key in ("", LONG, WIDE)),
    PutRequest([NewChunk(ChunkKey("k"), -1, 1)], True, 1),
    PutRequest([NewChunk(ChunkKey("k"), 1, -1)], True, 1),
    PutRequest([NewChunk(ChunkKey("k"), 1, 9, Checksums(0, (1, 2)))], True, 1),  # one sum is due
    PutRequest([NewChunk(ChunkKey("k"), 1, 9, Checksums(-1, (1,)))], True, 1),
    PutRequest([NewChunk(ChunkKey("k"), 1, MAX_PARTS + 1, Checksums(1, (0,) * (MAX_PARTS + 1)))], True, 1),
    PutRequest([NewChunk(ChunkKey("k"), 1, 1, pin="medium")], True, 1),  # type: ignore[arg-type]
    *(PutRequest([NewChunk(ChunkKey("k"), 1, 1, ttl_s=ttl)], True, 1) for ttl in (0.0, -1.0, float("nan"), 5e6)),
    *(PutRequest([NewChunk(ChunkKey("k"), 1, 1, replicas=number)], True, 1) for number in (0, 256)),
    *(PutRequest([], True, deadline_ms) for deadline_ms in (-1, 1 << 32)),
    CommitRequest([CommitItem(-1, SUMS)], [], True, 1),
    CommitRequest([CommitItem(1, Checksums(1, (0,) * (MAX_PARTS + 1)))], [], True, 1),
    CommitRequest([], [-1], True, 1),
    CommitRequest([], [], True, 1, 1 << 32),
    GetRequest(["k"], -1),
    GetRequest(["k"], 1 << 32),
    UnpinRequest([-1]),
    UnpinRequest([], -1),
    OpenBufferRequest(-1),
    RemoveRequest(["k"], 1 << 32),
    KeysRequest([7]),  # type: ignore[list-item]
    *(StatReply([ChunkInfo("", size, 7, (), SUMS, pin, 1, 2.5, 3, tier)]) for size, pin, tier in WRONG_CHUNKS),
    EvictRequest([], -1),
    VerifyRequest("a", -1),
    TenantsReply([TenantFigures("acme", -1)]),
    CommitKeysRequest([]),
    CommitKeysRequest([ClientCommit("n", 1, ChunkKey("k"), 1, 1 << 44)]),
    NodeHello(PROTOCOL_VERSION, held_lease_ids=[-1]),
    structs.replace(WELCOME, session=SessionKey(-1, b"")),
    structs.replace(WELCOME, segment=structs.replace(SEGMENT, size_bytes=-1)),
    structs.replace(WELCOME, segment=structs.replace(SEGMENT, endpoints=(Endpoint("tcp", "a:1", distance=1 << 32),))),
    structs.replace(WELCOME, index=IndexPlace(0, 1 << 32, 7)),
    CommitKeysReply([3]),  # type: ignore[arg-type]
    *(NodeAnnouncement("n", 1, [ChunkEntry(ChunkKey(key), 1, 1)]) for key in ("", LONG)),
    *(NodeAnnouncement("n", 1, piece=ReportPiece(0, 0, [(ChunkKey(key), 1, 1, False)])) for key in ("", LONG)),
    *(NodeAnnouncement("n", 1, [ChunkEntry(ChunkKey("k"), 1, size)]) for size in (-1, (1 << 40) + 1)),
    NodeAnnouncement("n", 1, piece=ReportPiece(0, 0, [(ChunkKey("k"), 1, (1 << 40) + 1, False)])),
    NodeAnnouncement("n", 1, [ChunkEntry(ChunkKey("k"), 1, 1)] * ((1 << 16) + 1)),
    NodeAnnouncement("n", 1, removed=[Removal(ChunkKey("k"), 1)] * (1 << 15), deleted=GONE * (1 << 15)),
    NodeAnnouncement("n", 1, piece=ReportPiece(0, 0, [(ChunkKey("k"), 1, 1, False)] * ((1 << 16) + 1))),
    NodeAnnouncement("n", 1, piece=ReportPiece(0, 1 << 20)),
    NodeAnnouncement("n", 1, removed=[("k",)]),  # type: ignore[list-item]
    NodeAnnouncement("n", 1, ranges=frozenset({64})),
    NodeAnnouncement("n", -1),
    AnnounceReply([], ranges=[KnownRange(64, 0, True)]),
    PlaceRequest(-1),
    ListKeysRequest(limit=1 << 32),
    WaitRequest(["k"] * ((1 << 16) + 1)),
    ReplicateRequest(["k"] * ((1 << 16) + 1), 1, 1.0),
    EventsRequest(after_sequence=-1),
    EventBatch(1, [DirectoryEvent(1, 9)]),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("message", OUT_OF_BOUNDS, ids=lambda message: repr(message)[:60])
def test_what_is_out_of_bounds_is_refused(message: FastMessage) -> None:
    with pytest.raises(InvalidRequest):
        back(message)


def test_the_largest_that_is_within_bounds() -> None:
    most = (1 << 32) - 1
    for fine in (
        PutRequest([NewChunk(ChunkKey("x" * MAX_KEY_BYTES), 1, 1, replicas=255, ttl_s=most / 1000)], True, most),
        PutRequest([NewChunk(ChunkKey("ю" * (MAX_KEY_BYTES // 2)), (1 << 64) - 1, (1 << 64) - 1)], True, 0),
        PutRequest([NewChunk(ChunkKey("k"), 1, MAX_PARTS, Checksums(1, (0,) * MAX_PARTS))], True, 1),
        CommitKeysRequest([ClientCommit("n", 1, ChunkKey("k"), 1, (1 << 44) - 1)]),
    ):
        assert back(fine) == fine


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_mutated_bytes_are_refused_or_understood_but_nothing_else(example: FastMessage) -> None:
    rng, parse, good = random.Random(11), parser_of(type(example)), encode(example)
    for size in range(len(good)):
        _try(parse, good[:size])
    for _ in range(500):
        mutant = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            mutant[rng.randrange(len(mutant))] = rng.randrange(256)
        _try(parse, bytes(mutant))


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00", b"\x01k", b"\x90", b"\x80", b"\xc1", b"\x92\xa2\xff\xfe\xc3", b"\x92\x90\xc3\x00"],
    ids=lambda data: data.hex() or "empty",
)
def test_nonsense(data: bytes) -> None:
    """Among it what clients of version 3 sent: their first byte is never an array's."""
    with pytest.raises(InvalidRequest, match="bytes are not a valid LocateRequest"):
        parser_of(LocateRequest)(data)


def test_a_greeting_of_another_version_is_refused_by_both_numbers() -> None:
    """Whatever stands behind what every version begins with."""
    for tail in ([], [1, None], ["client", "host", "true"]):
        with pytest.raises(VersionMismatch, match=f"version 2 .* version {PROTOCOL_VERSION}"):
            parser_of(NodeHello)(msgspec.msgpack.encode([2, "", "", *tail]))
    with pytest.raises(InvalidRequest, match="bytes are not a valid HelloRequest"):
        parser_of(NodeHello)(b"\x08\x01\x12\x01x")


def test_who_reads_the_beginning_of_a_greeting_passes_over_the_rest() -> None:
    hello = NodeHello(PROTOCOL_VERSION, "acme", "secret", "client", "host", True, [5, 6])
    assert parser_of(HelloRequest)(encode(hello)) == HelloRequest(PROTOCOL_VERSION, "acme", "secret")
    assert parser_of(NodeHello)(encode(HelloRequest(PROTOCOL_VERSION))) == NodeHello(PROTOCOL_VERSION)
    assert parser_of(HelloReply)(encode(WELCOME)) == HelloReply(PROTOCOL_VERSION)


def test_hostile_bytes() -> None:
    for data in (b"\x93\x90\xc3" + b"\x91" * 100_000, b"\x92\xdd\xff\xff\xff\xff", b"\x92\xdb\xff\xff\xff\xffk"):
        with pytest.raises(InvalidRequest):
            parser_of(LocateRequest)(data)


def _try(parse: Any, data: bytes) -> None:
    with contextlib.suppress(InvalidRequest, VersionMismatch):
        parse(data)


# --- the table


def test_rows() -> None:
    rows = methods.METHODS
    assert len({row.number for row in rows}) == len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.rule is not None or row is methods.HELLO
        assert issubclass(row.request, FastMessage)


IDENTITY = Identity("token", frozenset(Right), "acme")


def test_every_key_gets_the_tenants_scope() -> None:
    """A field called key, keys, corrupt or read is one of keys, wherever it stands in a request."""
    for example in EXAMPLES:
        method = next((row for row in methods.METHODS if row.request is type(example)), None)
        if method is not None and method.rule is not None:
            scoped = method.rule.admit(IDENTITY, example)
            assert _keys(scoped) == [IDENTITY.scoped(key) for key in _keys(example)]


def _keys(value: Any) -> list[str]:
    if not isinstance(value, FastMessage):
        return [key for each in value for key in _keys(each)] if isinstance(value, list) else []
    found: list[str] = []
    for name in value.__struct_fields__:
        each = getattr(value, name)
        if name in ("key", "keys", "corrupt", "read"):
            found += [each] if isinstance(each, str) else each
        else:
            found += _keys(each)
    return found
