"""The list of engine servers: options, the file, names with several addresses, adapters, phases, hung servers."""

from __future__ import annotations

import asyncio
import json

import pytest

from tanghulu.conductor.engines import source
from tanghulu.conductor.engines.servers import parse_server, servers_file
from tanghulu.discovery.base import EventKind
from tanghulu.errors import ConfigError, NodeUnavailable
from tanghulu.types import Place
from tests.conductor.engines.fake_vllm import FakeVllm
from tests.conductor.engines.test_front import expected, text_of


def test_a_server_with_options():
    server = parse_server("vllm=http://gpu1:8000,model=/m,role=prefill")
    assert (server.engine, server.url, server.model, server.role) == ("vllm", "http://gpu1:8000", "/m", "prefill")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("http://gpu1:8000", "lacks the engine or the URL"),
        ("vllm=gpu1:8000", "http://"),
        ("tgi=http://gpu1:8000", "engines are vllm and sglang"),
        ("vllm=http://gpu1,modle=/m", "modle"),
        ("vllm=http://gpu1,model", "not OPTION=VALUE"),
        ("vllm=http://gpu1,role=both,role=decode", "twice"),
        ("vllm=http://gpu1,role=some", "role .both, prefill, decode"),
        ("vllm=http://gpu1,seeds=maybe", "seeds .given, "),
        ("sglang=http://gpu1,role=decode", "vllm alone"),
    ],
)
def test_bad_servers_are_explained(text, error):
    with pytest.raises(ConfigError, match=error):
        parse_server(text)


def test_files(tmp_path):
    table = tmp_path / "engines.toml"
    table.write_text('engines = ["vllm=http://a:1", {engine = "sglang", url = "http://b:2", model = "/m"}]')
    assert [each.engine for each in servers_file(table).table] == ["vllm", "sglang"]
    listed = tmp_path / "engines.json"
    for content, error in (
        ("{", "cannot read"),
        ("{}", "no list"),
        ("[1]", "entry 0"),
        ('["vllm=http://a:1","vllm=http://a:1"]', "twice"),
    ):
        listed.write_text(content)
        with pytest.raises(ConfigError, match=error):
            servers_file(listed)


async def test_servers_join_and_leave_with_the_file(fronts, folder, tmp_path):
    listed = tmp_path / "engines.json"
    listed.write_text("[]")
    servers = [FakeVllm(folder), FakeVllm(folder)]
    async with fronts(servers=servers, engine=("vllm=http://127.0.0.1:1",), engines=listed) as front:
        workers = front.cluster.registry.workers
        listed.write_text(json.dumps([each.flag for each in servers]))
        await front.up()
        servers[0].hold()
        servers[1].hold()
        asking = asyncio.create_task(front.complete())
        await front.cluster.until(lambda: any(each.open_streams for each in servers))
        first, second = sorted(servers, key=lambda each: not each.open_streams)
        name = f"127.0.0.1:{first.port}"
        listed.write_text("[")  # unusable: all stay
        await asyncio.sleep(0.05)
        assert workers[name].usable
        listed.write_text(json.dumps([second.flag]))
        await front.cluster.until(lambda: workers[name].leaving)
        first.go()
        answer = await asking  # what runs there ends there
        assert text_of(answer) == expected(first, first.requests[0]["prompt"], 12)
        assert not second.requests
        await front.cluster.until(lambda: name not in workers)


async def test_every_address_of_a_name_is_a_server(monkeypatch):
    monkeypatch.setattr(source, "FILE_S", 0.001)
    monkeypatch.setattr(source, "LOOKUP_S", 0.0)
    addresses, seen = ["10.0.0.1"], []

    async def look(host: str) -> list[str]:
        if not addresses:
            raise NodeUnavailable("no answer")
        return list(addresses)

    followed = source.EngineSource([parse_server("vllm=http://pool:8000")], None, "default", Place(), look)
    task = asyncio.create_task(followed.follow(seen.append))

    async def until(*names: str) -> None:
        async with asyncio.timeout(10):
            while set(followed.servers) != set(names):  # noqa: ASYNC110 - it has no hook for tests
                await asyncio.sleep(0.001)

    await until("pool:8000")
    addresses[:] = ["10.0.0.0", "10.0.0.1"]
    await until("pool:8000", "10.0.0.0:8000")
    assert followed.servers["pool:8000"].base_url == "http://10.0.0.1:8000"
    addresses.clear()
    await asyncio.sleep(0.01)
    await until("pool:8000", "10.0.0.0:8000")
    addresses[:] = ["10.0.0.0"]
    await until("10.0.0.0:8000")
    task.cancel()
    assert [each.kind for each in seen] == [EventKind.PUT, EventKind.PUT, EventKind.DELETE]


async def test_adapters_are_models_of_their_own(fronts):
    async with fronts() as front:
        (server,) = front.servers
        server.adapters = ["pirate"]
        await front.up()
        await front.cluster.until(lambda: "pirate" in front.cluster.registry.models)
        name = f"127.0.0.1:{server.port}/pirate"
        await front.cluster.until(lambda: front.cluster.registry.workers[name].usable)
        listed = (await front.cluster.http.get("/v1/models")).json()
        assert {each["id"] for each in listed["data"]} == {"tiny", "pirate"}
        await front.complete(model="pirate")
        assert server.requests[0]["model"] == "pirate"
        server.adapters = []
        await front.cluster.until(lambda: name not in front.cluster.registry.workers)


async def test_a_silent_server_loses_its_requests(fronts):
    async with fronts(2, worker_timeout_s=0.3) as front:
        await front.up()
        for each in front.servers:
            each.hold()
        asking = asyncio.create_task(front.complete())
        await front.cluster.until(lambda: any(each.open_streams for each in front.servers))
        first, second = sorted(front.servers, key=lambda each: not each.open_streams)
        second.go()
        first.step(2)
        first.silent = True
        answer = await asking
        assert text_of(answer) == expected(first, first.requests[0]["prompt"], 12)
        assert not front.cluster.registry.workers[f"127.0.0.1:{first.port}"].usable


async def test_a_hung_engine_behind_a_living_api_is_noticed(fronts):
    async with fronts(2, worker_timeout_s=0.3) as front:
        await front.up()
        for each in front.servers:
            each.hold()
        asking = asyncio.create_task(front.complete())
        await front.cluster.until(lambda: any(each.open_streams for each in front.servers))
        _, second = sorted(front.servers, key=lambda each: not each.open_streams)
        second.go()
        answer = await asking
        assert (answer["status"], len(second.requests)) == (200, 1)


async def test_prefill_and_decode_apart(fronts, folder):
    servers = [FakeVllm(folder), FakeVllm(folder)]
    for each in servers:
        await each.start()
        await each.die()
    flags = [f"{each.flag},role={role}" for each, role in zip(servers, ("prefill", "decode"), strict=True)]
    servers[0].kv_transfer = {"do_remote_prefill": True, "remote_block_ids": [3], "remote_host": "h"}
    async with fronts(servers=[], engine=tuple(flags)) as front:
        for each in servers:
            await each.start(each.port)
        try:
            await front.up(*servers)
            answer = await front.complete()
            (prefill,), (decode,) = servers[0].requests, servers[1].requests
            assert (prefill["stream"], prefill["max_tokens"], prefill["min_tokens"]) == (False, 1, 1)
            assert prefill["kv_transfer_params"]["do_remote_decode"] is True
            assert decode["kv_transfer_params"] == servers[0].kv_transfer
            assert decode["prompt"] == prefill["prompt"]
            assert text_of(answer) == expected(servers[1], decode["prompt"], 12)
        finally:
            for each in servers:
                await each.stop()


async def test_keys_are_shown(fronts, folder, tmp_path):
    (tmp_path / "key").write_text("secret\n")
    server = await FakeVllm(folder).start()
    async with fronts(servers=[], engine=(f"{server.flag},key={tmp_path / 'key'}",)) as front:
        try:
            await front.up(server)
            await front.complete()
            assert server.headers[0]["authorization"] == "Bearer secret"
        finally:
            await server.stop()
