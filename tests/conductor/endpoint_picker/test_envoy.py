"""The endpoint picker behind a real Envoy, with the configuration of docs/guides/behind_a_gateway.md."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc.aio
import pytest

from tanghulu.conductor.endpoint_picker import picker as endpoint_picker
from tests.conductor.endpoint_picker.envoy import gateway
from tests.conductor.endpoint_picker.rig import chat, engine, picker, until
from tests.free_ports import free_port
from tests.store.cluster import Process

pytestmark = pytest.mark.slow


async def test_requests_reach_the_endpoint_picked(tmp_path: Path):
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(engine()) for _ in range(2)]
        server = await stack.enter_async_context(picker(*engines))
        names = [each.address for each in engines]
        http = await stack.enter_async_context(gateway(tmp_path, str(server.address), names))
        texts = [f"{number} is a number. " * (1 + number % 4 * 500) for number in range(200)]

        async def ask(text: str) -> tuple[str, str]:
            body = chat(text, stream=True)
            async with http.stream("POST", "/v1/chat/completions", content=body) as answer:
                assert answer.status_code == 200, await answer.aread()
                pieces = [piece async for piece in answer.aiter_raw()]
            assert b"".join(pieces) == body
            return answer.headers["x-endpoint"], answer.headers["x-picked"]

        turns = asyncio.Semaphore(10)

        async def in_turn(text: str) -> tuple[str, str]:
            async with turns:
                return await ask(text)

        answers = await asyncio.gather(*map(in_turn, texts))
        for served, picked in answers:
            assert served == picked.split(",")[0]
        assert {served for served, _ in answers} == set(names)
        for text in texts[1:20:4]:
            await until(lambda: server.service.num_requests == 0)
            served = (await ask(text))[0]
            await until(lambda: server.service.num_requests == 0)
            assert (await ask(text + "more"))[0] == served, "its prefix is there"
        forged = {"x-gateway-destination-endpoint": "127.0.0.1:1"}
        answer = await http.post("/v1/chat/completions", content=chat("hello"), headers=forged)
        assert answer.headers["x-picked"].split(",")[0] == answer.headers["x-endpoint"]
        assert (await http.get("/v1/models")).status_code == 200
        served, picked = await ask("a long one " * 300_000)
        assert picked.split(",")[0] == served
        assert (await http.post("/v1/chat/completions", content=b"{")).status_code == 400


async def test_a_dead_endpoint_is_not_chosen_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(endpoint_picker, "REST_S", 1e9)
    async with contextlib.AsyncExitStack() as stack:
        alive = await stack.enter_async_context(engine())
        names = [alive.address, f"127.0.0.1:{free_port()}"]
        options = {"endpoints": ",".join(names), "health_interval_s": 0.0, "policy": "round-robin"}
        server = await stack.enter_async_context(picker(**options, num_ready=2))
        http = await stack.enter_async_context(gateway(tmp_path, str(server.address), names))
        answers = [await http.post("/v1/chat/completions", content=chat("hello")) for _ in range(6)]
        assert {answer.status_code for answer in answers} == {200}
        picks = [answer.headers["x-picked"] for answer in answers]
        dead_first = [pick for pick in picks if pick.startswith(names[1])]
        assert len(dead_first) == 1, picks
        assert picks[-1] == names[0]
        await until(lambda: server.service.num_requests == 0)


async def test_nobody_reached_is_the_gateways_503(tmp_path: Path):
    names = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    options = {"endpoints": ",".join(names), "health_interval_s": 0.0}
    async with picker(**options, num_ready=2) as server, gateway(tmp_path, str(server.address), names) as http:
        statuses = [(await http.post("/v1/chat/completions", content=chat("hello"))).status_code for _ in range(3)]
        assert statuses == [503, 503, 503]
        await until(lambda: server.service.num_requests == 0)


#: Body mode of requests -> statuses of a POST while the picker is down and the gateway may go on. In full duplex Envoy
#: goes on if it knows of the failure before the first piece of the body.
MODES = {"NONE": {200}, "BUFFERED": {200}, "STREAMED": {200}, "FULL_DUPLEX_STREAMED": {200, 500}}


@pytest.mark.parametrize("mode", MODES)
async def test_in_every_mode_the_pick_is_followed_and_a_picker_may_die(tmp_path: Path, mode: str):
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(engine()) for _ in range(2)]
        names = [each.address for each in engines]
        processing = {"request_body_mode": mode}
        if mode != "FULL_DUPLEX_STREAMED":
            processing |= {"response_body_mode": "STREAMED"}
            processing |= {"request_trailer_mode": "SKIP", "response_trailer_mode": "SKIP"}
        async with picker(*engines) as server:
            options = {"processing_mode": processing, "failure_mode_allow": True, "message_timeout": "60s"}
            http = await stack.enter_async_context(gateway(tmp_path, str(server.address), names, **options))
            first = ""
            for turn in range(6):
                body = chat("A long beginning. " * 20, *["next"] * turn)
                answer = await http.post("/v1/chat/completions", content=body)
                assert (answer.status_code, answer.content) == (200, body)
                assert answer.headers["x-picked"].split(",")[0] == answer.headers["x-endpoint"]
                first = first or answer.headers["x-endpoint"]
                if mode in ("BUFFERED", "FULL_DUPLEX_STREAMED"):
                    assert answer.headers["x-endpoint"] == first
            await until(lambda: server.service.num_requests == 0)
        posted = await http.post("/v1/chat/completions", content=chat("hello"))
        got = await http.get("/v1/models")
        assert posted.status_code in MODES[mode]
        assert got.status_code == 200


async def test_a_client_that_leaves_frees_its_load(tmp_path: Path):
    async with engine() as slow, picker(slow) as server, gateway(tmp_path, str(server.address), [slow.address]) as http:
        slow.go.clear()
        async with http.stream("POST", "/v1/chat/completions", content=chat("hello")):
            assert server.service.num_requests == 1
        await until(lambda: server.service.num_requests == 0)


async def test_the_command(tmp_path: Path):
    port, health_port = free_port(), free_port()
    async with engine() as made:
        flags = ("--endpoints", made.address, "--port", str(port), "--health-port", str(health_port))
        process = await asyncio.to_thread(Process, "tanghulu.conductor.endpoint_picker.main", *flags)
        try:
            async with gateway(tmp_path, f"127.0.0.1:{port}", [made.address]) as http:
                async with grpc.aio.insecure_channel(f"127.0.0.1:{health_port}") as channel:
                    watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
                    while await watch.read() != b"\x08\x01":
                        pass
                answer = await http.post("/v1/chat/completions", content=chat("hello"))
                assert (answer.status_code, answer.headers["x-picked"]) == (200, made.address)
        finally:
            await asyncio.to_thread(process.stop)
