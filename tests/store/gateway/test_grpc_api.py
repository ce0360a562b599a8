"""The store over gRPC, as a program without a client of ours uses it: the generated stub and metadata."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from tanghulu.protos import store_pb2 as pb
from tanghulu.protos.store_pb2_grpc import StoreStub
from tests.free_ports import free_port
from tests.store.gateway.running_gateway import serving
from tests.store.guarded_cluster import TOKENS, Secured, write_tokens


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a gateway without a token of its own, in front of a store with tenants."""
    file = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    write_tokens(file, list(TOKENS))
    port = str(free_port())
    with Secured(file) as cluster, serving(cluster.address, "--grpc-port", port):
        yield f"127.0.0.1:{port}"


class Caller:
    """``stub`` with the token of ``name``, perhaps for another tenant."""

    def __init__(self, stub: StoreStub, name: str, tenant: str = "") -> None:
        self._stub = stub
        self._shown = [("authorization", f"Bearer secret-{name}")] if name else []
        self._shown += [("tanghulu-tenant", tenant)] if tenant else []

    def __call__(self, method: str, request: Any) -> Any:
        return getattr(self._stub, method)(request, metadata=self._shown, timeout=30)


@pytest.fixture
def calls(address: str) -> Iterator[Callable[..., Caller]]:
    options = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]
    with grpc.insecure_channel(address, options=options) as channel:
        yield lambda *name: Caller(StoreStub(channel), *name)


def code_of(raised: pytest.ExceptionInfo[grpc.RpcError]) -> tuple[grpc.StatusCode, str]:
    """(gRPC's code, ours)."""
    return raised.value.code(), dict(raised.value.trailing_metadata())["tanghulu-error"]  # type: ignore[attr-defined]


def test_a_value_is_put_described_read_in_parts_listed_and_removed(calls: Callable[..., Caller]) -> None:
    acme, value = calls("acme"), bytes(range(256)) * 4096
    put = pb.PutRequest(key="docs/a", value=value, pin=pb.SOFT, ttl_s=3600)
    assert acme("Put", put) == pb.PutReply(existed=False, num_replicas=1)
    assert acme("Put", put).existed
    got = acme("Get", pb.GetRequest(key="docs/a"))
    assert got.value == value
    assert acme("Get", pb.GetRequest(key="docs/a", offset=10, length=300)).value == value[10:310]
    assert acme("Get", pb.GetRequest(key="docs/a", offset=len(value) - 5)).value == value[-5:]
    chunk = acme("Stat", pb.StatRequest(key="docs/a"))
    assert (chunk.size_bytes, chunk.version, chunk.pin, chunk.tier) == (len(value), got.version, pb.SOFT, "memory")
    assert 3500 < chunk.ttl_s <= 3600
    acme("Put", pb.PutRequest(key="docs/b", value=b"b"))
    assert list(acme("Exists", pb.Keys(keys=["docs/b", "docs/c", "docs/a"])).found) == [True, False, True]
    page = acme("List", pb.ListRequest(prefix="docs/", limit=1))
    assert [each.key for each in page.chunks] == ["docs/a"]
    rest = acme("List", pb.ListRequest(prefix="docs/", after=page.next))
    assert ([each.key for each in rest.chunks], rest.next) == (["docs/b"], "")
    assert list(acme("Remove", pb.Keys(keys=["docs/c", "docs/a", "docs/b"])).removed) == [False, True, True]
    assert list(acme("Exists", pb.Keys(keys=["docs/a"])).found) == [False]


@pytest.mark.parametrize(
    ("method", "request_", "code", "error"),
    [
        ("Get", pb.GetRequest(key="nothing"), grpc.StatusCode.NOT_FOUND, "CHUNK_NOT_FOUND"),
        ("Get", pb.GetRequest(key=""), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        ("Get", pb.GetRequest(key="x", length=61 << 20), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        ("Stat", pb.StatRequest(key="nothing"), grpc.StatusCode.NOT_FOUND, "CHUNK_NOT_FOUND"),
        ("Put", pb.PutRequest(key="empty"), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        ("Put", pb.PutRequest(key="x", value=b"x", pin=9), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        ("Put", pb.PutRequest(key="x", value=b"x", ttl_s=-1), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        ("Exists", pb.Keys(keys=["k"] * 8193), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        ("List", pb.ListRequest(limit=8193), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
    ],
)
def test_what_cannot_be_is_a_typed_error(
    calls: Callable[..., Caller], method: str, request_: Any, code: grpc.StatusCode, error: str
) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        calls("acme")(method, request_)
    assert code_of(raised) == (code, error)


def test_a_part_outside_of_the_value_is_refused(calls: Callable[..., Caller]) -> None:
    acme = calls("acme")
    acme("Put", pb.PutRequest(key="short", value=b"abc"))
    for part in (pb.GetRequest(key="short", offset=4), pb.GetRequest(key="short", offset=1, length=3)):
        with pytest.raises(grpc.RpcError) as raised:
            acme("Get", part)
        assert code_of(raised) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")


def test_tenants_see_their_own_and_an_operator_acts_for_one(calls: Callable[..., Caller]) -> None:
    acme, initech, operator = calls("acme"), calls("initech"), calls("operator", "acme")
    acme("Put", pb.PutRequest(key="mine", value=b"acme's"))
    assert not initech("Exists", pb.Keys(keys=["mine"])).found[0]
    assert not initech("List", pb.ListRequest(prefix="mine")).chunks
    assert operator("Get", pb.GetRequest(key="mine")).value == b"acme's"
    for name in ("", "nobody"):
        with pytest.raises(grpc.RpcError) as raised:
            calls(name)("Get", pb.GetRequest(key="mine"))
        assert code_of(raised) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHORIZED")


@contextmanager
def silent_puts(address: str, number: int, token: str = "") -> Iterator[list[Any]]:
    """Calls whose message does not come."""
    done = threading.Event()

    def nothing() -> Iterator[bytes]:
        done.wait()
        yield from ()

    shown = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(address) as channel:
        put = channel.stream_unary("/tanghulu.store.v1.Store/Put")
        try:
            yield [put.future(nothing(), metadata=shown, timeout=60) for _ in range(number)]
        finally:
            done.set()


@pytest.mark.parametrize("token", ["", "unknown"])
def test_no_message_is_awaited_from_a_stranger(address: str, token: str) -> None:
    with silent_puts(address, 4, token) as calls:
        for call in calls:
            assert call.code() == grpc.StatusCode.UNAUTHENTICATED
            assert dict(call.trailing_metadata())["tanghulu-error"] == "UNAUTHORIZED"


def test_silent_calls_of_one_token_delay_no_other(address: str, calls: Callable[..., Caller]) -> None:
    with silent_puts(address, 4, "secret-acme") as silent:
        for number in range(20):
            calls("initech")("Put", pb.PutRequest(key=f"beside/{number}", value=b"x"))
        assert not any(call.done() for call in silent)
