"""Keys at the routing service: over HTTP and over gRPC nobody asks, tells or changes anything without one."""

from __future__ import annotations

from pathlib import Path

import grpc
import httpx
from prometheus_client import CollectorRegistry

from tanghulu.conductor import route_rights
from tanghulu.conductor.routing_service.http_api import make_app
from tanghulu.conductor.routing_service.main import RouterConfig, RouterServer
from tanghulu.protos import router_pb2 as pb
from tanghulu.protos import router_pb2_grpc
from tanghulu.web.authorizer import Need
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
            app = make_app(server.service, config.hasher(), None, CollectorRegistry(), 1, None)
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
