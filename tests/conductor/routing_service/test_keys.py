"""Keys at the routing service: over HTTP and over gRPC nobody asks, tells or changes anything without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry

from tanghulu.conductor import route_rights
from tanghulu.conductor.routing.overrides import RoutingPolicies, parse_weights
from tanghulu.conductor.routing_service import service as routing
from tanghulu.conductor.routing_service.http_api import make_app
from tanghulu.conductor.routing_service.main import RouterConfig, RouterServer
from tanghulu.conductor.routing_service.service import RoutingClient, RoutingQuery, RoutingService
from tanghulu.errors import Overloaded
from tanghulu.hashing import as_tokens
from tanghulu.protos import router_pb2 as pb
from tanghulu.protos import router_pb2_grpc
from tanghulu.types import InstanceId, Role
from tanghulu.web.access import Need
from tests.conductor.key_files import SECRETS, bearer, routes_of, write_keys

CALLS = {
    "PutWorker": pb.RouterWorker(worker="w"),
    "RemoveWorker": pb.RouterWorkerName(worker="w"),
    "ReportLoad": pb.RouterLoad(worker="w"),
    "PublishEvents": pb.RouterEvents(worker="w"),
    "BestWorker": pb.RouterQuestion(num_tokens=1),
    "AddRequest": pb.RouterAddRequest(),
    "PrefillCompleted": pb.RouterRequestName(request_id="r"),
    "Free": pb.RouterRequestName(request_id="r"),
    "Overlaps": pb.RouterQuestion(),
    "PotentialLoads": pb.RouterQuestion(),
}
STREAMS = {"Generate": pb.RouterGenerate(), "DumpEvents": pb.RouterDumpRequest()}


async def _status(call: grpc.aio.UnaryUnaryCall | grpc.aio.UnaryStreamCall) -> grpc.StatusCode:
    return await call.code()


async def test_nobody_without_a_key(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.toml", user='rights = ["inference"]', admin='rights = ["admin"]')
    config = RouterConfig(port=0, grpc_port=0, grace_s=0.0, api_keys=keys)
    async with RouterServer(config, CollectorRegistry()).running() as server:
        async with httpx.AsyncClient(base_url=f"http://{server.address}", trust_env=False) as http:
            app = make_app(server.api, CollectorRegistry(), 1, None)
            routes = routes_of(app.routes)
            assert {path for _, path in routes} == set(route_rights.ROUTING_SERVICE.table)
            for method, path in routes:
                if route_rights.ROUTING_SERVICE.table[path] is not Need.NOTHING:
                    assert (await http.request(method, path)).status_code == 401, (method, path)
            worker = {"worker": "w"}
            assert (await http.put("/workers", json=worker, headers=bearer("user"))).status_code == 403
            assert (await http.put("/workers", json=worker, headers=bearer("admin"))).status_code == 200
            best = await http.post("/best_worker", json={"num_tokens": 1}, headers=bearer("user"))
            assert best.json()["prefill_worker"] == "w"
        async with grpc.aio.insecure_channel(str(server.grpc_address)) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            services = pb.DESCRIPTOR.services_by_name["Router"]
            assert {method.name for method in services.methods} == {*CALLS, *STREAMS}
            for name, request in {**CALLS, **STREAMS}.items():
                for shown in ((), (("authorization", "Bearer wrong"),)):
                    call = getattr(stub, name)(request, timeout=10, metadata=shown)
                    assert await _status(call) is grpc.StatusCode.UNAUTHENTICATED, name
            user, admin = ((("authorization", f"Bearer {SECRETS[name]}"),) for name in ("user", "admin"))
            refused = stub.PutWorker(CALLS["PutWorker"], metadata=user)
            assert await _status(refused) is grpc.StatusCode.PERMISSION_DENIED
            assert await _status(stub.PutWorker(CALLS["PutWorker"], metadata=admin)) is grpc.StatusCode.OK
            assert (await stub.BestWorker(CALLS["BestWorker"], metadata=user)).prefill_worker == "w"


async def test_each_key_has_requests_of_its_own_and_each_tenant_blocks(tmp_path: Path) -> None:
    """A tenant neither ends another's request nor learns which prompts another has sent, by tokens or by hashes."""
    tenants = {name: f'tenant = "{name}"\nrights = ["inference"]' for name in ("acme", "mallory")}
    keys = write_keys(tmp_path / "keys.toml", **tenants, admin='rights = ["admin"]')
    config = RouterConfig(port=0, grpc_port=0, grace_s=0.0, api_keys=keys, block_tokens=16, assume_cached_s=60.0)
    tokens = list(range(64))
    hashes = [each.hex() for each in config.hasher().hashes(as_tokens(tokens))]
    async with RouterServer(config, CollectorRegistry()).running() as server:
        async with httpx.AsyncClient(base_url=f"http://{server.address}", trust_env=False) as http:

            async def ask(name: str, path: str, **body: object) -> Any:
                return (await http.post(path, json=body, headers=bearer(name))).json()

            await http.put("/workers", json={"worker": "w"}, headers=bearer("admin"))
            for name in ("acme", "mallory"):
                assert (await ask(name, "/best_worker", num_tokens=1, request_id="r"))["prefill_worker"] == "w"
            assert server.service.num_requests == 2
            await ask("acme", "/free", request_id="r")
            assert (await ask("acme", "/free", request_id="r")) == {"freed": False}
            assert server.service.num_requests == 1
            await ask("acme", "/best_worker", tokens=tokens, request_id="long")
            await ask("acme", "/prefill_completed", request_id="long")
            for prompt in ({"tokens": tokens}, {"block_hashes": hashes}):
                assert (await ask("acme", "/overlaps", **prompt)) == {"w": 4}
                assert (await ask("mallory", "/overlaps", **prompt)) == {}
                assert (await ask("mallory", "/best_worker", **prompt))["overlap_blocks"] == 0
            await ask("mallory", "/free", request_id="long")
        async with grpc.aio.insecure_channel(str(server.grpc_address)) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            mallory = (("authorization", f"Bearer {SECRETS['mallory']}"),)
            await stub.Free(pb.RouterRequestName(request_id="long"), metadata=mallory)
            assert not (
                await stub.Overlaps(pb.RouterQuestion(tokens=as_tokens(tokens).tobytes()), metadata=mallory)
            ).overlaps
            assert server.service.prefill_completed("long", 0.0, RoutingClient("key acme"))
        server.service.check()


def test_a_key_has_a_share_of_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_REQUESTS_PER_KEY", 2)
    service = RoutingService(RoutingPolicies("ttft-min", parse_weights("")), 16, 1)
    service.put_worker(InstanceId("w"), Role.BOTH)
    greedy, other = RoutingClient("key greedy"), RoutingClient("key other")
    for number in range(2):
        service.best(RoutingQuery([], 1, caller=greedy), 0.0, f"r{number}")
    with pytest.raises(Overloaded, match="2 requests of this key"):
        service.best(RoutingQuery([], 1, caller=greedy), 0.0, "r3")
    service.best(RoutingQuery([], 1, caller=other), 0.0, "r3")
    service.free("r0", greedy)
    service.best(RoutingQuery([], 1, caller=greedy), 0.0, "r3")
    service.check()
