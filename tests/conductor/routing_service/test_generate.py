"""Generate: over both edges to real HTTP engines; what counts, who is passed over, and what a hang-up leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import grpc.aio
import httpx
import pytest
from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry
from starlette.responses import JSONResponse, Response, StreamingResponse

from tanghulu.conductor.routing_service.main import RouterConfig, RouterServer
from tanghulu.conductor.routing_service.worker_networks import WorkerNetworks
from tanghulu.errors import ConfigError, InvalidRequest
from tanghulu.protos import router_pb2 as pb
from tanghulu.protos import router_pb2_grpc
from tanghulu.types import InstanceId, Role
from tanghulu.web.server import HttpServer, address_of, listen


class Engine:
    """Another engine's HTTP API: three pieces, the later ones when it is let."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.status = 200
        self.go = asyncio.Event()
        self.go.set()
        self.url = ""
        self.num_ended = 0

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/generate")
        async def generate(request: Request) -> Response:
            self.bodies.append(await request.json())
            if self.status != 200:
                return JSONResponse({"error": "busy"}, self.status)
            return StreamingResponse(self._pieces(), headers={"x-engine": "yes"})

        return app

    async def _pieces(self) -> AsyncIterator[bytes]:
        try:
            yield b"one "
            await self.go.wait()
            yield b"two "
            yield b"three"
        finally:
            self.num_ended += 1


@contextlib.asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[Engine]:
    listener = listen("127.0.0.1", 0)
    engine.url = f"http://{address_of(listener)}"
    server = HttpServer(engine.app(), 0.0)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield engine
    finally:
        server.force_exit = True
        server.stop()
        await asyncio.gather(task, return_exceptions=True)
        listener.close()


class Scene:
    """A router with two engines, a and b."""

    def __init__(self, server: RouterServer, http: httpx.AsyncClient, stub: object, engines: list[Engine]) -> None:
        self.server, self.http, self.stub, self.engines = server, http, stub, engines

    @property
    def service(self):
        return self.server.service

    async def until(self, condition) -> None:
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110 - what it looks at has no hook for tests
                await asyncio.sleep(0.001)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(serving(Engine())) for _ in range(2)]
        config = RouterConfig(port=0, grpc_port=0, block_tokens=4, grace_s=0.0, assume_cached_s=60.0)
        server = await stack.enter_async_context(RouterServer(config, CollectorRegistry()).running())
        url = f"http://{server.address}"
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60, trust_env=False))
        for name, engine in zip("ab", engines, strict=True):
            answer = await http.put("/workers", json={"worker": name, "role": "worker", "url": engine.url})
            assert answer.status_code == 200
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(str(server.grpc_address)))
        yield Scene(server, http, router_pb2_grpc.RouterStub(channel), engines)
        server.service.check()


TOKENS = list(range(40))


async def test_the_answer_of_the_best_worker_is_passed_on(scene: Scene):
    body = {"input_ids": TOKENS, "sampling_params": {"max_new_tokens": 3}, "routing": {"worker": "b"}}
    answer = await scene.http.post("/generate", json=body)
    assert (answer.status_code, answer.text) == (200, "one two three")
    assert (answer.headers["x-engine"], answer.headers["x-tanghulu-worker"]) == ("yes", "b")
    assert scene.engines[1].bodies == [{"input_ids": TOKENS, "sampling_params": {"max_new_tokens": 3}}]
    await scene.until(lambda: scene.service.num_requests == 0)
    again = await scene.http.post("/generate", json={"input_ids": TOKENS})
    assert again.headers["x-tanghulu-worker"] == "b", "its prefill was there, so it is taken to have the blocks"


async def test_an_adapter_has_blocks_of_its_own(scene: Scene):
    body = {"input_ids": TOKENS, "lora_path": "sql", "routing": {"worker": "b"}}
    await scene.http.post("/generate", json=body)
    await scene.until(lambda: scene.service.num_requests == 0)
    overlaps = {
        name: (await scene.http.post("/overlaps", json=body)).json()
        for name, body in {
            "adapter": {"tokens": TOKENS, "lora": "sql"},
            "model": {"tokens": TOKENS},
        }.items()
    }
    assert overlaps == {"adapter": {"b": 10}, "model": {}}


async def test_it_counts_from_its_sending_to_its_end(scene: Scene):
    scene.engines[0].go.clear()
    body = {"input_ids": TOKENS, "rid": "r1", "routing": {"worker": "a"}}
    async with scene.http.stream("POST", "/generate", json=body) as answer:
        pieces = answer.aiter_raw()
        assert await anext(pieces) == b"one "
        assert scene.service._added["r1"].prefilled
        other = await scene.http.post("/generate", json={"input_ids": [*range(50, 90)]})
        assert other.headers["x-tanghulu-worker"] == "b", "a is busy"
    await scene.until(lambda: "r1" not in scene.service._added)
    scene.engines[0].go.set()
    await scene.until(lambda: scene.engines[0].num_ended == 1)


async def test_over_grpc(scene: Scene):
    told = json.dumps({"input_ids": TOKENS}).encode()
    pieces = [piece async for piece in scene.stub.Generate(pb.RouterGenerate(body=told))]
    assert pieces[0].status == 200
    assert pieces[0].worker in ("a", "b")
    assert b"".join(piece.data for piece in pieces) == b"one two three"
    await scene.until(lambda: scene.service.num_requests == 0)
    with pytest.raises(grpc.aio.AioRpcError, match="input_ids"):
        await anext(aiter(scene.stub.Generate(pb.RouterGenerate(body=b"{}"))))


@pytest.mark.parametrize("status", [429, 503, 0])
async def test_who_cannot_is_passed_over(scene: Scene, status: int):
    """0: nobody listens there any more."""
    scene.engines[0].status = status
    if not status:
        scene.service.put_worker(InstanceId("a"), Role.BOTH, url="http://127.0.0.1:1")
    answers = [await scene.http.post("/generate", json={"input_ids": [n] * 40}) for n in range(4)]
    assert {answer.headers["x-tanghulu-worker"] for answer in answers} == {"b"}
    await scene.until(lambda: scene.service.num_requests == 0)
    scene.service.remove_worker(InstanceId("b"))
    answer = await scene.http.post("/generate", json={"input_ids": TOKENS})
    assert answer.status_code == (status or 503), "of one alone its own answer is passed on"
    await scene.until(lambda: scene.service.num_requests == 0)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"text": "hello"}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [1], "routing": {"speed": 1}}, "routing: speed: Extra inputs are not permitted"),
        ({"input_ids": [1], "routing": {"policy": "x"}}, "routing: policy 'x' is unknown"),
        (
            {"input_ids": [1], "routing": {"weights": {"alpha": "x"}}},
            "routing: weights.alpha: Input should be",
        ),
    ],
)
async def test_what_is_wrong_is_said(scene: Scene, body: dict, text: str):
    answer = await scene.http.post("/generate", json=body)
    assert answer.status_code == 400
    assert text in answer.text
    wrong = await scene.http.put("/workers", json={"worker": "c", "url": "ftp://x"})
    assert wrong.status_code == 400


async def test_a_dead_worker_is_passed_over_whatever_its_id(scene: Scene):
    """Its id has a colon in it, as an address has, and the request would go to it and to nobody else."""
    dead = InstanceId("10.0.0.0:30000")
    scene.service.put_worker(dead, Role.BOTH, url="http://127.0.0.1:1")
    answer = await scene.http.post("/generate", json={"input_ids": TOKENS, "routing": {"worker": dead}})
    assert (answer.status_code, answer.text) == (200, "one two three")
    await scene.until(lambda: scene.service.num_requests == 0)


async def test_a_worker_may_be_named_by_a_name(scene: Scene):
    port = scene.engines[1].url.rpartition(":")[2]
    scene.service.put_worker(InstanceId("b"), Role.BOTH, url=f"http://localhost:{port}")
    answer = await scene.http.post("/generate", json={"input_ids": TOKENS, "routing": {"worker": "b"}})
    assert (answer.status_code, answer.headers["x-tanghulu-worker"]) == (200, "b")


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://169.254.169.254", "outside the workers' networks"),
        ("http://[::ffff:169.254.169.254]:80", "outside the workers' networks"),
        ("http://8.8.8.8:30000", "outside the workers' networks"),
        ("http://127.0.0.1:30000/latest/meta-data?x=", "only a host"),
        ("http://127.0.0.1:30000/?", "only a host"),
        ("http://user@127.0.0.1:30000", "query or user"),
        ("http://127.0.0.1:x", "host:port"),
        ("http://", "has no host"),
    ],
)
async def test_a_url_that_is_no_workers_is_refused_at_both_edges(scene: Scene, url: str, text: str):
    answer = await scene.http.put("/workers", json={"worker": "c", "url": url})
    assert answer.status_code == 400
    assert text in answer.text
    with pytest.raises(grpc.aio.AioRpcError, match=text):
        await scene.stub.PutWorker(pb.RouterWorker(worker="c", url=url))
    assert len(scene.service.workers) == 2


async def test_a_name_that_leads_out_of_the_networks_gets_no_request(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    async def elsewhere(host: str, *_: object, **__: object) -> list:
        return [(2, 1, 6, "", ("169.254.169.254", 0))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", elsewhere)
    scene.service.put_worker(InstanceId("c"), Role.BOTH, url="http://metadata.internal")
    scene.service.remove_worker(InstanceId("a"))
    scene.service.remove_worker(InstanceId("b"))
    answer = await scene.http.post("/generate", json={"input_ids": TOKENS})
    assert answer.status_code == 503
    assert "outside --worker-networks" in answer.text


def test_networks_are_named():
    named = WorkerNetworks("10.1.0.0/16, 2001:db8::/32")
    for url in ("http://10.1.2.3:30000", "https://[2001:db8::1]:30000/", "http://a.name"):
        named.checked_url(url)
    for url in ("http://10.2.0.1", "http://127.0.0.1", "http://[::1]"):
        with pytest.raises(InvalidRequest, match="worker-networks"):
            named.checked_url(url)
    assert named.checked_url("https://[2001:db8::1]:30000/") == "https://[2001:db8::1]:30000"
    for url in ("http://a..b:1", f"http://{'a' * 64}.example", "http://a:99999", "http://a/b", "http://[::1", "a:1"):
        with pytest.raises(InvalidRequest, match=r"^url"):
            named.checked_url(url)
    encrypted = WorkerNetworks(encrypted=True)
    assert encrypted.checked_url("https://127.0.0.1:1") == "https://127.0.0.1:1"
    with pytest.raises(InvalidRequest, match="is plain HTTP"):
        encrypted.checked_url("http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="--worker-networks"):
        RouterConfig(worker_networks="10.0.0.1/8")
