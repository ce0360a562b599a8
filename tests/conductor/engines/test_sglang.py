"""The conductor in front of plain SGLang servers, faked by the facts of 0.5.23."""

from __future__ import annotations

import asyncio

import pytest

from tanghulu.conductor.engines.dialect import LEAST_LOGPROB, EngineCall
from tanghulu.conductor.engines.sglang import SglangDialect, SglangStream
from tanghulu.conductor.routing.requests import GenerationRequest
from tanghulu.errors import InvalidRequest, NodeUnavailable
from tanghulu.hashing import as_tokens
from tanghulu.session.sampling import Sampling, StopRule
from tanghulu.types import RequestId
from tests.conductor.engines.fake_sglang import FakeSglang
from tests.conductor.engines.test_front import expected, text_of


@pytest.mark.parametrize("incremental", [False, True])
async def test_both_kinds_of_streams(fronts, folder, incremental):
    async with fronts(servers=[FakeSglang(folder, incremental=incremental)]) as front:
        await front.up()
        answer = await front.complete(priority=2, logprobs=1, seed=5)
        (sent,) = front.servers[0].requests
        assert text_of(answer) == expected(front.servers[0], sent["input_ids"], 12)
        assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == 12
        params = sent["sampling_params"]
        assert (params["max_new_tokens"], params["top_k"], params["sampling_seed"]) == (12, -1, 5)
        assert sent["priority"] == 2
        again = await front.complete()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        front.servers[0].logprob = None
        answer = await front.complete(logprobs=1)
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == [LEAST_LOGPROB] * 12


@pytest.mark.parametrize("trouble", ["die", "abort"])
async def test_lost_server(fronts, folder, trouble):
    async with fronts(servers=[FakeSglang(folder), FakeSglang(folder)]) as front:
        await front.up()
        for each in front.servers:
            each.hold()
        asking = asyncio.create_task(front.complete())
        await front.cluster.until(lambda: any(each.requests for each in front.servers))
        first, second = sorted(front.servers, key=lambda each: not each.requests)
        first.step(3)
        await front.cluster.until(lambda: front.cluster.dispatcher.flights()[0]["generated_tokens"] == 3)
        second.go()
        if trouble == "die":
            await first.die()
        else:
            first.abort_at = 4
            first.step()
        answer = await asking
        assert text_of(answer) == expected(first, first.requests[0]["input_ids"], 12)


async def test_draining_server_keeps_what_it_has(fronts, folder):
    async with fronts(servers=[FakeSglang(folder)]) as front:
        await front.up()
        (server,) = front.servers
        server.hold()
        asking = asyncio.create_task(front.complete())
        await front.cluster.until(lambda: server.open_streams)
        server.health = 503
        server.go()
        assert (await asking)["status"] == 200


def test_lark_is_refused():
    prompt = as_tokens([1, 2])
    request = GenerationRequest(RequestId("r"), "m", prompt, Sampling(lark='start: "a"'), StopRule(5))
    with pytest.raises(InvalidRequest, match="Lark"):
        SglangDialect().body(EngineCall(request, "r.1", prompt, 0, "", "m"))


def test_lost_tokens_are_noticed():
    with pytest.raises(NodeUnavailable, match="left out tokens"):
        SglangStream("s").read_all([b'{"output_ids": [5], "meta_info": {"completion_tokens": 2}}'])
