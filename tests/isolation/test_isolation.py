"""Every method of every entry point, asked by a stranger, with a wrong token, and by another tenant.

A call with the wrong identity has no effect, reveals nothing, and fails exactly as for a thing that does not exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from tanghulu.auth.tls import client_context
from tanghulu.conductor import route_rights
from tanghulu.conductor.peers import wire as peers
from tanghulu.discovery import membership
from tanghulu.masters import Masters
from tanghulu.rpc import methods as rpc_methods
from tanghulu.rpc.methods import Method
from tanghulu.session import messages as session
from tanghulu.store.gateway.config import GatewayConfig
from tanghulu.store.gateway.gateway import Gateway
from tanghulu.store.gateway.main import make_app
from tanghulu.store.gateway.metrics import GatewayMetrics
from tanghulu.store.protocol import methods as store
from tanghulu.store.protocol.messages import Found, GetRequest, ReserveRequest
from tanghulu.web.access import LOGIN
from tanghulu.workers.kv import peer_methods
from tests.conductor.key_files import routes_of
from tests.isolation import table
from tests.isolation.table import ABSENT, Needs, Row
from tests.isolation.world import KEY, MARK, PROMPT, STRANGERS, VALUE, Answer, World, running_world

ROWS = table.rows()
_REFUSED = {"UNAUTHORIZED", "UNAUTHENTICATED", "401"}
_FORBIDDEN = {"FORBIDDEN", "PERMISSION_DENIED", "403"}
_NUMBER = re.compile(r"\d{4,}|\d+\.\d+(e-?\d+)?|(?:resp|msg|chatcmpl|cmpl|req|gen)[-_][0-9a-f]+|[0-9a-f]{16,}")


def differences(world: World, rows: Sequence[Row]) -> list[str]:
    """What the table says and the cluster does not do, a line each."""
    return [
        f"{row}: {caller}: {each}" for row in rows for caller in STRANGERS for each in _problems(world, row, caller)
    ]


def _problems(world: World, row: Row, name: str) -> Iterator[str]:
    caller = world.callers[name]
    victim, absent = world.victims.get(row.target, ""), ABSENT[row.target]
    got = row.call(world, caller, victim)
    if row.needs is Needs.SECRET and got[0] == "ok":
        yield f"was let in: {got}"
    if row.needs not in (Needs.NOTHING, Needs.SECRET) and name != "mallory" and got[0] not in _REFUSED:
        yield f"was let in: {got}"
    if row.needs is Needs.OPERATOR and name == "mallory" and got[0] not in _FORBIDDEN:
        yield f"was not refused: {got}"
    if row.needs in (Needs.KNOWN, Needs.OWN) and name == "mallory" and got[0] in _REFUSED | _FORBIDDEN:
        yield f"was refused: {got}"
    if "acme" in got[1].replace(victim, "").lower():
        yield f"revealed something of acme: {got}"
    if row.target:
        like = row.call(world, caller, absent)
        served = row.needs is Needs.KNOWN and name == "mallory"  # what it gets is its own
        if got[0] != like[0] or (not served and _bare(got, victim) != _bare(like, absent)):
            yield f"answered for what exists ({got}) otherwise than for what does not ({like})"


def _bare(answer: Answer, target: str) -> tuple[str, str]:
    """``answer`` without the name that the call had, and without numbers and ids that differ from call to call."""
    return answer[0], _NUMBER.sub("#", answer[1].replace(target, "*").replace(target.removeprefix("@acme/"), "*"))


# --- what acme has, and that it stays


def _http(world: World, caller: str = "acme") -> httpx.Client:
    verify = client_context(world.tls) if world.tls else False
    headers = world.callers[caller].headers(world.callers[caller].key)
    url = world.url(world.address("conductor"))
    return httpx.Client(base_url=url, verify=verify, headers=headers, trust_env=False, timeout=60)


def _address_of(world: World, node: str) -> str:
    with world.store("operator") as operator:
        return next(each.address for each in operator.nodes() if each.id == node)


class Victim:
    """Tenant acme at work: a value, ranges, a conversation, a stream under way, a request at the routing service."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._store = world.store("acme")
        assert self._store.put(KEY, VALUE).ok
        (node,) = self._store.stat(KEY).nodes
        world.victims |= {"node": node, "node address": _address_of(world, node)}
        self._connection, welcome = world.greeted("acme", world.address("node"))
        world.segments["node"], world.victims["node session"] = welcome.segment, str(welcome.session.session_id)
        self._worker, of_worker = world.greeted("cluster", world.address("prefill"))
        world.segments["prefill"], world.victims["prefill session"] = (
            of_worker.segment,
            str(of_worker.session.session_id),
        )
        world.stack.callback(self._connection.close)
        pinned = self._connection.call(store.GET.number, GetRequest([KEY], 0), store.GET.reply).message.items[0]
        assert isinstance(pinned, Found)
        item = table.chunk(f"{MARK}-reserved")
        self._reserved = self._connection.call(store.RESERVE.number, ReserveRequest([item], 0), store.RESERVE.reply)
        self.http = _http(world)
        model = self.http.get("/v1/models").json()["data"][0]["id"]
        answer = self.http.post("/v1/responses", json={"model": model, "input": PROMPT, "max_output_tokens": 4})
        assert answer.status_code == 200, answer.text
        world.victims |= {
            "key": KEY,
            "scoped": f"@acme/{KEY}",
            "lease": str(pinned.lease_id),
            "request": f"{MARK}-request",
            "response": answer.json()["id"],
            "worker": "w1",
            "export": "1",
            "routed": f"{MARK}-routed",
            "routed before": f"{MARK}-before",
            "tokens": "01000000" * 256,
        }
        ids = {"model": model, "prompt": [1] * 256, "max_tokens": 4}
        assert self.http.post("/v1/completions", json=ids).status_code == 200
        self._route()
        self._ended = threading.Event()
        self.finishes: list[Any] = []
        self._streams = threading.Thread(target=self._stream, daemon=True)
        self._streams.start()

    def _route(self) -> None:
        """A worker at the routing service, where a request of acme's is under way."""
        with self._service("operator") as operator:
            assert operator.put("/workers", json={"worker": self._world.victims["worker"]}).status_code == 200
        with self._service("acme") as acme:
            before = self._world.victims["routed before"]
            for name in (self._world.victims["routed"], before, f"http-{before}"):
                added = {"request_id": name, "tokens": [1] * 256, "prefill_worker": self._world.victims["worker"]}
                assert acme.post("/add_request", json=added).status_code == 200

    @contextlib.contextmanager
    def _service(self, caller: str) -> Iterator[httpx.Client]:
        with _http(self._world, caller) as client:
            client.base_url = httpx.URL(self._world.url(self._world.service))
            yield client

    def _stream(self) -> None:
        """Keep a request under way."""
        body = {"text": PROMPT, "rid": self._world.victims["request"], "stream": True}
        body["sampling_params"] = {"max_new_tokens": 2000, "ignore_eos": True}
        while not self._ended.is_set():
            with contextlib.suppress(httpx.HTTPError), self.http.stream("POST", "/generate", json=body) as answer:
                if answer.status_code != 200:
                    self.finishes.append((answer.status_code, answer.read()))
                    continue
                last = [line for line in answer.iter_lines() if line.startswith("data: {")][-1]
                self.finishes.append(re.findall(r'"finish_reason": ?(\{[^}]*\})', last))

    def remains(self) -> Iterator[str]:
        """What is not as it was."""
        world = self._world
        if self._store.get(KEY).bytes() != VALUE:
            yield "the value has changed"
        if [each.key for each in self._store.list_keys(MARK)] != [KEY]:
            yield "the keys have changed"
        commit = store.COMMIT.request([], [], False, 1000)
        self._connection.call(store.COMMIT.number, commit, store.COMMIT.reply)
        if self.http.get(f"/v1/responses/{world.victims['response']}").status_code != 200:
            yield "the conversation is gone"
        with self._service("acme") as acme:
            if not acme.post("/free", json={"request_id": world.victims["routed"]}).json()["freed"]:
                yield "the routed request was ended"
        with self._service("operator") as operator:
            workers = [each["worker"] for each in operator.get("/workers").json()]
            if workers != [world.victims["worker"]]:
                yield f"the workers of the routing service are {workers}"
        if any("abort" in str(each) or "length" not in str(each) for each in self.finishes):
            yield f"requests under way ended otherwise: {self.finishes}"
        with world.store("operator") as operator_store:
            nodes = operator_store.nodes()
            if len(nodes) != 2 or any(each.draining for each in nodes):
                yield f"the nodes are {nodes}"

    def stop(self) -> None:
        """End what is under way."""
        self._ended.set()
        self._streams.join(60)
        self.http.close()
        self._connection.close()
        self._worker.close()


@pytest.fixture(scope="module", params=["tls", "tokens"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with running_world(tmp_path_factory.mktemp("isolation"), tls=request.param == "tls") as running:
        yield running


def test_every_method_is_in_the_table() -> None:
    """A new method fails here until it has a row."""
    known = {(row.point, row.method.partition(" (")[0]) for row in ROWS}
    modules: list[tuple[Any, tuple[str, ...]]] = [
        (store, ("node", "master")),
        (membership, ("master",)),
        (peer_methods, ("prefill",)),
        (peers, ("peers",)),
        (rpc_methods, ("prefill", "peers")),
        (session, ("prefill", "decode")),
    ]
    for module, roles in modules:
        for method in (each for each in vars(module).values() if isinstance(each, Method)):
            assert any((f"fast lane of {role}", method.name) in known for role in roles), method.name
    assert {f"{point.removeprefix('gRPC ')}/{name}" for point, name in known if point.startswith("gRPC ")} == (
        table.grpc_methods()
    )
    for routes, rights in (
        (table.CONDUCTOR, route_rights.CONDUCTOR),
        (table.POOL_ROUTER, route_rights.POOL_ROUTER),
        (table.SERVICE, route_rights.ROUTING_SERVICE),
    ):
        assert {path for _, path in routes} == set(rights.table)


async def test_every_route_of_the_gateway_is_in_the_table() -> None:
    config = GatewayConfig(port=0, master=Masters.parse("127.0.0.1:1"))
    gateway = Gateway(config, GatewayMetrics(CollectorRegistry()), asyncio.Event())
    routes = routes_of(make_app(gateway).routes)
    known = set(table.GATEWAY) | {(method, LOGIN) for method in ("GET", "POST")}
    assert {each for each in routes if each[0] != "HEAD" or ("GET", each[1]) not in known} <= known
    assert known <= routes


@pytest.mark.e2e
@pytest.mark.slow
def test_the_table_holds(world: World) -> None:
    victim = Victim(world)
    try:
        found = [*differences(world, ROWS), *victim.remains()]
        assert not found, "\n".join(found)
    finally:
        victim.stop()


#: The rows whose rules ``mutated`` removes, one at each entry point.
MUTATED = {
    "fast lane of node evict (scoped)",
    "fast lane of node exists (scoped)",
    "fast lane of master announce (node)",
    "fast lane of prefill export_pin (export)",
    "fast lane of master register (node)",
    "fast lane of prefill describe",
    "fast lane of peers follow",
    "gRPC Inference Abort",
    "gRPC Router ReportLoad",
    "HTTP of conductor GET /debug/requests",
    "HTTP of pool router GET /pools",
    "HTTP of routing service GET /workers",
    "HTTP of gateway GET /v1/values/{target}",
    "metrics of node /metrics",
    "data port of node hello",
    "data port of prefill hello",
    "Unix socket of node exists",
}


@pytest.mark.e2e
@pytest.mark.slow
def test_rules_that_are_removed_are_missed(tmp_path: Path) -> None:
    # Evictions last: without their rule they may take the value that other rows ask for.
    rows = sorted((row for row in ROWS if str(row) in MUTATED), key=lambda row: row.method == "evict (scoped)")
    assert {str(row) for row in rows} == MUTATED
    path = str(Path(__file__).parent / "mutated")
    with running_world(tmp_path, tls=False, env={"PYTHONPATH": path}) as world:
        victim = Victim(world)
        try:
            missed = [str(row) for row in rows if not differences(world, [row])]
        finally:
            victim.stop()
    assert missed == []
