"""The gRPC port: who is let in, how much each may ask for, certificates, slow readers, and its end."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tanghulu.auth.credentials import TlsFiles
from tanghulu.errors import ConfigError
from tanghulu.protos import inference_pb2 as pb
from tanghulu.protos import inference_pb2_grpc
from tanghulu.rpc import grpc_edge
from tanghulu.types import Address
from tests.conductor.cluster import running_cluster
from tests.conductor.grpc_api.client import grpc_cluster, refusal, text_request, trailing, whole
from tests.conductor.key_files import bearer, write_keys
from tests.tls_files import Authority

CALLS = {
    "Generate": text_request(),
    "Tokenize": pb.TokenizeRequest(text="x"),
    "ListModels": pb.ListModelsRequest(),
    "Abort": pb.AbortRequest(request_id="x"),
}


def shown(name: str) -> tuple[tuple[str, str], ...]:
    return tuple(bearer(name).items())


async def status(stub: Any, name: str, **options: Any) -> str:
    call = getattr(stub, name)(CALLS[name], timeout=30, **options)
    try:
        await (whole(call) if name == "Generate" else call)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


async def test_it_is_not_served_unless_it_is_asked_for(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        assert (await cluster.http.get("/live")).status_code == 200
        assert cluster.conductor.inference.address == Address("", 0)


async def test_a_port_that_is_taken_refuses_to_start(tmp_path: Path) -> None:
    async with grpc_cluster(tmp_path) as (cluster, _):
        assert (await cluster.http.get("/live")).status_code == 200
        with pytest.raises(ConfigError, match="--grpc-port"):
            async with running_cluster(tmp_path, grpc_port=cluster.conductor.inference.address.port):
                pass


async def test_every_method_asks_for_a_key_with_its_right(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.toml", user='rights = ["inference"]', watcher='rights = ["metrics"]')
    async with grpc_cluster(tmp_path, api_keys=keys) as (cluster, stub):
        await cluster.add()
        methods = pb.DESCRIPTOR.services_by_name["Inference"].methods
        assert {method.name for method in methods} == set(CALLS)
        for name in CALLS:
            assert await status(stub, name) == "UNAUTHENTICATED"
            assert await status(stub, name, metadata=(("authorization", "Bearer wrong"),)) == "UNAUTHENTICATED"
            assert await status(stub, name, metadata=shown("user")) == "OK"
            expected = "OK" if name == "ListModels" else "PERMISSION_DENIED"
            assert await status(stub, name, metadata=shown("watcher")) == expected


async def test_a_key_s_limits_and_tenant_hold(tmp_path: Path) -> None:
    keys = write_keys(
        tmp_path / "keys.toml",
        user='rights = ["inference"]\ntenant = "acme"',
        limited='rights = ["inference"]\nrequests_per_s = 0.001\ntokens_per_minute = 1000',
    )
    async with grpc_cluster(tmp_path, api_keys=keys) as (cluster, stub):
        worker = await cluster.add()
        call = stub.Generate(text_request(), metadata=shown("limited"))
        headers = dict(await call.initial_metadata())
        await whole(call)
        assert headers["x-ratelimit-limit-tokens"] == "1000"
        error = await refusal(stub.Generate(text_request(), metadata=shown("limited")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert trailing(error)["tanghulu-error"] == "RATE_LIMIT_EXCEEDED"
        assert int(trailing(error)["retry-after"]) > 1
        over_http = await cluster.http.post("/v1/completions", json={"prompt": "x"}, headers=bearer("limited"))
        assert over_http.status_code == 429, "both count for one key"
        await whole(stub.Generate(text_request(), metadata=shown("user")))
        assert worker.submits[-1].salt == b"@acme/"


async def test_a_key_ends_its_own_requests_only(tmp_path: Path) -> None:
    rights = 'rights = ["inference"]'
    keys = write_keys(tmp_path / "keys.toml", user=rights, other=rights)
    async with grpc_cluster(tmp_path, api_keys=keys) as (cluster, stub):
        worker = await cluster.add()
        worker.hold()
        request = text_request()
        request.request_id = "mine"
        reading = asyncio.create_task(whole(stub.Generate(request, metadata=shown("user"))))
        await worker.until(lambda: worker.num_running)
        for abort in (pb.AbortRequest(request_id="mine"), pb.AbortRequest(all=True)):
            assert (await stub.Abort(abort, metadata=shown("other"))).num_aborted == 0
        assert (await stub.Abort(pb.AbortRequest(all=True), metadata=shown("user"))).num_aborted == 1
        (answer,) = await reading
        assert answer.last.finish_reason == "abort"


async def _answers(address: Address, tls: TlsFiles) -> bool:
    async with grpc_edge.channel(address, tls=tls) as channel:
        try:
            await inference_pb2_grpc.InferenceStub(channel).ListModels(pb.ListModelsRequest(), timeout=20)
        except grpc.aio.AioRpcError:
            return False
        return True


async def test_it_speaks_tls_as_http_does_and_takes_up_replaced_certificates(tmp_path: Path) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    cert, key = old.sign("server")
    async with running_cluster(tmp_path, grpc_port=0, tls_cert=cert, tls_key=key) as cluster:
        address = cluster.conductor.inference.address
        assert await _answers(address, TlsFiles(ca=old.ca))
        for fresh, at in zip(new.sign("server"), (cert, key), strict=True):
            shutil.copy(fresh, at)
        assert await _answers(address, TlsFiles(ca=new.ca))


async def test_who_reads_nothing_loses_the_request(tmp_path: Path) -> None:
    few_bytes_unread = [("grpc.http2.bdp_probe", 0)]
    async with grpc_cluster(tmp_path, few_bytes_unread) as (cluster, stub):
        worker = await cluster.add()
        cluster.conductor.inference.servicer.stall_s = 0.2
        worker.hold()
        call = stub.Generate(text_request(max_tokens=400, logprobs=20, ignore_eos=True, n=16))
        await worker.until(lambda: worker.num_running == 16)
        worker.release()
        await cluster.until(lambda: not cluster.conductor.service.calls)
        await worker.until(lambda: not worker.num_running)
        assert cluster.metric("grpc_requests_total", method="Generate", status="DEADLINE_EXCEEDED", model="tiny") == 1
        call.cancel()


async def test_a_bug_is_told_as_such_and_its_words_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with grpc_cluster(tmp_path) as (cluster, stub):
        await cluster.add()

        def broken(*_: object) -> None:
            raise ZeroDivisionError("secret")

        monkeypatch.setattr(cluster.conductor.service, "start", broken)
        error = await refusal(stub.Generate(text_request()))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "see the traceback in its log" in error.details()
        assert "secret" not in error.details()


async def test_calls_under_way_end_in_order_when_the_conductor_does(tmp_path: Path) -> None:
    async with grpc_cluster(tmp_path, grace_s=30.0) as (cluster, stub):
        worker = await cluster.add()
        worker.hold()
        reading = asyncio.create_task(whole(stub.Generate(text_request(max_tokens=3))))
        await worker.until(lambda: worker.num_running)
        ending = asyncio.create_task(cluster.conductor.inference.stop(30))
        await asyncio.sleep(0)
        for pause_s in (0.0, 0.5):  # refused by the conductor, then by gRPC
            await asyncio.sleep(pause_s)
            error = await refusal(stub.Generate(text_request(), timeout=30))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
        worker.release()
        (answer,) = await reading
        assert answer.last.finish_reason == "length"
        await ending
