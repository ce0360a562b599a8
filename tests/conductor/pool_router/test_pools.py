"""Pools: the grid and its file, what a body demands, whose turn it is; and real conductors behind a real router."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from tanghulu.conductor.pool_router.demand import demand_of, parse_body, prefill_only
from tanghulu.conductor.pool_router.forward import Members
from tanghulu.conductor.pool_router.grid import Demand, parse_pools, read_pools
from tanghulu.conductor.pool_router.main import GlobalRouter, GlobalRouterConfig
from tanghulu.discovery.base import EventKind, Instance, InstanceEvent
from tanghulu.errors import ConfigError, InvalidRequest
from tanghulu.types import Address, InstanceId, Role
from tests.conductor.cluster import Cluster, running_cluster
from tests.discovery.memory import MemoryDiscovery, MemoryRegistry

FILE = """
[[pool]]
name = "short"
urls = ["http://127.0.0.1:1"]
fallback = ["long"]

[[pool]]
name = "long"

[prefill]
ttft_s = [1.0, 10.0]
prompt_tokens = [4096, 131072]
pools = [["short", "long"], ["short", "short"]]

[decode]
tbt_s = [0.05]
context_tokens = [8192, 131072]
pools = [["short", "long"]]
"""
BODY = {"model": "tiny", "prompt": "a prompt of some length", "max_tokens": 20, "ignore_eos": True}


def changed(**tables: Any) -> dict[str, Any]:
    return {**tomllib.loads(FILE), **tables}


class TestGrid:
    """The worked example of the module, and what is refused."""

    POOLS = parse_pools(tomllib.loads(FILE))

    @pytest.mark.parametrize(
        ("demand", "expected"),
        [
            (Demand(6000, 6100, ttft_s=1.0), ("long", "short")),
            (Demand(6000, 6100), ("short", "short")),
            (Demand(4096, 8192, ttft_s=0.1), ("short", "short")),
            (Demand(4097, 8193, ttft_s=0.1, tbt_s=0.01), ("long", "long")),
            (Demand(4097, 8193, ttft_s=1.1, tbt_s=9.0), ("short", "long")),
            (Demand(10**6, 10**6, ttft_s=99.0), ("short", "long")),
        ],
    )
    def test_choice(self, demand, expected):
        assert self.POOLS.choose(demand) == expected

    def test_fall_backs_come_each_once(self):
        circle = parse_pools(
            changed(pool=[{"name": "short", "fallback": ["long"]}, {"name": "long", "fallback": ["short"]}])
        )
        assert list(circle.ways("long")) == ["long", "short"]
        assert list(self.POOLS.ways("long")) == ["long"]

    def test_toml_and_json_are_the_same(self, tmp_path):
        (tmp_path / "p.toml").write_text(FILE)
        (tmp_path / "p.json").write_text(json.dumps(tomllib.loads(FILE)))
        assert read_pools(tmp_path / "p.toml") == read_pools(tmp_path / "p.json") == self.POOLS

    @pytest.mark.parametrize(
        ("tables", "text"),
        [
            ({"pool": []}, r"length >= 1 - at `\$.pool`"),
            ({"pool": [{"name": "short"}, {"name": "short"}]}, "pool 'short' is defined twice"),
            ({"pool": [{"name": "short", "fallback": ["x"]}]}, "unknown pool 'x'"),
            ({"pool": [{"name": "short", "urls": ["ftp://x"]}]}, "ftp://x"),
            ({"pool": [{"name": "short", "urls": ["http://[::1"]}]}, "is not a host"),
            ({"pool": [{"name": "short", "urls": ["http://h:99999"]}]}, "highest is 65535"),
            ({"pool": [{"name": "short", "urls": ["http://h:1/v1"]}]}, "only a host"),
            ({"pool": [{"name": "short", "urls": ["http://me@h:1"]}]}, "query or user"),
            ({"pool": [{"name": "short", "urls": ["http://a..b"]}]}, "1 to 63 characters"),
            ({"pool": [{"name": "short", "urls": ["http://"]}]}, "has no host"),
            ({"pool": [{"name": ["short"]}]}, r"`str`, got `array` - at `\$.pool\[0\].name`"),
            ({"pool": [{"name": "short", "fallback": ["x"]}, {"name": "long"}]}, "unknown pool"),
            ({"pool": [{"name": "short", "url": "http://x"}]}, "unknown field `url`"),
            ({"prefill": {"ttft_s": [1.0], "prompt_tokens": [1]}}, "missing required field `pools`"),
            ({"prefill": {"ttft_s": [2.0, 1.0], "prompt_tokens": [1], "pools": [["long"], ["long"]]}}, "ascend"),
            ({"prefill": {"ttft_s": [1.0], "prompt_tokens": [1, 2], "pools": [["long"]]}}, "a name for each of the 2"),
            ({"decode": {"tbt_s": [1.0], "context_tokens": [1], "pools": [["huge"]]}}, "unknown pool 'huge'"),
            ({"decode": {"tbt_s": ["fast"], "context_tokens": [1], "pools": [["long"]]}}, "`float`, got `str`.*tbt_s"),
            ({"characters_per_token": 0}, "characters_per_token"),
            ({"characters_per_token": float("nan")}, "characters_per_token"),
            ({"decode": {"tbt_s": [10**400], "context_tokens": [1], "pools": [["long"]]}}, "out of range|too large"),
            ({"decode": {"tbt_s": [1.0], "context_tokens": [1], "pools": [[["long"]]]}}, "`str`, got `array`.*pools"),
            ({"colour": "red"}, "unknown key 'colour'"),
        ],
    )
    def test_what_is_wrong_is_named(self, tables, text):
        with pytest.raises(ConfigError, match=text):
            parse_pools(changed(**tables))

    def test_a_slash_at_the_end_of_a_url_is_no_path(self):
        urls = ["http://h:1/", "HTTPS://h", "http://[::1]:2/"]
        read = parse_pools(changed(pool=[{"name": "short", "urls": urls}, {"name": "long"}]))
        assert read.pools["short"].urls == ("http://h:1", "https://h", "http://[::1]:2")

    def test_a_file_that_cannot_be_read(self, tmp_path):
        (tmp_path / "p.toml").write_text("pool = ")
        (tmp_path / "latin.toml").write_bytes(b"# f\xfcr alle\n")
        (tmp_path / "deep.json").write_text("[" * 100_000)
        for path in (tmp_path / name for name in ("p.toml", "none.json", "latin.toml", "deep.json")):
            with pytest.raises(ConfigError, match=path.name):
                read_pools(path)
        with pytest.raises(ConfigError, match="--pools"):
            GlobalRouterConfig().read_pools()


class TestDemand:
    """Lengths and targets of all kinds of bodies."""

    @pytest.mark.parametrize(
        ("body", "expected"),
        [
            ({"prompt": "x" * 400, "max_tokens": 50}, (100, 150)),
            ({"prompt": [1, 2, 3]}, (3, 3)),
            ({"prompt": ["x" * 40, "x" * 80]}, (20, 20)),
            ({"prompt": [[1, 2], [3]]}, (2, 2)),
            ({"messages": [{"role": "user", "content": "x" * 40}], "max_completion_tokens": 7}, (10, 17)),
            ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 40}]}]}, (10, 10)),
            (
                {
                    "system": [{"type": "text", "text": "x" * 20}],
                    "messages": [
                        {"content": [{"type": "tool_result", "content": [{"type": "text", "text": "x" * 20}]}]}
                    ],
                },
                (10, 10),
            ),
            ({"system": "x" * 20, "messages": [{"content": "x" * 20}], "max_tokens": 7}, (10, 17)),
            ({"text": "x" * 8, "sampling_params": {"max_new_tokens": 5}}, (2, 7)),
            ({"input_ids": [[1], [1, 2, 3]]}, (3, 3)),
            ({"input": "x" * 40, "text": {"format": {}}, "max_output_tokens": 3}, (10, 13)),
            ({"prompt": None, "text": "x" * 8, "max_tokens": 10**400}, (2, 2 + (1 << 32))),
            ({}, (0, 0)),
        ],
    )
    def test_lengths(self, body, expected):
        seen = demand_of(body, 4.0)
        assert (seen.prompt_tokens, seen.context_tokens) == expected

    def test_targets(self):
        assert demand_of({"slo": {"ttft_s": 1, "tbt_s": 0.05}}, 4.0) == Demand(0, 0, 1.0, 0.05)
        assert demand_of({"slo": None}, 4.0) == Demand(0, 0)
        for slo in (3, [], {"ttft_s": "soon"}, {"tbt_s": 0}, {"tbt_s": True}, {"tbt_s": 10**400}):
            with pytest.raises(InvalidRequest, match="slo"):
                demand_of({"slo": slo}, 4.0)

    @pytest.mark.parametrize(
        "body",
        [
            b"[" * 200_000,
            b'{"max_tokens": ' + b"1" * 5000 + b"}",
            b"\xff",
            b"[]",
            b'{"prompt": [[[1]]]}',
            b'{"user": "\\ud800"}',
        ],
    )
    def test_what_is_no_request(self, body):
        with pytest.raises(InvalidRequest):
            demand_of(parse_body(body), 4.0)

    def test_for_one_token(self):
        response = {"input": "x", "text": {"format": {"type": "text"}}, "stream": True}
        assert prefill_only(response) == {
            "input": "x",
            "text": response["text"],
            "max_output_tokens": 1,
            "store": False,
        }
        chat = {"messages": [], "stream": True, "n": 3, "best_of": 3, "max_completion_tokens": 9, "temperature": 0.5}
        assert prefill_only(chat) == {"messages": [], "temperature": 0.5, "max_tokens": 1}
        body = {"text": "x", "stream": True, "sampling_params": {"n": 2, "top_k": 3}}
        assert prefill_only(body) == {"text": "x", "sampling_params": {"top_k": 3, "max_new_tokens": 1}}


def test_who_has_least_is_asked_first_and_who_failed_rests():
    members = Members(["http://a", "http://b"])
    a, b = members.in_order(0.0)
    a.open_requests = 2
    assert [m.url for m in members.in_order(0.0)] == ["http://b", "http://a"]
    b.failed(0.0)
    assert [m.url for m in members.in_order(0.1)] == ["http://a", "http://b"]
    assert [m.url for m in members.in_order(0.6)] == ["http://b", "http://a"]
    for _ in range(20):
        b.failed(1.0)
    assert b.rests_until_s == 31.0
    b.served()
    assert members.in_order(1.0)[0] is b
    members.add(InstanceId("c"), "http://c")
    assert len(members) == 3
    members.remove(InstanceId("c"))
    members.remove(InstanceId("c"))
    assert len(members) == 2


class Pools:
    """Two pools with a conductor and a worker each, and a router in front."""

    def __init__(self, router: GlobalRouter, short: Cluster, long: Cluster, http: httpx.AsyncClient) -> None:
        self.router, self.short, self.long, self.http = router, short, long, http

    def counted(self, name: str, **labels: str) -> float:
        return self.router._registry.get_sample_value(f"tanghulu_router_{name}_total", labels) or 0.0


@contextlib.asynccontextmanager
async def running_pools(tmp_path: Path, fallback: list[str], **options: Any) -> AsyncIterator[Pools]:
    for name in ("s", "l"):
        (tmp_path / name).mkdir()
    async with running_cluster(tmp_path / "s", **options) as short, running_cluster(tmp_path / "l") as long:
        await short.add()
        await long.add()
        data = changed(
            pool=[
                {"name": "short", "urls": [f"http://{short.conductor.address}"], "fallback": fallback},
                {"name": "long", "urls": [f"http://{long.conductor.address}"]},
            ],
            prefill={"ttft_s": [1.0, 9.0], "prompt_tokens": [20, 99], "pools": [["short", "long"], ["short", "short"]]},
            decode={"tbt_s": [1.0], "context_tokens": [30, 99], "pools": [["short", "long"]]},
        )
        config = GlobalRouterConfig(port=0, grace_s=0.0)
        router = GlobalRouter(config, parse_pools(data), CollectorRegistry())
        async with router.running(None):
            async with httpx.AsyncClient(base_url=f"http://{router.address}", timeout=60, trust_env=False) as http:
                yield Pools(router, short, long, http)
        open_requests = [m.open_requests for members in router.forwarder.members.values() for m in members.in_order(0)]
        assert open_requests == [0, 0]


async def test_a_request_goes_to_its_pool_and_streams_back(tmp_path):
    async with running_pools(tmp_path, []) as pools:
        direct = (await pools.short.http.post("/v1/completions", json=BODY)).json()["choices"]
        answer = await pools.http.post("/v1/completions", json=BODY)
        assert answer.json()["choices"] == direct
        assert (answer.headers["x-tanghulu-prefill-pool"], answer.headers["x-tanghulu-pool"]) == ("short", "short")
        assert pools.counted("requests", prefill="short", decode="short") == 1
        pieces = []
        async with pools.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    pieces.append(json.loads(line[6:])["choices"][0]["text"])
        assert "".join(pieces) == direct[0]["text"]
        assert len(pieces) > 5
        assert pools.long.workers[0].submits == []
        assert (await pools.http.get("/v1/models")).json()["data"][0]["id"] == "tiny"
        assert (await pools.http.get("/ready")).json() == {"ready": True, "missing": []}
        seen = (await pools.http.post("/route", json={**BODY, "slo": {"ttft_s": 0.5}})).json()
        assert (seen["prefill"], seen["prompt_tokens"], seen["context_tokens"]) == ("short", 6, 26)


async def test_the_targets_of_a_request_stay_at_the_router(tmp_path):
    async with running_pools(tmp_path, []) as pools:
        for prompt in (BODY["prompt"], "p" * 60):
            answer = await pools.http.post("/v1/completions", json={**BODY, "prompt": prompt, "slo": {"tbt_s": 0.5}})
            assert (answer.status_code, answer.headers.get("warning")) == (200, None)
        answer = await pools.http.post("/v1/completions", json={**BODY, "slo": None})
        assert (answer.status_code, answer.headers.get("warning")) == (200, None)


async def test_what_conductors_answer_about_themselves_and_their_responses(tmp_path):
    async with running_pools(tmp_path, []) as pools:
        http = pools.http
        for path in ("/v1/models/tiny", "/model_info", "/server_info", "/get_model_info", "/get_server_info"):
            assert (await http.get(path)).json() == (await pools.short.http.get(path)).json(), path
        assert (await http.get("/v1/models/nobody")).json()["error"]["code"] == "model_not_found"
        long = {"model": "tiny", "input": "p" * 60, "max_output_tokens": 40}
        first = (await http.post("/v1/responses", json=long)).json()
        assert (await pools.long.http.get(f"/v1/responses/{first['id']}")).json() == first
        assert (await http.get(f"/v1/responses/{first['id']}")).json() == first
        then = {"model": "tiny", "input": "on", "max_output_tokens": 1, "previous_response_id": first["id"]}
        answer = await http.post("/v1/responses", json=then)
        assert (answer.status_code, answer.headers["x-tanghulu-pool"]) == (200, "long")
        assert (await http.delete(f"/v1/responses/{first['id']}")).json()["deleted"]
        for answer in (await http.get(f"/v1/responses/{first['id']}"), await http.post("/v1/responses", json=then)):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")


async def test_messages_of_anthropics_api_go_through_with_its_errors(tmp_path):
    async with running_pools(tmp_path, [], max_in_flight=1, max_queued=1) as pools:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "system": "be brief"}
        answer = await pools.http.post("/v1/messages?beta=true", json=body, headers={"anthropic-version": "2023-06-01"})
        assert (answer.status_code, answer.json()["stop_reason"]) == (200, "max_tokens")
        assert answer.headers.get_list("request-id") == answer.headers.get_list("x-request-id")
        counted = await pools.http.post("/v1/messages/count_tokens", json={**body, "max_tokens": None})
        assert counted.json() == {"input_tokens": answer.json()["usage"]["input_tokens"]}
        long = {**body, "messages": [{"role": "user", "content": "p" * 60}], "max_tokens": 40}
        answer = await pools.http.post("/v1/messages", json={**long, "thinking": {"type": "disabled"}})
        assert (answer.headers["x-tanghulu-prefill-pool"], answer.headers["x-tanghulu-pool"]) == ("short", "long")
        first, then = pools.short.workers[0].submits[-1], pools.long.workers[0].submits[-1]
        assert (first.tokens, first.stop.max_new_tokens) == (then.tokens, 1)
        for content, words in ((b"[", "not JSON"), (json.dumps({**body, "max_tokens": 0}).encode(), "max_tokens")):
            refused = await pools.http.post("/v1/messages", content=content, headers={"x-request-id": "mine"})
            assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
            assert words in refused.json()["error"]["message"]
            assert refused.headers.get_list("request-id") == [refused.json()["request_id"]] == ["mine"]


async def test_a_full_queue_is_tried_elsewhere_by_anthropics_name_too(tmp_path):
    async with running_pools(tmp_path, ["long"], max_in_flight=1, max_queued=1) as pools:
        worker, body = pools.short.workers[0], {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        worker.hold()
        waiting = [asyncio.create_task(pools.short.http.post("/v1/messages", json=body)) for _ in range(2)]
        await pools.short.until(lambda: pools.short.dispatcher.num_waiting == 1)
        assert (await pools.short.http.post("/v1/messages", json=body)).status_code == 529
        answer = await pools.http.post("/v1/messages", json=body)
        assert (answer.status_code, answer.headers["x-tanghulu-pool"]) == (200, "long")
        worker.release()
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]


async def test_every_answer_has_the_id_of_its_request(tmp_path):
    async with running_pools(tmp_path, []) as pools:
        for path, body in (
            ("/nowhere", b""),
            ("/v1/completions", b"["),
            ("/v1/completions", json.dumps(BODY).encode()),
        ):
            answer = await pools.http.post(path, content=body, headers={"x-request-id": "mine"})
            assert answer.headers.get_list("x-request-id") == ["mine"]
            assert (await pools.http.post(path, content=body)).headers["x-request-id"]
        assert (await pools.http.get("/v1/models/../metrics")).status_code in (400, 404)


async def test_another_pool_prefills_for_the_one_that_decodes(tmp_path):
    async with running_pools(tmp_path, []) as pools:
        body = {**BODY, "prompt": "p" * 60, "max_tokens": 40}  # 15 tokens by estimate, 55 with the answer
        answer = await pools.http.post("/v1/completions", json=body)
        assert answer.json()["usage"]["completion_tokens"] == 40
        assert (answer.headers["x-tanghulu-prefill-pool"], answer.headers["x-tanghulu-pool"]) == ("short", "long")
        first, then = pools.short.workers[0].submits[0], pools.long.workers[0].submits[0]
        assert first.tokens == then.tokens
        assert (first.stop.max_new_tokens, then.stop.max_new_tokens) == (1, 40)


async def test_what_a_conductor_refuses_another_pool_serves(tmp_path):
    async with running_pools(tmp_path, ["long"], ttft_slo_s=1.0) as pools:
        load = pools.short.registry.workers[pools.short.workers[0].id].load
        load.sent("somebody else's", 10**6, 0)
        answer = await pools.http.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.headers["x-tanghulu-pool"]) == (200, "long")
        assert pools.counted("retries", pool="short") == 1
        pools.router.forwarder.members["long"].in_order(0.0)[0].url = "http://127.0.0.1:9"
        answer = await pools.http.post("/v1/completions", json=BODY)
        assert answer.status_code == 429  # the refusal itself, as the other pool cannot be reached
        assert (await pools.http.post("/v1/completions", content=b"[]")).status_code == 400


async def test_a_prefill_that_is_refused_has_primed_nothing(tmp_path):
    async with running_pools(tmp_path, []) as pools:
        await pools.short.workers[0].stop()
        await pools.short.until(lambda: not pools.short.registry.workers)
        body = {**BODY, "model": "absent", "prompt": "p" * 60, "max_tokens": 40}
        assert (await pools.http.post("/v1/completions", json=body)).status_code == 404
        assert pools.counted("unprimed") == 1


async def test_a_pool_that_cannot_be_reached(tmp_path):
    async with running_pools(tmp_path, []) as pools:
        member = pools.router.forwarder.members["short"].in_order(0.0)[0]
        member.url = "http://127.0.0.1:9"
        answer = await pools.http.post("/v1/completions", json=BODY)
        assert answer.status_code == 503
        assert "pool 'short'" in answer.text
        assert member.num_failures == 1
        answer = await pools.http.post("/v1/completions", json={**BODY, "prompt": "p" * 60, "max_tokens": 40})
        assert (answer.status_code, answer.headers["x-tanghulu-pool"]) == (200, "long")
        assert pools.counted("unprimed") == 1
        assert (await pools.http.get("/ready")).json() == {"ready": False, "missing": ["short"]}


async def test_a_client_that_hangs_up_is_heard_of_at_the_worker(tmp_path):
    async with running_pools(tmp_path, []) as pools:
        worker = pools.short.workers[0]
        worker.hold()
        asking = asyncio.create_task(pools.http.post("/v1/completions", json={**BODY, "stream": True}))
        await pools.short.until(lambda: worker.submits)
        asking.cancel()
        await asyncio.wait([asking])
        await pools.short.until(lambda: worker.aborts)
        worker.release()
        long = {**BODY, "stream": True, "max_tokens": 400}  # decoded by the other pool
        async with pools.http.stream("POST", "/v1/completions", json=long) as stream:
            pools.long.workers[0].hold()
            await anext(stream.aiter_lines())
        await pools.long.until(lambda: pools.long.workers[0].aborts)
        members = [m for members in pools.router.forwarder.members.values() for m in members.in_order(0.0)]
        await pools.short.until(lambda: not any(m.open_requests for m in members))


async def test_conductors_are_found_by_discovery_in_their_namespace(tmp_path):
    router = GlobalRouter(
        GlobalRouterConfig(port=0, grace_s=0.0), parse_pools(tomllib.loads(FILE)), CollectorRegistry()
    )
    async with MemoryDiscovery(MemoryRegistry()) as discovery, router.running(discovery):
        instance = Instance(InstanceId("c-1"), Role.CONDUCTOR, Address("127.0.0.1", 8001), namespace="long")
        registration = await discovery.register(instance)
        members = router.forwarder.members["long"]
        async with asyncio.timeout(30):
            while not len(members):  # noqa: ASYNC110 - what it looks at has no hook for tests
                await asyncio.sleep(0.001)
        assert [m.url for m in members.in_order(0.0)] == ["http://127.0.0.1:8001"]
        await registration.close()
    router.apply("long", InstanceEvent(EventKind.DELETE, instance))
    router.apply("long", InstanceEvent(EventKind.SYNCED))
    assert len(members) == 0
