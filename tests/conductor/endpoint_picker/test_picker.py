"""The picker's decisions in virtual time, and the options that it refuses."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tanghulu.conductor.endpoint_picker.main import EndpointPickerConfig
from tanghulu.conductor.endpoint_picker.picker import REST_S, EndpointPicker, Pick, subset_of
from tanghulu.conductor.endpoint_picker.prompts import read_card
from tanghulu.conductor.engines import source
from tanghulu.conductor.routing.overrides import RoutingPolicies, parse_weights
from tanghulu.conductor.routing_service.service import RoutingQuery, RoutingService
from tanghulu.conductor.text.served_model import ServedModel
from tanghulu.errors import ConfigError, NodeUnavailable, Overloaded
from tanghulu.types import InstanceId, Role
from tests.conductor.endpoint_picker.rig import Stream, chat, engine, model_folder, picker, until
from tests.conductor.key_files import SECRETS, write_keys
from tests.tls_files import Authority

A, B, C = "10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.2:8000"
QUERY = RoutingQuery((), 100)


def a_picker(max_requests: int = 0, policy: str = "round-robin") -> EndpointPicker:
    service = RoutingService(RoutingPolicies(policy, parse_weights("")), 16, 1)
    made = EndpointPicker(service, max_requests)
    made.set_endpoints([A, B, C])
    for name in (A, B, C):
        made.set_ready(name, True)
    return made


def test_who_was_not_reached_rests():
    made = a_picker()
    pick = made.pick(QUERY, 10.0)
    first, second, third = pick.endpoints
    made.served(pick, third, 10.0)
    for _ in range(4):
        assert made.pick(QUERY, 10.0 + REST_S - 0.01).endpoints == (third,)
    assert {*made.pick(QUERY, 10.0 + REST_S).endpoints} == {first, second, third}
    made.check()


def test_ips_and_ranks_in_a_subset():
    made = a_picker()
    assert {*made.pick(QUERY, 0.0, {"10.0.0.1"}).endpoints} == {A, B}
    assert made.pick(QUERY, 0.0, {B}).endpoints == (B,)
    with pytest.raises(NodeUnavailable, match="of the 1 in the gateway's subset"):
        made.pick(QUERY, 0.0, {"10.0.0.9"})
    assert subset_of({}) is None
    assert subset_of({"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": f"{A}, {B}"}}) == {A, B}
    assert subset_of({"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": 7}}) == set()


def test_full_ones_are_left_out():
    made = a_picker(max_requests=1)
    picks = [made.pick(QUERY, 0.0) for _ in range(3)]
    assert [len(pick.endpoints) for pick in picks] == [3, 2, 1]
    with pytest.raises(Overloaded, match="3 endpoints each have 1 requests"):
        made.pick(QUERY, 0.0)
    made.end(picks[0])
    made.end(picks[0])
    assert made.pick(QUERY, 0.0).endpoints == picks[0].endpoints[:1]
    made.check()


def test_adapters_are_preferred_where_they_are():
    made = a_picker()
    made.set_adapters(B, {"sql": "/sql"})
    assert made.adapter_path("sql") == "/sql"
    assert made.pick(QUERY, 0.0, adapter="sql").endpoints == (B,)
    assert {*made.pick(QUERY, 0.0, {C}, adapter="sql").endpoints} == {C}, "it may load it"
    made.set_ready(B, False)
    assert made.adapter_path("sql") is None


class Life(RuleBasedStateMachine):
    """Any order of what gateways, health checks and name servers report."""

    def __init__(self) -> None:
        super().__init__()
        self.picker, self.picks, self.now_s = a_picker(2, "ttft-min"), list[Pick](), 0.0

    @rule(names=st.sets(st.sampled_from([A, B, C])))
    def endpoints(self, names: set[str]) -> None:
        self.picker.set_endpoints(sorted(names))

    @rule(name=st.sampled_from([A, B, C]), ready=st.booleans())
    def checked(self, name: str, ready: bool) -> None:
        if self.picker.knows(name):
            self.picker.set_ready(name, ready)

    @rule()
    def pick(self) -> None:
        try:
            pick = self.picker.pick(QUERY, self.now_s)
        except (NodeUnavailable, Overloaded):
            return
        assert {*pick.endpoints} <= {*self.picker.ready}
        self.picks.append(pick)

    @precondition(lambda self: self.picks)
    @rule(data=st.data(), endpoint=st.sampled_from(["", A, B, C, "10.9.9.9:1"]), reached=st.booleans())
    def served(self, data: Any, endpoint: str, reached: bool) -> None:
        self.picker.served(data.draw(st.sampled_from(self.picks)), endpoint, self.now_s, reached=reached)

    @precondition(lambda self: self.picks)
    @rule(data=st.data(), ends=st.booleans())
    def answered(self, data: Any, ends: bool) -> None:
        pick = data.draw(st.sampled_from(self.picks))
        self.picker.first_token(pick, self.now_s)
        if ends:
            self.picker.end(pick)

    @rule(seconds=st.floats(0, 3))
    def later(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def holds(self) -> None:
        self.picker.check()


TestLife = Life.TestCase


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"endpoints": ""}, "--endpoints is empty"),
        ({"endpoints": "10.0.0.1"}, "host:port"),
        ({"kv_events": True}, "--model FOLDER"),
        ({"health_path": "health"}, "slash"),
        ({"worker_networks": "x"}, "--worker-networks"),
        ({"policy_weights": "x=1"}, "x"),
    ],
)
def test_bad_options_name_themselves(options: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text):
        EndpointPickerConfig(**{"endpoints": A} | options)


async def test_a_names_addresses_come_and_go(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(source, "FILE_S", 0.01)
    monkeypatch.setattr(source, "LOOKUP_S", 0.01)
    found = ["127.0.0.1"]

    async def getaddrinfo(host: str, *_: Any, **__: Any) -> list[Any]:
        if host != "pool.example":
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (each, 0)) for each in found]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
    async with engine() as made:
        port = made.address.rpartition(":")[2]
        async with picker(made, endpoints=f"pool.example:{port},gone.example:1") as server:
            found[:] = ["127.0.0.2", "8.8.8.8"]
            await until(lambda: [worker.id for worker in server.service.workers] == [f"127.0.0.2:{port}"])
            found[:] = ["127.0.0.1", "127.0.0.2"]
            await until(lambda: len(server.service.workers) == 2)
            await until(lambda: f"127.0.0.1:{port}" in server.picker.ready)


async def test_a_gateway_shows_a_key_and_health_checks_none(tmp_path: Path):
    keys = write_keys(tmp_path / "keys.toml", user='rights = ["inference"]', watcher='rights = ["metrics"]')
    async with engine() as made, picker(made, api_keys=keys) as server:
        async with grpc.aio.insecure_channel(str(server.address)) as channel:
            user = (("authorization", f"Bearer {SECRETS['user']}"),)
            assert await Stream(server, channel, user).whole(chat("hello")) == [made.address]
            for shown, code in (
                (None, grpc.StatusCode.UNAUTHENTICATED),
                ((("authorization", f"Bearer {SECRETS['watcher']}"),), grpc.StatusCode.PERMISSION_DENIED),
            ):
                assert await Stream(server, channel, shown).call.code() is code
        async with grpc.aio.insecure_channel(str(server.health_address)) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert await check(b"") == b"\x08\x01"


async def test_its_port_may_be_encrypted(tmp_path: Path):
    cert, key = Authority(tmp_path).sign("epp")
    async with engine() as made, picker(made, tls_cert=cert, tls_key=key) as server:
        trusted = grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes())
        async with grpc.aio.secure_channel(str(server.address), trusted) as channel:
            assert await Stream(server, channel).whole(chat("hello")) == [made.address]
        async with grpc.aio.insecure_channel(str(server.health_address)) as channel:
            assert await channel.unary_unary("/grpc.health.v1.Health/Check")(b"") == b"\x08\x01"


async def test_events_say_what_a_cache_holds(tmp_path: Path):
    zmq = pytest.importorskip("zmq", reason="extra: pip install pyzmq")
    model = model_folder(tmp_path)
    tokens = ServedModel(read_card(model, 4))._encode("<user>a prompt of some length<assistant>", False).tolist()
    hashes = [number.to_bytes(8, "big") for number in range(len(tokens) // 4)]
    stored = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": tokens[: 4 * len(hashes)],
        "block_size": 4,
        "medium": "GPU",
    }
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        publisher.setsockopt(zmq.RCVTIMEO, 30_000)
        options = {"model": model, "kv_events": True, "assume_cached_s": 0.0}
        async with engine() as made, picker(made, **options) as server:
            made.sources = {"0": {"endpoint": f"tcp://*:{port}", "replay_endpoint": None}}
            await asyncio.to_thread(publisher.recv)  # the picker has subscribed
            publisher.send_multipart([b"", bytes(8), msgspec.msgpack.encode([0.0, [stored], 0])])
            await until(lambda: server.service.index.num_blocks_of(made.address) == len(hashes))
            async with grpc.aio.insecure_channel(str(server.address)) as channel:
                stream = Stream(server, channel)
                await stream.picked(chat("a prompt of some length"))
                (load,) = [worker.load for worker in server.service.workers]
                assert load.view(InstanceId(made.address), Role.BOTH, 0).queue_tokens < 4, "the rest is cached"
                await stream.end()
            publisher.send_multipart(
                [b"", (1).to_bytes(8, "big"), msgspec.msgpack.encode([0.0, [["AllBlocksCleared"]], 0])]
            )
            await until(lambda: server.service.index.num_blocks_of(made.address) == 0)
