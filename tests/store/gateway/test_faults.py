"""The gateway when others fail or misbehave: no master, dead nodes, clients that stand still, too much at once."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.store.cluster import Cluster, eventually
from tests.store.gateway.running_gateway import Gateway, error_of, serving

pytestmark = pytest.mark.slow
MIB = 1 << 20
BOUNDS = ("--stall-s", "1", "--max-requests", "6", "--max-streams", "2", "--max-in-flight-bytes", "8MiB")


@pytest.fixture(scope="module")
def solo() -> Iterator[Cluster]:
    with Cluster(1, "64MiB") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def gateway(solo: Cluster) -> Iterator[Gateway]:
    with serving(solo.address, *BOUNDS) as running:
        yield running


def connected(gateway: Gateway, request: bytes) -> socket.socket:
    host, port = gateway.address.split(":")
    wire = socket.create_connection((host, int(port)), timeout=30)
    wire.sendall(request)
    return wire


def test_a_body_that_stops_coming(gateway: Gateway) -> None:
    with connected(gateway, b"PUT /v1/values/slow HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nabc") as wire:
        answer = b"".join(iter(lambda: wire.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"connection: close" in answer
        assert b"received 3 of 100 bytes" in answer
    assert gateway.metric("tanghulu_gateway_values_in_flight_bytes") == 0


@pytest.mark.parametrize("begun", [b"", b"GET /v1/no", b"GET /health HTTP/1.1\r\nhost: x\r\nx-y"])
def test_a_header_that_does_not_come(gateway: Gateway, begun: bytes) -> None:
    with connected(gateway, begun) as wire:
        assert wire.recv(100) == b"", "hung up on"
    with connected(gateway, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n") as wire:
        answer = b""
        while not answer.endswith(b"}"):
            answer += wire.recv(65536)
        if begun:
            wire.sendall(begun)
            assert wire.recv(100) == b"", "and behind another request"


def test_an_order_that_stops_coming(gateway: Gateway) -> None:
    with connected(gateway, b"POST /v1/evict HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{") as wire:
        assert b"".join(iter(lambda: wire.recv(65536), b"")).startswith(b"HTTP/1.1 408")
    with connected(gateway, b"POST /v1/evict HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"):
        eventually(lambda: gateway.metric("tanghulu_gateway_requests_in_flight") == 1)
    eventually(lambda: gateway.metric("tanghulu_gateway_requests_in_flight") == 0)
    assert "Traceback" not in gateway.log_text()


def test_a_client_that_hangs_up_in_its_body_leaves_nothing(gateway: Gateway) -> None:
    with connected(gateway, b"PUT /v1/values/gone HTTP/1.1\r\nhost: x\r\ncontent-length: 5000000\r\n\r\nabc"):
        eventually(lambda: gateway.metric("tanghulu_gateway_values_in_flight_bytes") == 3)  # what has come
    eventually(lambda: gateway.metric("tanghulu_gateway_values_in_flight_bytes") == 0)
    with gateway.asks() as http:
        assert http.head("/v1/values/gone").status_code == 404


def test_a_client_that_does_not_take_its_value(gateway: Gateway, solo: Cluster) -> None:
    """It is hung up on, and the lease is given back."""
    with gateway.asks() as http:
        assert http.put("/v1/values/big", content=bytes(7 * MIB)).status_code == 201
        with connected(gateway, b"GET /v1/values/big HTTP/1.1\r\nhost: x\r\n\r\n"):
            eventually(lambda: gateway.metric("tanghulu_gateway_values_in_flight_bytes") == 7 * MIB)
            refused = http.get("/v1/values/big")
            assert error_of(refused) == (429, "overloaded"), "two are more than the bound"
            assert refused.headers["retry-after"] == "1"
            eventually(lambda: gateway.metric("tanghulu_gateway_values_in_flight_bytes") == 0, 10.0)
            eventually(lambda: solo.nodes[0].metric("tanghulu_node_leases") == 0)
        assert len(http.get("/v1/values/big").content) == 7 * MIB
    assert "http.reader_too_slow" in gateway.log_text()
    assert "Traceback" not in gateway.log_text()


def test_too_many_requests_and_streams(gateway: Gateway) -> None:
    with gateway.asks() as http:
        with http.stream("GET", "/v1/events"), http.stream("GET", "/v1/events"):
            assert error_of(http.get("/v1/events")) == (429, "overloaded")
            slow = b"PUT /v1/values/slow HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n"
            waiting = [connected(gateway, slow) for _ in range(4)]
            eventually(lambda: gateway.metric("tanghulu_gateway_requests_in_flight") == 6)
            assert error_of(http.get("/v1/nodes")) == (429, "overloaded")
            assert http.get("/health").status_code == 200
            for wire in waiting:
                wire.close()
        eventually(lambda: gateway.metric("tanghulu_gateway_requests_in_flight") == 0)
        assert gateway.metric("tanghulu_gateway_event_streams") == 0
        assert http.get("/v1/nodes").status_code == 200


def test_a_pattern_that_never_ends_disturbs_nobody(gateway: Gateway) -> None:
    with gateway.asks() as http:
        assert http.put("/v1/values/" + "a" * 60 + "!", content=b"x").status_code == 201
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(http.delete("/v1/chunks", params={"regex": "^(a+)+$"})))
        asking.start()
        eventually(lambda: gateway.metric("tanghulu_gateway_requests_in_flight") == 1)
        began_s = time.monotonic()
        assert http.get("/v1/nodes").status_code == 200
        assert time.monotonic() - began_s < 5.0
        asking.join(60)
        assert error_of(answers[0]) == (400, "invalid_request")
        assert "simplify" in answers[0].json()["error"]["message"]


def test_a_value_that_does_not_fit(gateway: Gateway, solo: Cluster) -> None:
    with gateway.asks() as http:
        refused = http.put("/v1/values/pinned", content=bytes(7 * MIB), params={"pin": "hard"})
        assert refused.status_code == 201
        for index in (2, 3):
            refused = http.put(f"/v1/values/pinned-{index}", content=bytes(7 * MIB), params={"pin": "hard"})
        assert error_of(refused) == (503, "store_full")
        assert refused.headers["retry-after"] == "1"
        http.delete("/v1/chunks", params={"prefix": "pinned"})


def test_without_a_master_it_starts_and_says_what_is_missing() -> None:
    with Cluster(1, "16MiB") as cluster:
        with serving(cluster.address, "--deadline-s", "2") as gateway, gateway.asks() as http:
            assert http.put("/v1/values/k", content=b"x" * 200_000).status_code == 201
            cluster.master.kill()
            began_s = time.monotonic()
            ready = http.get("/ready")
            assert (ready.status_code, ready.json()["ready"]) == (503, False)
            assert "master" in ready.json()["missing"][0]
            for answer in (http.get("/v1/nodes"), http.get("/v1/chunks"), http.put("/v1/values/n", content=b"x")):
                assert error_of(answer) == (503, "master_unavailable")
                assert answer.headers["retry-after"] == "1"
            assert http.get("/v1/values/k").content == b"x" * 200_000, "reads of what is known where go on"
            assert http.get("/health").status_code == 200
            assert time.monotonic() - began_s < 20.0, "nothing hangs"
            cluster.restart_master()
            eventually(lambda: http.get("/ready").status_code == 200)
            assert http.get("/v1/values/k").status_code == 200
        with serving("127.0.0.1:1", "--deadline-s", "2") as early, early.asks() as http:
            assert http.get("/ready").status_code == 503
            assert error_of(http.get("/v1/events")) == (503, "master_unavailable")


def test_a_master_or_a_node_that_stands_still() -> None:
    flags = ("--deadline-s", "1.5", "--request-s", "3")
    with Cluster(1, "16MiB") as cluster, serving(cluster.address, *flags) as gateway:
        with gateway.asks() as http:
            assert http.put("/v1/values/k", content=b"x" * 2 * MIB).status_code == 201
            for process, path in ((cluster.master, "/v1/nodes"), (cluster.nodes[0], "/v1/policy")):
                process.popen.send_signal(signal.SIGSTOP)
                began_s = time.monotonic()
                answer = http.get(path)
                assert answer.status_code in (503, 504), answer.text
                assert time.monotonic() - began_s < 8.0
                if process is not cluster.master:
                    checked = http.post("/v1/check")  # its client knows the node for suspect and does not wait again
                    assert checked.status_code == 504 or checked.json()["num_chunks"] == 0
                process.popen.send_signal(signal.SIGCONT)
            eventually(lambda: http.get("/ready").status_code == 200)
            well = {"num_chunks": 1, "findings": [], "left": []}  # once the node has told again what it holds
            eventually(lambda: http.post("/v1/check").json() == well)
            cluster.nodes[0].kill()
            cluster.nodes.clear()
            eventually(lambda: http.get("/ready").status_code == 503)
            answer = http.get("/v1/values/k")
            assert answer.status_code in (404, 503), answer.text


def test_it_ends_in_order_under_load() -> None:
    """SIGTERM with a follower and a half-sent body: the follower's stream ends, the process too, with exit code 0."""
    with Cluster(1, "16MiB") as cluster:
        gateway = Gateway(cluster.address, "--grace-s", "2")
        with gateway.asks() as http, http.stream("GET", "/v1/events") as events:
            lines = events.iter_lines()
            next(lines)
            with connected(gateway, b"PUT /v1/values/k HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nabc"):
                eventually(lambda: gateway.metric("tanghulu_gateway_requests_in_flight") == 2)
                began_s = time.monotonic()
                gateway.stop()
                assert time.monotonic() - began_s < 15.0
            assert not [line for line in lines if line.startswith("event: removed")]
