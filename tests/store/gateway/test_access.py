"""Who may do what over HTTP: tokens, tenants, the gateway's own credentials, TLS, and on what it refuses to listen."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from tanghulu.cli.store import SERVE
from tanghulu.errors import ConfigError
from tanghulu.store.gateway.config import GatewayConfig
from tests.store.cluster import eventually
from tests.store.gateway.running_gateway import Gateway, error_of, serving
from tests.store.guarded_cluster import TOKENS, Encrypted, Secured, write_tokens


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    file = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    write_tokens(file, list(TOKENS))
    with Secured(file) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(cluster: Secured) -> Iterator[Gateway]:
    """One without a token of its own, with room for three at a time."""
    with serving(cluster.address, "--max-clients", "3") as running:
        yield running


def secret(name: str) -> str:
    return "secret-" + name


def test_two_tenants_do_not_see_each_other(gateway: Gateway) -> None:
    with gateway.asks(secret("acme")) as acme, gateway.asks(secret("initech")) as initech:
        for size in (10, 3 << 20):
            path = f"/v1/values/doc-{size}"
            assert acme.put(path, content=b"a" * size).status_code == 201
            assert error_of(initech.get(path)) == (404, "chunk_not_found")
            assert initech.head(path).status_code == 404
            assert error_of(initech.delete(f"/v1/chunks/doc-{size}")) == (404, "chunk_not_found")
            assert initech.get("/v1/chunks").json()["chunks"] == []
            assert initech.put(path, content=b"i" * size).status_code == 201, "the key is another one"
            assert acme.get(path).content == b"a" * size
            assert initech.get(path).content == b"i" * size
            assert error_of(initech.get(f"/v1/values/@acme/doc-{size}")) == (404, "chunk_not_found")
            assert initech.delete("/v1/chunks", params={"regex": "^"}).json()["num_removed"] == 1
            assert acme.delete("/v1/chunks", params={"prefix": "doc"}).json()["num_removed"] == 1
        assert [row["tenant"] for row in acme.get("/v1/tenants").json()] == ["acme"]


def test_an_operator_sees_all_and_acts_for_one(gateway: Gateway) -> None:
    with gateway.asks(secret("operator")) as all_, gateway.asks(secret("operator"), "initech") as one:
        assert one.put("/v1/values/by-operator", content=b"x").status_code == 201
        assert all_.get("/v1/chunks").json()["chunks"][0]["key"] == "@initech/by-operator"
        with gateway.asks(secret("initech")) as own:
            assert own.get("/v1/values/by-operator").content == b"x"
        assert {"acme", "initech"} <= {row["tenant"] for row in all_.get("/v1/tenants").json()}
        assert all_.post("/v1/check").json()["findings"] == []
        assert all_.delete("/v1/chunks", params={"regex": "^@initech/"}).json()["num_removed"] == 1


def test_what_a_token_does_not_allow(gateway: Gateway, cluster: Secured) -> None:
    node = cluster.nodes[0].name
    with gateway.asks(secret("acme-reader")) as reader, gateway.asks(secret("acme-writer")) as writer:
        assert writer.put("/v1/values/guarded", content=b"1").status_code == 201
        assert reader.get("/v1/values/guarded").content == b"1"
        for refused in (
            reader.put("/v1/values/more", content=b"2"),
            reader.delete("/v1/chunks/guarded"),
            writer.get("/v1/values/guarded"),
            writer.get("/v1/chunks"),
            writer.get("/v1/events"),
            reader.post("/v1/check"),
            reader.put("/v1/policy", json={"name": "fifo"}),
            reader.post(f"/v1/nodes/{node}/evict", json={"bytes": 1}),
            reader.post(f"/v1/nodes/{node}/undrain"),
        ):
            assert error_of(refused) == (403, "forbidden"), refused.url
        assert reader.get("/v1/policy").json() == {node: "reuse"}
        assert writer.delete("/v1/chunks/guarded").status_code == 200


def test_who_shows_nothing_or_nonsense(gateway: Gateway) -> None:
    with gateway.asks() as nobody:
        for headers in ({}, {"authorization": "Basic abc"}, {"authorization": "Bearer"}, {"tanghulu-tenant": "acme"}):
            answer = nobody.get("/v1/nodes", headers=headers)
            assert error_of(answer) == (401, "unauthorized"), headers
            assert answer.headers["www-authenticate"] == "Bearer"
        assert nobody.get("/health").status_code == 200
        assert nobody.get("/ready").json() == {"ready": True, "missing": []}, "those who bring a token are served"
    for token, tenant in (("unknown", ""), (secret("acme"), "initech")):
        with gateway.asks(token, tenant) as stranger:
            for answer in (stranger.get("/v1/nodes"), stranger.put("/v1/values/k", content=b"x" * 100)):
                assert error_of(answer) == (401, "unauthorized")


def sent(gateway: Gateway, token: str, request: str = "POST /v1/evict") -> socket.socket:
    """A connection with a request whose body does not come."""
    host, port = gateway.address.split(":")
    wire = socket.create_connection((host, int(port)), timeout=10)
    shown = f"authorization: {token}\r\n" if token else ""
    wire.sendall(f"{request} HTTP/1.1\r\nhost: x\r\n{shown}content-length: 100\r\n\r\n".encode())
    return wire


@pytest.mark.parametrize("token", ["", "Basic abc", "Bearer unknown"])
@pytest.mark.parametrize("request_line", ["POST /v1/evict", "GET /nowhere", "PUT /v1/values/k"])
def test_no_body_is_awaited_from_a_stranger(gateway: Gateway, token: str, request_line: str) -> None:
    with sent(gateway, token, request_line) as wire:
        assert wire.recv(65536).startswith(b"HTTP/1.1 401")


def test_a_token_has_half_of_the_requests(cluster: Secured) -> None:
    with serving(cluster.address, "--max-requests", "4") as gateway, ExitStack() as slow:
        for spelling in ("Bearer secret-acme", "bearer   secret-acme"):
            slow.enter_context(sent(gateway, spelling))
        eventually(lambda: gateway.metric("tanghulu_gateway_requests_in_flight") == 2)
        with gateway.asks(secret("acme")) as acme, gateway.asks(secret("initech")) as initech:
            assert error_of(acme.get("/v1/nodes")) == (429, "overloaded")
            assert initech.get("/v1/nodes").status_code == 200
            for _ in range(2):
                slow.enter_context(sent(gateway, "Bearer secret-initech"))
            eventually(lambda: gateway.metric("tanghulu_gateway_requests_in_flight") == 4)
            assert httpx.get(f"{gateway.url}/ready", trust_env=False).status_code == 200
        assert secret("acme") not in gateway.log_text()


def test_tokens_take_turns_in_the_places_there_are(gateway: Gateway) -> None:
    """Five tokens with room for three; unknown ones take no place."""
    names = ("acme", "initech", "operator", "acme-reader", "temporary")
    for _ in range(2):
        for name in names:
            with gateway.asks(secret(name)) as http:
                assert http.get("/v1/nodes").status_code == 200
                assert gateway.metric("tanghulu_gateway_clients") <= 3
    with gateway.asks("unknown") as stranger:
        assert stranger.get("/v1/nodes").status_code == 401
    assert gateway.metric("tanghulu_gateway_clients") == 3


def test_a_revoked_token_ends_here_too(gateway: Gateway, cluster: Secured) -> None:
    """Even of what the gateway could read in the node's memory without asking anybody."""
    with gateway.asks(secret("acme")) as acme, gateway.asks(secret("acme-reader")) as reader:
        assert acme.put("/v1/values/r", content=b"x" * 100).status_code == 201
        assert reader.get("/v1/values/r").status_code == 200
        with reader.stream("GET", "/v1/events") as events:
            write_tokens(cluster.file, [name for name in TOKENS if name != "acme-reader"])
            try:
                eventually(lambda: reader.get("/v1/values/r").status_code == 401)
                assert acme.put("/v1/values/wakes-the-stream", content=b"x").status_code == 201
                lines = list(events.iter_lines())  # until it ends by itself
                assert not any("wakes-the-stream" in line for line in lines)
            finally:
                write_tokens(cluster.file, list(TOKENS))
        eventually(lambda: reader.get("/v1/values/r").status_code == 200)
        assert acme.delete("/v1/chunks", params={"regex": "^"}).status_code == 200


@pytest.mark.slow
def test_a_gateways_own_token_and_one_that_must_be_brought(cluster: Secured) -> None:
    with serving(cluster.address, "--token", secret("initech")) as own, own.asks() as anybody:
        assert anybody.put("/v1/values/own", content=b"x").status_code == 201
        with own.asks(secret("acme")) as acme:
            assert error_of(acme.get("/v1/values/own")) == (404, "chunk_not_found"), "its own, not the gateway's"
        assert anybody.delete("/v1/chunks/own").status_code == 200
        assert secret("initech") not in own.log_text()
    with serving(cluster.address, "--token", "stale", "--require-token") as strict, strict.asks() as anybody:
        assert error_of(anybody.get("/v1/nodes")) == (401, "unauthorized")
        assert anybody.get("/ready").status_code == 503, "its own token is refused"
        with strict.asks(secret("acme")) as acme:
            assert acme.get("/v1/chunks").status_code == 200


@pytest.mark.slow
def test_tls_on_both_sides(tmp_path: Path) -> None:
    with Encrypted(tmp_path) as cluster, serving(cluster.address, *cluster.flags) as gateway:
        trust = ssl.create_default_context(cafile=cluster.ca)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{gateway.url}/v1/nodes", verify=trust, trust_env=False)
        trust.load_cert_chain(cluster.cert, cluster.key)
        trust.set_alpn_protocols(["h2", "http/1.1"])
        with httpx.Client(base_url=gateway.url, verify=trust, trust_env=False) as http:
            value = os.urandom(2 << 20)
            assert http.put("/v1/values/k", content=value).status_code == 201
            assert http.get("/v1/values/k").content == value
            assert http.get("/ready").status_code == 200


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"host": "0.0.0.0"}, "--tls-cert"),
        ({"host": "example.org", "require_token": True}, "--tls-cert"),
        ({"host": "::", "tls_cert": "c", "tls_key": "k"}, "--require-token"),
        ({"host": "0.0.0.0", "insecure": True, "token": "t"}, "--require-token"),
        ({"max_clients": 1}, "--max-clients"),
        ({"stall_s": 0.0}, "--stall-s"),
        ({"max_requests": 0}, "--max-requests"),
    ],
)
def test_what_it_refuses_to_start_with(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        GatewayConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"host": "127.0.0.1"},
        {"host": "localhost"},
        {"host": "::1"},
        {"host": "0.0.0.0", "insecure": True},
        {"host": "0.0.0.0", "insecure": True, "token": "t", "require_token": True},
        {"host": "0.0.0.0", "tls_cert": "c", "tls_key": "k", "require_token": True},
        {"host": "0.0.0.0", "tls_cert": "c", "tls_key": "k", "tls_ca": "a", "tls_mutual": True},
    ],
)
def test_where_it_listens(options: dict[str, object]) -> None:
    assert GatewayConfig(**options).host == options["host"]  # type: ignore[arg-type]


def test_a_refusal_reaches_the_command_line() -> None:
    done = CliRunner().invoke(SERVE, ["--host", "0.0.0.0"])
    assert isinstance(done.exception, ConfigError)
