"""Routing as a service: its state in virtual time, and both edges over real sockets."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from urllib.parse import quote

import grpc.aio
import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from prometheus_client import CollectorRegistry

from tanghulu.conductor.index.assumed import AssumedBlocks
from tanghulu.conductor.index.prefix_index import PrefixIndex
from tanghulu.conductor.routing.overrides import NO_OVERRIDES, RoutingOverrides, RoutingPolicies
from tanghulu.conductor.routing.policies.registry import PolicyOptions
from tanghulu.conductor.routing_service.main import RouterConfig, RouterServer
from tanghulu.conductor.routing_service.service import RoutingClient, RoutingQuery, RoutingService
from tanghulu.errors import ConfigError, InvalidRequest, NodeUnavailable
from tanghulu.hashing import chain_hashes
from tanghulu.protos import router_pb2 as pb
from tanghulu.protos import router_pb2_grpc
from tanghulu.session.load import WorkerLoad
from tanghulu.session.outputs import KvChange
from tanghulu.types import BlockHash, InstanceId, Place, Role

A, B, P, D = (InstanceId(name) for name in "abpd")


def chain(text: str) -> list[BlockHash]:
    """Chained hashes in miniature: block i is named by everything up to it."""
    return [BlockHash(text[: i + 1].encode()) for i in range(len(text))]


def asks(text: str, overrides: RoutingOverrides = NO_OVERRIDES) -> RoutingQuery:
    return RoutingQuery(chain(text), 4 * len(text), overrides)


def a_service(assumed: AssumedBlocks | None = None, **workers: Role) -> RoutingService:
    service = RoutingService(RoutingPolicies("ttft-min", PolicyOptions()), 4, 1024, assumed)
    for name, role in workers.items():
        service.put_worker(InstanceId(name), role)
    return service


class TestService:
    """One worker after the other, by hand."""

    def test_events_decide(self):
        service = a_service(a=Role.BOTH, b=Role.BOTH)
        service.kv_event(B, KvChange(stored=tuple(chain("xyz"))))
        best = service.best(asks("xyzw"), 0.0, explain=True)
        assert (best.prefill, best.decode, best.overlap_blocks) == (B, B, 3)
        assert {c.worker for c in best.candidates} == {A, B}
        assert service.best(asks("xyzw"), 0.0).candidates == ()
        assert service.overlaps(chain("xy!"), 0.0) == {B: 2}
        service.kv_event(B, KvChange(removed=tuple(chain("xyz")[1:])))
        assert service.overlaps(chain("xyz"), 0.0) == {B: 1}
        service.kv_event(B, KvChange(cleared=True, stored=tuple(chain("u"))))
        assert (service.overlaps(chain("xyz"), 0.0), service.overlaps(chain("u"), 0.0)) == ({}, {B: 1})

    def test_a_request_is_load_from_its_adding_to_its_end(self):
        service = a_service(a=Role.BOTH, b=Role.BOTH)
        first = service.best(asks("mnopqr"), 0.0, "r1").prefill
        other = B if first == A else A
        assert service.best(asks("u" * 6), 0.0).prefill == other
        assert service.overlaps(chain("mnopqr"), 0.0) == {first: 6}  # being computed there
        loads = {load.worker: load for load in service.potential_loads(asks("st"), 0.0)}
        assert (loads[first].prefill_tokens, loads[first].decode_blocks, loads[first].num_requests) == (24 + 8, 8, 2)
        assert (loads[other].prefill_tokens, loads[other].decode_blocks, loads[other].num_requests) == (8, 2, 1)
        service.prefill_completed("r1", 1.0)
        service.prefill_completed("r1", 1.0)
        loads = {load.worker: load for load in service.potential_loads(asks("st"), 1.0)}
        assert (loads[first].prefill_tokens, loads[first].decode_blocks, loads[first].num_requests) == (8, 8, 2)
        assert service.overlaps(chain("mnopqr"), 1.0) == {}  # no event said that it is there
        assert (service.free("r1"), service.free("r1")) == (True, False)
        assert {load.num_requests for load in service.potential_loads(asks("st"), 1.0)} == {1}
        service.check()

    def test_it_moves_to_the_decode_worker_when_its_prefill_ends(self):
        service = a_service(p=Role.PREFILL, d=Role.DECODE)
        best = service.best(asks("mnop"), 0.0, "r1")
        assert (best.prefill, best.decode) == (P, D)
        requests = {load.worker: load.num_requests for load in service.potential_loads(asks("s"), 0.0)}
        assert requests == {P: 2, D: 2}  # on its way to D it counts there already
        service.prefill_completed("r1", 1.0)
        requests = {load.worker: load.num_requests for load in service.potential_loads(asks("s"), 1.0)}
        assert requests == {P: 1, D: 2}
        service.remove_worker(D)
        assert service.num_requests == 0
        service.check()

    def test_a_session_is_its_callers(self):
        service = RoutingService(RoutingPolicies("round-robin+session-affinity", PolicyOptions()), 4, 1024)
        for worker in (A, B):
            service.put_worker(worker, Role.BOTH)

        def home(client: str) -> InstanceId:
            return service.best(RoutingQuery((), 8, NO_OVERRIDES, "s", RoutingClient(client)), 0.0).prefill

        assert home("key a") == home("key a") != home("key b")

    def test_a_gateway_may_decide_by_itself(self):
        service = a_service(a=Role.BOTH, b=Role.BOTH)
        service.add_request("r1", asks("mnop"), B, B, 0.0)
        assert service.overlaps(chain("mn"), 0.0) == {B: 2}
        overrides = RoutingOverrides(prefill=A)
        assert service.best(asks("mnop", overrides), 0.0).prefill == A
        for wrong in (
            lambda: service.add_request("r1", asks("x"), A, A, 0.0),
            lambda: service.best(asks("x"), 0.0, "r1"),
        ):
            with pytest.raises(InvalidRequest, match="already in progress"):
                wrong()
        service.check()

    def test_what_is_not_there(self):
        service = a_service()
        with pytest.raises(NodeUnavailable, match="no worker"):
            service.best(asks("x"), 0.0)
        for wrong in (
            lambda: service.report(A, WorkerLoad()),
            lambda: service.kv_event(A, KvChange(cleared=True)),
            lambda: service.add_request("r", asks("x"), A, A, 0.0),
        ):
            with pytest.raises(InvalidRequest, match="'a' is unknown"):
                wrong()
        assert not service.prefill_completed("r", 0.0)
        with pytest.raises(InvalidRequest, match="role"):
            service.put_worker(A, Role.MASTER)
        service.remove_worker(A)

    def test_who_says_nothing_of_its_blocks_is_taken_to_have_room(self):
        service = a_service(a=Role.BOTH, b=Role.BOTH)
        service.report(A, WorkerLoad(blocks_total=10, blocks_free=1))
        assert service.best(asks("xyz"), 0.0).prefill == B
        service.report(A, WorkerLoad(prefill_tokens_per_s=1e6))
        service.report(B, WorkerLoad(prefill_tokens_per_s=1e3))
        assert service.best(asks("xyz"), 0.0).prefill == A

    def test_reports_and_places_count(self):
        service = a_service(a=Role.BOTH, b=Role.BOTH)
        service.report(A, WorkerLoad(prefill_tokens_waiting=9000))
        assert service.best(asks("x"), 0.0).prefill == B
        service.put_worker(B, Role.DECODE, Place("z", "r", "h"))
        assert service.best(asks("x"), 0.0).prefill == A
        assert [str(t.place) for t in service.workers] == ["local/local/local", "z/r/h"]

    def test_without_events_blocks_are_assumed_for_a_while(self):
        """The worked example of the module on assumed blocks."""
        service = a_service(AssumedBlocks(60.0), a=Role.BOTH)
        for now_s, text in ((0.0, "abc"), (50.0, "abd")):
            service.best(asks(text), now_s, text)
            service.prefill_completed(text, now_s)
            service.free(text)
        assert service.overlaps(chain("abc"), 59.0) == {A: 3}
        assert service.overlaps(chain("abc"), 70.0) == {A: 2}
        assert service.overlaps(chain("abd"), 109.0) == {A: 3}
        assert service.overlaps(chain("abd"), 110.0) == {}
        service.check()

    def test_of_one_worker_so_many_are_assumed(self):
        assumed = AssumedBlocks(60.0, max_blocks=4)
        service = a_service(assumed, a=Role.BOTH)
        for text in ("abc", "xyz"):
            service.best(asks(text), 0.0, text)
            service.prefill_completed(text, 0.0)
            assumed.check()
        assert service.overlaps(chain("abc"), 1.0) == {A: 1}  # its tail went
        assert service.overlaps(chain("xyz"), 1.0) == {A: 3}
        assert service.index.num_blocks_of(A) == 4

    def test_a_dump_makes_the_same_index(self):
        service = a_service(a=Role.BOTH, b=Role.BOTH)
        service.kv_event(A, KvChange(stored=tuple(chain("abcdef"))))
        service.kv_event(B, KvChange(stored=tuple(chain("abcxyz"))))
        service.kv_event(A, KvChange(removed=tuple(chain("abcdef")[3:4])))
        copy = PrefixIndex()
        for event in service.dump_events():
            copy.apply(event)
        copy.check()
        for text in ("abcdef", "abcxyz", "abc", "q"):
            assert copy.match(chain(text)) == service.index.match(chain(text))
        assert copy.num_blocks == service.index.num_blocks


class Life(RuleBasedStateMachine):
    """Whatever comes in whatever order, every request is counted where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.service = a_service(AssumedBlocks(3.0, 20), a=Role.BOTH)
        self.now_s = 0.0
        self.live: set[str] = set()

    def _tolerant(self, act) -> bool:
        self.now_s += 0.5
        try:
            act()
        except (InvalidRequest, NodeUnavailable):
            return False
        return True

    @rule(name=st.sampled_from("abc"), role=st.sampled_from([Role.PREFILL, Role.DECODE, Role.BOTH]))
    def put(self, name, role):
        self.service.put_worker(InstanceId(name), role)

    @rule(name=st.sampled_from("abc"))
    def remove(self, name):
        self.service.remove_worker(InstanceId(name))

    @rule(name=st.sampled_from("abc"), waiting=st.integers(0, 9000))
    def report(self, name, waiting):
        self._tolerant(lambda: self.service.report(InstanceId(name), WorkerLoad(prefill_tokens_waiting=waiting)))

    @rule(name=st.sampled_from("abc"), text=st.text("uv", max_size=5), gone=st.booleans())
    def event(self, name, text, gone):
        blocks = tuple(chain(text))
        change = KvChange(removed=blocks) if gone else KvChange(stored=blocks)
        self._tolerant(lambda: self.service.kv_event(InstanceId(name), change))

    @rule(request=st.sampled_from("123456"), text=st.text("uv", max_size=5))
    def best(self, request, text):
        if self._tolerant(lambda: self.service.best(asks(text), self.now_s, request)):
            assert self.service.num_requests > 0

    @rule(request=st.sampled_from("123456"))
    def prefilled(self, request):
        self._tolerant(lambda: self.service.prefill_completed(request, self.now_s))

    @rule(request=st.sampled_from("123456"))
    def free(self, request):
        before = self.service.num_requests
        assert (
            self.service.num_requests == before - self.service.free(request) or before == self.service.num_requests + 1
        )

    @invariant()
    def holds(self):
        self.service.check()


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=25, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow])


class Served:
    def __init__(self, server: RouterServer, http: httpx.AsyncClient, stub: router_pb2_grpc.RouterStub) -> None:
        self.server, self.http, self.stub = server, http, stub

    async def post(self, path: str, **body: object) -> dict[str, object]:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with contextlib.AsyncExitStack() as stack:
        config = RouterConfig(port=0, grpc_port=0, block_tokens=4, grace_s=0.0, root_hash="00ff")
        server = await stack.enter_async_context(RouterServer(config, CollectorRegistry()).running())
        url = f"http://{server.address}"
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60, trust_env=False))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(str(server.grpc_address)))
        yield Served(server, http, router_pb2_grpc.RouterStub(channel))


async def test_a_requests_life_over_http(served):
    for worker, role in (("p", "prefill"), ("d", "decode"), ("q", "prefill")):
        assert (await served.http.put("/workers", json={"worker": worker, "role": role})).status_code == 200
    tokens = list(range(10))
    hashes = [h.hex() for h in chain_hashes(BlockHash(b"\x00\xff"), np.arange(10, dtype=np.uint32), 4)]
    await served.post("/publish_events", worker="q", stored=hashes)
    await served.post("/report_load", worker="q", prefill_tokens_waiting=1, prefill_tokens_per_s=2500.0)
    best = await served.post("/best_worker", tokens=tokens, request_id="r", explain=True)
    assert (best["prefill_worker"], best["decode_worker"], best["overlap_blocks"]) == ("q", "d", 2)
    assert {c["phase"] for c in best["candidates"]} == {"prefill", "decode"}
    assert await served.post("/overlaps", block_hashes=hashes) == {"q": 2}
    loads = {row["worker"]: row for row in await served.post("/potential_loads", block_hashes=hashes, num_tokens=10)}
    assert (loads["d"]["decode_blocks"], loads["p"]["prefill_tokens"]) == (6, 10)
    await served.post("/prefill_completed", request_id="r")
    workers = {row["worker"]: row for row in (await served.http.get("/workers")).json()}
    assert (workers["d"]["active_blocks"], workers["q"]["cached_blocks"]) == (3, 2)
    assert await served.post("/free", request_id="r") == {"freed": True}
    await served.post("/add_request", tokens=tokens, request_id="s", prefill_worker="p", decode_worker="d")
    dump = (await served.http.get("/dump_events")).json()
    assert dump == [{"worker": "q", "stored": hashes}]
    assert (await served.http.delete("/workers/q")).status_code == 200
    for name in ("rack 1/10.0.0.1:30000", "/", "a\nb", "\u00fc"):
        assert (await served.http.put("/workers", json={"worker": name})).status_code == 200
        assert (await served.http.delete("/workers/" + quote(name, safe=""))).status_code == 200
        assert name not in [row["worker"] for row in (await served.http.get("/workers")).json()]
    assert (await served.http.delete("/workers/%FF")).status_code == 400
    assert (await served.http.get("/health")).json() == {"status": "ok", "workers": 2, "requests": 1}
    await served.post("/publish_events", worker="p", stored=[1, 2**64 - 1])
    assert await served.post("/overlaps", block_hashes=[1, 2**64 - 1]) == {"p": 2}
    assert await served.post("/overlaps", block_hashes=[1, -1]) == {"p": 2}, "as SGLang's events write it"


EXTRAS = {
    "cache_salt": "s",
    "lora": "sql",
    "lora_path": "/sql",
    "media": [{"identifier": "c", "offset": 5, "length": 2}],
}


async def test_salts_adapters_and_media_are_part_of_a_prompts_name():
    config = RouterConfig(port=0, grpc_port=0, block_tokens=4, grace_s=0.0, assume_cached_s=60.0)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(RouterServer(config, CollectorRegistry()).running())
        url = f"http://{server.address}"
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60, trust_env=False))
        served = Served(server, http, None)
        await http.put("/workers", json={"worker": "w"})
        tokens = list(range(12))
        await served.post("/best_worker", tokens=tokens, request_id="r", **EXTRAS)
        await served.post("/prefill_completed", request_id="r")
        assert await served.post("/overlaps", tokens=tokens, **EXTRAS) == {"w": 3}
        assert await served.post("/overlaps", tokens=tokens, **EXTRAS | {"media": []}) == {"w": 1}
        for name in ("cache_salt", "lora", "lora_path"):
            assert await served.post("/overlaps", tokens=tokens, **EXTRAS | {name: "other"}) == {}
        question = pb.RouterQuestion(tokens=np.arange(12, dtype="<u4").tobytes(), **EXTRAS)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(str(server.grpc_address)))
        (overlap,) = (await router_pb2_grpc.RouterStub(channel).Overlaps(question)).overlaps
        assert (overlap.worker, overlap.num_blocks) == ("w", 3)


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/best_worker", {}, "no worker"),
        ("/best_worker", {"tokens": [1], "media": [{"identifier": "c", "offset": 0, "length": 1}] * 257}, "257 items"),
        ("/best_worker", {"polcy": "linear"}, "polcy"),
        ("/best_worker", {"policy": "best"}, "best"),
        ("/best_worker", {"weights": {"speed": 1.0}}, "speed"),
        ("/best_worker", {"block_hashes": ["zz"]}, "neither hex"),
        ("/best_worker", {"block_hashes": ["00"], "tokens": [1]}, "either"),
        ("/add_request", {"prefill_worker": "p"}, "request_id"),
        ("/report_load", {"worker": "nobody"}, "nobody"),
        ("/prefill_completed", {"request_id": "r"}, "not in progress"),
    ],
)
async def test_what_is_wrong_is_answered(served, path, body, text):
    answer = await served.http.post(path, json=body)
    assert answer.status_code in (400, 503)
    assert text in answer.text


async def test_a_requests_life_over_grpc(served):
    stub = served.stub
    for worker, role in (("p", "prefill"), ("d", "decode")):
        await stub.PutWorker(pb.RouterWorker(worker=worker, role=role, place="z/r/h"))
    await stub.ReportLoad(pb.RouterLoad(worker="p", blocks_total=100, blocks_free=100))
    blocks = [bytes([n]) for n in range(3)]
    await stub.PublishEvents(pb.RouterEvents(worker="p", stored=blocks))
    question = pb.RouterQuestion(block_hashes=blocks, num_tokens=14, request_id="r", policy="linear", explain=True)
    best = await stub.BestWorker(question)
    assert (best.prefill_worker, best.decode_worker, best.overlap_blocks) == ("p", "d", 3)
    assert dict(best.candidates[0].terms)["hit"] == 1.0
    overlaps = (await stub.Overlaps(pb.RouterQuestion(block_hashes=blocks[:2]))).overlaps
    assert [(o.worker, o.num_blocks) for o in overlaps] == [("p", 2)]
    loads = (await stub.PotentialLoads(pb.RouterQuestion(num_tokens=4))).loads
    assert {load.worker: load.num_requests for load in loads} == {"p": 2, "d": 2}
    await stub.PrefillCompleted(pb.RouterRequestName(request_id="r"))
    await stub.Free(pb.RouterRequestName(request_id="r"))
    tokens = np.arange(8, dtype="<u4").tobytes()
    added = pb.RouterQuestion(tokens=tokens, request_id="s")
    await stub.AddRequest(pb.RouterAddRequest(question=added, prefill_worker="p", decode_worker="d"))
    dumped = [event async for event in stub.DumpEvents(pb.RouterDumpRequest())]
    assert [(event.worker, list(event.stored)) for event in dumped] == [("p", blocks)]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.AddRequest(pb.RouterAddRequest(question=added, prefill_worker="p"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await stub.RemoveWorker(pb.RouterWorkerName(worker="p"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.BestWorker(pb.RouterQuestion(num_tokens=4, tokens=b"123"))
    assert "not a multiple" in str(caught.value.details())
    assert served.server.service.num_requests == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"block_tokens": 0}, "--block-tokens"),
        ({"assume_cached_s": -1.0}, "--assume-cached-s"),
        ({"root_hash": "xyz"}, "--root-hash"),
        ({"policy_weights": "speed=1"}, "speed"),
        ({"grace_s": -1.0}, "--grace-s"),
    ],
)
def test_bad_options_name_themselves(options, text):
    with pytest.raises(ConfigError, match=text):
        RouterConfig(**options)
