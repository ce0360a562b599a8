"""The store over HTTP: every route, with a real master, nodes and gateway."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from click.testing import CliRunner

import tanghulu
from tanghulu.cli.store import COMMAND as STORE
from tanghulu.store.client import Client
from tests.store.cluster import Cluster, eventually
from tests.store.gateway.running_gateway import Gateway, error_of, serving

MIB = 1 << 20
KEYS = [
    "plain",
    "a/b/c",
    "/leading",
    "trailing/",
    "sp ace",
    "per%cent",
    "q?x=1&y#z",
    "ünï/漢",
    "line\nend\n",
    "a//b",
    "+",
]


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    """A master and two nodes."""
    with Cluster(0) as cluster:
        for index in range(2):
            cluster.add_node("64MiB", "--place", f"z/r{index}/h{index}")
        cluster.complete()
        yield cluster


@pytest.fixture(scope="module")
def gateway(pair: Cluster) -> Iterator[Gateway]:
    with serving(pair.address) as running:
        yield running


@pytest.fixture
def http(gateway: Gateway, direct: Client) -> Iterator[httpx.Client]:
    with gateway.asks() as client:
        yield client
        direct.remove_matching("^")


@pytest.fixture(scope="module")
def direct(pair: Cluster) -> Iterator[Client]:
    """The store without the gateway."""
    with tanghulu.connect(pair.address) as client:
        yield client


def cli(cluster: Cluster, *arguments: str) -> object:
    done = CliRunner().invoke(STORE, [*arguments, "--master", cluster.address, "--json"], standalone_mode=False)
    assert done.exception is None, done.exception
    return json.loads(done.stdout)


def value_path(key: str) -> str:
    return "/v1/values/" + quote(key, safe="")


def test_health_readiness_and_metrics(http: httpx.Client, gateway: Gateway) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"ready": True, "missing": []}
    http.get("/v1/nodes")
    assert http.get("/metrics").status_code == 404  # they tell of all callers, and have a port of their own
    assert gateway.metric("tanghulu_gateway_requests_total", method="GET", route="/v1/nodes", status="200") == 1
    assert gateway.metric("tanghulu_gateway_clients") == 1


@pytest.mark.parametrize("key", KEYS)
def test_a_value_goes_in_and_comes_out_under_any_key(http: httpx.Client, direct: Client, key: str) -> None:
    value = os.urandom(1000)
    made = http.put(value_path(key), content=value)
    assert (made.status_code, made.json()) == (201, {"key": key, "existed": False, "num_replicas": 1})
    assert direct.get(key).bytes() == value, "the key is the very same for others"
    again = http.put(value_path(key), content=b"another")
    assert (again.status_code, again.json()["existed"]) == (200, True)
    got = http.get(value_path(key))
    assert (got.status_code, got.content, got.headers["content-type"]) == (200, value, "application/octet-stream")
    known = http.get("/v1/chunks/" + quote(key, safe="")).json()
    assert (known["key"], known["size_bytes"], known["tier"]) == (key, 1000, "memory")
    assert http.delete("/v1/chunks/" + quote(key, safe="")).json() == {"num_removed": 1, "missing": []}
    assert error_of(http.get(value_path(key))) == (404, "chunk_not_found")
    assert error_of(http.delete("/v1/chunks/" + quote(key, safe=""))) == (404, "chunk_not_found")


def test_twenty_mebibytes_through_and_back(http: httpx.Client, direct: Client, gateway: Gateway) -> None:
    value = os.urandom(20 * MIB)
    assert http.put("/v1/values/large", content=value).status_code == 201
    assert direct.get("large").bytes() == value
    answer = http.get("/v1/values/large")
    assert (answer.headers["content-length"], answer.content == value) == (str(20 * MIB), True)
    part = http.get("/v1/values/large", headers={"range": f"bytes={7 * MIB}-{9 * MIB - 1}"})
    assert (part.status_code, part.content == value[7 * MIB : 9 * MIB]) == (206, True)
    eventually(lambda: direct.stat("large").num_leases == 0)
    assert gateway.metric("tanghulu_gateway_values_in_flight_bytes") == 0
    assert gateway.metric("tanghulu_gateway_read_bytes_total") >= 22 * MIB


def test_head_tells_without_reading(http: httpx.Client, direct: Client) -> None:
    direct.put("h", b"x" * 300)
    told = http.head("/v1/values/h")
    assert (told.status_code, told.headers["content-length"], told.content) == (200, "300", b"")
    assert told.headers["etag"] == f'"{direct.stat("h").version:x}"'
    assert direct.stat("h").num_hits == 0
    assert http.head("/v1/values/none").status_code == 404


@pytest.mark.parametrize(
    ("wanted", "begin", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=2-4", 2, 5),
        ("bytes=95-", 95, 100),
        ("bytes=-7", 93, 100),
        ("bytes=90-999", 90, 100),
    ],
)
def test_parts_of_a_value(http: httpx.Client, direct: Client, wanted: str, begin: int, end: int) -> None:
    value = bytes(range(100))
    direct.put("r", value)
    part = http.get("/v1/values/r", headers={"range": wanted})
    assert (part.status_code, part.content) == (206, value[begin:end])
    assert part.headers["content-range"] == f"bytes {begin}-{end - 1}/100"


def test_ranges_that_are_no_part(http: httpx.Client, direct: Client) -> None:
    direct.put("r", bytes(100))
    for wanted in ("bytes=100-", "bytes=-0"):
        refused = http.get("/v1/values/r", headers={"range": wanted})
        assert error_of(refused) == (416, "range_not_satisfiable")
        assert refused.headers["content-range"] == "bytes */100"
    for ignored in ("bytes=5-2", "bytes=-", "bytes=0-1,5-6", "lines=1-2", "nonsense"):
        assert len(http.get("/v1/values/r", headers={"range": ignored}).content) == 100
    assert error_of(http.get("/v1/values/none", headers={"range": "bytes=0-1"})) == (404, "chunk_not_found")


def test_conditions(http: httpx.Client, direct: Client) -> None:
    direct.put("c", b"0123456789")
    tag = http.get("/v1/values/c").headers["etag"]
    same = http.get("/v1/values/c", headers={"if-none-match": tag})
    assert (same.status_code, same.content) == (304, b"")
    for known in (f'"other", W/{tag}', "*", f"{tag},"):
        assert http.get("/v1/values/c", headers={"if-none-match": known, "range": "bytes=1-2"}).status_code == 304
        again = http.head("/v1/values/c", headers={"if-none-match": known})
        assert (again.status_code, again.headers["etag"]) == (304, tag)
    for unknown in ('"other"', f"{tag[:-1]}", ""):
        assert http.get("/v1/values/c", headers={"if-none-match": unknown}).status_code == 200
    assert http.get("/v1/values/none", headers={"if-none-match": "*"}).status_code == 404
    assert http.get("/v1/values/c", headers={"range": "bytes=1-2", "if-range": tag}).content == b"12"
    assert http.get("/v1/values/c", headers={"range": "bytes=1-2", "if-range": '"other"'}).content == b"0123456789"


def test_how_a_value_is_put(http: httpx.Client, pair: Cluster) -> None:
    chosen = pair.nodes[1].name
    params = {"replicas": 2, "pin": "soft", "ttl_s": 500.0, "prefer_node": chosen}
    assert http.put("/v1/values/p", content=b"x" * 100_000, params=params).json()["num_replicas"] == 2
    known = http.get("/v1/chunks/p").json()
    assert (known["pin"], known["replicas"], set(known["nodes"])) == ("soft", 2, {node.name for node in pair.nodes})
    assert 400 < known["ttl_s"] <= 500


@pytest.mark.parametrize(
    "params",
    [{"replicas": 0}, {"replicas": "x"}, {"pin": "nails"}, {"ttl_s": -1}, {"ttl_s": "x"}, {"replicas": 999}],
)
def test_bad_options_of_a_put(http: httpx.Client, params: dict[str, str | int]) -> None:
    assert error_of(http.put("/v1/values/bad", content=b"x", params=params)) == (400, "invalid_request")
    assert http.head("/v1/values/bad").status_code == 404


def raw(gateway: Gateway, request: bytes) -> bytes:
    """Bytes as they are, and the answer up to the connection's end or its first body."""
    host, port = gateway.address.split(":")
    with socket.create_connection((host, int(port)), timeout=30) as wire:
        wire.sendall(request)
        answer = b""
        while b"\r\n\r\n" not in answer or not answer.endswith(b"}"):
            piece = wire.recv(65536)
            if not piece:
                break
            answer += piece
    return answer


def test_bodies_are_refused_before_they_are_sent(gateway: Gateway, http: httpx.Client) -> None:
    begun = b"PUT /v1/values/k HTTP/1.1\r\nhost: x\r\n"
    assert raw(gateway, begun + b"content-length: 5000000000\r\n\r\n").startswith(b"HTTP/1.1 413")
    waiting = raw(gateway, begun + b"content-length: 100000000\r\nexpect: 100-continue\r\n\r\n")
    assert waiting.startswith(b"HTTP/1.1 413"), "more than any node has; nobody asks for the body"
    assert b'"code":"body_too_large"' in waiting
    assert b"connection: close" in waiting
    assert raw(gateway, begun + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n").startswith(
        b"HTTP/1.1 411"
    )
    assert error_of(http.put("/v1/values/k", content=b"")) == (400, "invalid_request")


def test_keys_that_are_none(http: httpx.Client, gateway: Gateway) -> None:
    for path in ("/v1/values/", "/v1/values/" + "k" * 1025):
        assert error_of(http.put(path, content=b"x")) == (400, "invalid_request")
        assert error_of(http.get(path)) == (400, "invalid_request")
    refused = raw(gateway, b"GET /v1/values/%ff HTTP/1.1\r\nhost: x\r\n\r\n")
    assert refused.startswith(b"HTTP/1.1 400")
    assert b"UTF-8" in refused


def test_listings_come_in_pages(http: httpx.Client, direct: Client, pair: Cluster) -> None:
    keys = sorted(f"l/{index:03}" for index in range(25))
    direct.put_many([(key, b"x") for key in [*keys, "other"]])
    first = http.get("/v1/chunks", params={"prefix": "l/", "limit": 10}).json()
    assert (len(first["chunks"]), first["next"]) == (10, keys[9])
    seen, after = [], ""
    while after is not None:
        page = http.get("/v1/chunks", params={"prefix": "l/", "limit": 10, "after": after}).json()
        seen += [chunk["key"] for chunk in page["chunks"]]
        after = page["next"]
    assert seen == keys
    assert http.get("/v1/chunks").json()["chunks"] == cli(pair, "ls")
    assert error_of(http.get("/v1/chunks", params={"limit": 0})) == (400, "invalid_request")


def test_programs_are_told_the_same_as_by_the_command_line(http: httpx.Client, direct: Client, pair: Cluster) -> None:
    direct.put_many([(f"same/{index}", b"x" * 1000) for index in range(10)])
    eventually(lambda: http.get("/v1/stat").json()["num_chunks"] == 10)

    def nodes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{name: value for name, value in row.items() if name != "last_seen_s"} for row in rows]

    # Write buffers come and go, so two looks may differ.
    eventually(lambda: http.get("/v1/stat").json() == cli(pair, "stat"))
    eventually(lambda: nodes(http.get("/v1/nodes").json()) == nodes(cli(pair, "nodes")))
    assert http.get("/v1/policy").json() == cli(pair, "policy")
    assert http.post("/v1/check").json() == cli(pair, "check") == {"num_chunks": 10, "findings": [], "left": []}
    assert set(http.get("/v1/chunks/same/1").json()) == set(cli(pair, "stat", "same/1"))


def test_removal_by_prefix_and_pattern(http: httpx.Client, direct: Client) -> None:
    direct.put_many([(f"{kind}/{index}", b"x") for kind in ("a", "b.", "bx") for index in range(20)])
    assert http.delete("/v1/chunks", params={"prefix": "b."}).json() == {"num_removed": 20, "missing": []}
    assert http.delete("/v1/chunks", params={"regex": "^a/1"}).json()["num_removed"] == 11
    assert len(direct.list_keys()) == 29
    for params in ({}, {"prefix": ""}, {"prefix": "a", "regex": "b"}, {"regex": "("}, {"regex": "x" * 5000}):
        assert error_of(http.delete("/v1/chunks", params=params)) == (400, "invalid_request")


def test_policies_are_switched(http: httpx.Client, pair: Cluster) -> None:
    first, second = (node.name for node in pair.nodes)
    assert http.put("/v1/policy", json={"name": "sieve"}).json() == {first: "sieve", second: "sieve"}
    assert http.put("/v1/policy", json={"name": "lru", "node": first}).json() == {first: "lru"}
    assert http.get("/v1/policy", params={"node": second}).json() == {second: "sieve"}
    assert http.put("/v1/policy", json={"name": "lru"}).status_code == 200
    assert error_of(http.put("/v1/policy", json={"name": "magic"})) == (400, "invalid_request")
    assert error_of(http.put("/v1/policy", json={"nam": "lru"})) == (400, "invalid_request")
    assert error_of(http.put("/v1/policy", content=b"{")) == (400, "invalid_request")
    assert error_of(http.get("/v1/policy", params={"node": "nobody"})) == (404, "node_not_found")


def test_eviction_and_copies_by_hand(http: httpx.Client, direct: Client, pair: Cluster) -> None:
    node = pair.nodes[0].name
    for index in range(8):
        direct.put(f"e/{index}", bytes(100_000), prefer_node=node)
    one = http.post(f"/v1/nodes/{node}/evict", json={"keys": ["e/3", "nowhere"]}).json()
    assert one == {node: {"num_chunks": 1, "num_bytes": 100_000}}
    more = http.post("/v1/evict", json={"bytes": "150kB"}).json()
    assert more[node]["num_chunks"] == 2
    assert set(more) == {each.name for each in pair.nodes}
    for body in ({}, {"keys": ["x"], "bytes": 5}, {"bytes": -1}, {"bytes": "many"}, {"keys": "x"}):
        assert error_of(http.post("/v1/evict", json=body)) == (400, "invalid_request")
    asked = http.post("/v1/replicate", json={"keys": ["e/7", "nowhere"], "holders": 2, "for_s": 30}).json()
    assert asked == {"taken": 1, "keys": 2, "holders": 2, "for_s": 30.0}
    eventually(lambda: len(direct.stat("e/7").nodes) == 2)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/evict", '{"bytes": 99999999999999999999999}'),
        ("/v1/evict", '{"bytes": "99999999999999999999T"}'),
        ("/v1/evict", '{"bytes": "%s"}' % ("9" * 5000)),
        ("/v1/evict", '{"keys": ["\\ud800"]}'),
        ("/v1/evict", '{"keys": [""]}'),
        ("/v1/evict", json.dumps({"keys": ["k"] * 9000})),
        ("/v1/evict", "[" * 5000),
        ("/v1/evict", b"\xff\xfe"),
        ("/v1/evict", "null"),
        ("/v1/replicate", '{"keys": ["k"], "holders": 99999999999}'),
        ("/v1/replicate", '{"keys": ["k"], "for_s": NaN}'),
        ("/v1/replicate", '{"keys": []}'),
    ],
)
def test_bodies_that_make_no_sense(http: httpx.Client, path: str, body: str | bytes) -> None:
    refused = http.post(path, content=body, headers={"content-type": "application/json"})
    assert error_of(refused) == (400, "invalid_request")


@pytest.mark.parametrize("body", ['{"keys": ["k"]}', "", "[1]"])
def test_a_body_that_is_no_json_object_is_named_as_that(http: httpx.Client, body: str) -> None:
    kind = "application/json" if body == "[1]" else "application/x-www-form-urlencoded"
    refused = http.post("/v1/evict", content=body, headers={"content-type": kind})
    assert refused.status_code == 400
    assert (
        refused.json()["error"]["message"] == "the body must be a JSON object, sent with content-type: application/json"
    )


def test_bodies_are_bounded(http: httpx.Client) -> None:
    refused = http.post("/v1/evict", content=b" " * (3 * MIB), headers={"content-type": "application/json"})
    assert error_of(refused) == (413, "body_too_large")


def test_other_sites_pages_get_nothing(http: httpx.Client, gateway: Gateway) -> None:
    elsewhere = {"origin": "https://example.org"}
    assert error_of(http.post("/v1/check", headers=elsewhere)) == (403, "forbidden")
    assert error_of(http.get("/v1/stat", headers=elsewhere)) == (403, "forbidden")
    assert http.post("/v1/check", headers={"origin": gateway.url}).status_code == 200


def test_a_node_is_drained_and_taken_back(http: httpx.Client, direct: Client, pair: Cluster) -> None:
    first, second = (node.name for node in pair.nodes)
    direct.put("d", b"x" * 1000, prefer_node=first)
    done = http.post(f"/v1/nodes/{first}/drain", params={"wait_s": 30}).json()
    assert (done["node"], done["drained"], done["num_chunks"]) == (first, True, 1)
    refused = http.post(f"/v1/nodes/{second}/drain")
    assert error_of(refused) == (409, "conflict"), "nobody would take its chunks"
    assert http.post(f"/v1/nodes/{first}/undrain").json() == {"node": first, "draining": False}
    assert http.post(f"/v1/nodes/{first}/drain").json()["drained"] is False
    http.post(f"/v1/nodes/{first}/undrain")
    for what in ("drain", "undrain"):
        assert error_of(http.post(f"/v1/nodes/nobody/{what}")) == (404, "node_not_found")


def test_events_are_followed(http: httpx.Client, direct: Client) -> None:
    direct.put("w/old", b"x")
    with http.stream("GET", "/v1/events", params={"prefix": "w/"}) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: "))
        assert [(event["event"], event["key"]) for event in (next(events) for _ in range(3))] == [
            ("reset", ""),
            ("stored", "w/old"),
            ("synced", ""),
        ]
        threading.Thread(target=lambda: (direct.put("w/new", b"x"), direct.remove("w/new"))).start()
        assert [(event["event"], event["key"]) for event in (next(events) for _ in range(2))] == [
            ("stored", "w/new"),
            ("removed", "w/new"),
        ]


def test_it_describes_itself(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert set(paths["/v1/values/{key}"]) == {"get", "head", "put"}
    assert set(paths["/v1/chunks/{key}"]) == {"get", "delete"}
    assert all(route.get("summary") for methods in paths.values() for route in methods.values())
    assert error_of(http.get("/v1/nothing")) == (404, "not_found")
    assert error_of(http.post("/v1/nodes")) == (405, "method_not_allowed")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/v1/values/u?ttl=5"),
        ("PUT", "/v1/values/u?ttl_s=5&ttl_s=50"),
        ("GET", "/v1/values/u?range=1"),
        ("GET", "/v1/chunks?prefx=a"),
        ("GET", "/v1/chunks/u?x"),
        ("DELETE", "/v1/chunks?prefix=u&dry_run=1"),
        ("DELETE", "/v1/chunks/u?prefix=u"),
        ("GET", "/v1/nodes?limit=1"),
        ("GET", "/v1/events?snapshots=0"),
        ("POST", "/v1/check?repiar=1"),
        ("POST", "/v1/nodes/n/drain?wait=1"),
    ],
)
def test_an_option_that_a_route_has_not_is_refused_by_name(http: httpx.Client, direct: Client, method: str, path: str):
    direct.put("u", b"value")
    answer = http.request(method, path, content=b"x")
    assert error_of(answer) == (400, "invalid_request")
    assert "the query option" in answer.text or "the query has" in answer.text
    assert direct.get("u").bytes() == b"value"


@pytest.mark.parametrize("query", ["prefix=%FF/", "regex=%FF", "prefix=a&x=%C3"])
def test_a_query_that_is_not_utf8_removes_nothing(http: httpx.Client, direct: Client, query: str):
    direct.put("\ufffd/mine", b"value")
    assert error_of(http.delete(f"/v1/chunks?{query}")) == (400, "invalid_request")
    assert error_of(http.get(f"/v1/chunks?{query}")) == (400, "invalid_request")
    assert error_of(http.get("/v1/events?prefix=%FF")) == (400, "invalid_request")
    assert direct.exists("\ufffd/mine")


def test_a_part_of_a_value_cannot_be_put(http: httpx.Client):
    answer = http.put("/v1/values/part", content=b"abc", headers={"content-range": "bytes 0-2/9"})
    assert error_of(answer) == (400, "invalid_request")
    assert http.head("/v1/values/part").status_code == 404


def test_conditions_of_a_put_and_a_removal(http: httpx.Client):
    path = "/v1/values/c"
    assert error_of(http.put(path, content=b"1", headers={"if-match": "*"})) == (412, "precondition_failed")
    assert http.put(path, content=b"1", headers={"if-none-match": "*"}).status_code == 201
    tag = http.head(path).headers["etag"]
    failing = [
        ("if-none-match", "*"),
        ("if-none-match", f'"x", W/{tag}'),
        ("if-match", '"x"'),
        ("if-match", f"W/{tag}"),
    ]
    for wrong in ({name: value} for name, value in failing):
        assert error_of(http.put(path, content=b"2", headers=wrong)) == (412, "precondition_failed"), wrong
    for right in ({"if-match": f'"x", {tag}'}, {"if-match": "*"}, {"if-none-match": '"x"'}):
        assert http.put(path, content=b"2", headers=right).json()["existed"], right
    assert error_of(http.delete("/v1/chunks/c", headers={"if-match": '"x"'})) == (412, "precondition_failed")
    assert http.delete("/v1/chunks/c", headers={"if-match": tag}).status_code == 200


def test_conditions_of_a_get(http: httpx.Client):
    path = "/v1/values/c"
    http.put(path, content=b"123")
    tag = http.head(path).headers["etag"]
    for method in ("GET", "HEAD"):
        assert http.request(method, path, headers={"if-match": '"x"'}).status_code == 412
        assert http.request(method, path, headers={"if-match": f"W/{tag}"}).status_code == 412
        assert http.request(method, path, headers={"if-match": tag}).status_code == 200
        assert http.request(method, path, headers={"if-match": "*", "if-none-match": tag}).status_code == 304
        assert http.request(method, "/v1/values/none", headers={"if-match": tag}).status_code == 404
    part = http.get(path, headers={"if-match": tag, "range": "bytes=1-1"})
    assert (part.status_code, part.content) == (206, b"2")
