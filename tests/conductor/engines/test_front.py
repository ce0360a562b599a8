"""The conductor in front of plain vLLM servers: requests, moves, health; over real sockets, with the servers faked."""

from __future__ import annotations

import asyncio
import json

import pytest

from tanghulu.conductor.engines.vllm import VllmStream
from tanghulu.errors import TanghuluError
from tanghulu.session.outputs import FinishReason
from tests.conductor.engines.fake_vllm import CONTEXT, FakeVllm, write_model
from tests.conductor.fake_worker import TEMPLATE, TOKENIZER


def expected(server: FakeVllm, prompt: list[int], num: int) -> str:
    ids = list(prompt)
    for _ in range(num):
        ids.append(server.script[len(ids) % len(server.script)])
    return TOKENIZER.decode(ids[len(prompt) :])


def text_of(answer: dict) -> str:
    return answer["choices"][0]["text"]


async def test_completion_whole_and_streamed(fronts):
    async with fronts() as front:
        await front.up()
        (server,) = front.servers
        whole = await front.complete()
        sent = server.requests[0]
        assert text_of(whole) == expected(server, sent["prompt"], 12)
        assert whole["usage"]["completion_tokens"] == 12
        assert whole["choices"][0]["finish_reason"] == "length"
        assert sent["max_tokens"] == 12
        assert "seed" not in sent
        body = {"model": "tiny", "prompt": "the rain in Spain", "max_tokens": 12, "temperature": 0, "stream": True}
        pieces = []
        async with front.cluster.http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    pieces += [choice["text"] for choice in json.loads(line[6:])["choices"]]
        assert "".join(pieces) == text_of(whole)


async def test_chat_is_rendered_here(fronts):
    async with fronts() as front:
        await front.up()
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0}
        answer = (await front.cluster.http.post("/v1/chat/completions", json=body)).json()
        (sent,) = front.servers[0].requests
        assert sent["prompt"] == front.servers[0]._tokenize({"messages": messages})
        assert answer["choices"][0]["message"]["content"] == expected(front.servers[0], sent["prompt"], 4)


async def test_every_field_of_sampling_is_sent(fronts):
    async with fronts() as front:
        await front.up()
        fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 11, "priority": 3}
        more = {"logit_bias": {"5": 2.0}, "presence_penalty": 0.5, "stop_token_ids": [9], "min_tokens": 2}
        answer = await front.complete(**fields, **more, logprobs=1)
        (sent,) = front.servers[0].requests
        assert {name: sent[name] for name in fields} == {**fields, "priority": -3}
        assert (sent["logit_bias"], sent["presence_penalty"], sent["stop_token_ids"]) == ({"5": 2.0}, 0.5, [9])
        assert (sent["min_tokens"], sent["logprobs"], sent["frequency_penalty"]) == (2, 1, 0.0)
        assert answer["choices"][0]["logprobs"]["token_logprobs"][0] == -0.5
        assert len(answer["choices"][0]["logprobs"]["top_logprobs"][0]) == 1


async def test_end_of_text_is_not_text(fronts, folder):
    server = FakeVllm(folder, "Ho<|endoftext|>")
    async with fronts(servers=[server]) as front:
        await front.up()
        answer = await front.complete()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert "<|" not in text_of(answer)


@pytest.mark.parametrize("trouble", ["die", "refuse", "health", "cut_at", "error_at", "nonsense_at", "abort_at"])
async def test_trouble_in_mid_stream_moves_the_request(fronts, trouble):
    async with fronts(2) as front:
        await front.up()
        for server in front.servers:
            server.hold()
        asking = asyncio.create_task(front.complete())
        first = second = None
        async with asyncio.timeout(30):
            while first is None:
                await asyncio.sleep(0.001)
                first = next((each for each in front.servers if each.requests), None)
            (second,) = [each for each in front.servers if each is not first]
            first.step(5)
            await front.cluster.until(lambda: front.cluster.dispatcher.flights()[0]["generated_tokens"] == 5)
        second.go()
        if trouble == "die":
            await first.die()
        elif trouble == "refuse":
            first.refuse()
        elif trouble == "health":
            first.health = 503
        else:
            setattr(first, trouble, 6 if trouble == "abort_at" else 5)
            first.step(2)
        answer = await asking
        (sent,) = first.requests
        assert text_of(answer) == expected(first, sent["prompt"], 12)
        assert answer["usage"]["completion_tokens"] == 12
        (continued,) = second.requests
        assert continued["prompt"] == sent["prompt"] + continued["prompt"][len(sent["prompt"]) :]
        assert continued["max_tokens"] == 12 - (len(continued["prompt"]) - len(sent["prompt"]))
        assert front.cluster.migrations("ongoing_request", "resumed") == 1
        labels = {"model": "tiny", "kind": "ongoing_request", "exactness": "same_model", "outcome": "resumed"}
        assert front.cluster.conductor.service.metrics.get_sample_value("tanghulu_migrations_total", labels) == 1


async def test_no_more_tokens_are_wanted_than_the_server_s_context_holds(fronts, folder):
    """vLLM refuses more; another server of the model may have a longer context, which is what clients are told."""
    servers = [FakeVllm(folder), FakeVllm(folder)]
    servers[0].context_length = 200  # holds the text by which tokenizers are compared
    async with fronts(servers=servers) as front:
        await front.up()
        for server, most in zip(servers, (200, CONTEXT), strict=True):
            asked = {"max_tokens": 220, "routing": {"worker": f"127.0.0.1:{server.port}"}}
            assert (await front.complete(**asked))["status"] == 200
            (sent,) = server.requests
            assert sent["max_tokens"] == min(220, most - len(sent["prompt"]))


async def test_client_that_leaves_ends_the_request(fronts):
    async with fronts() as front:
        await front.up()
        (server,) = front.servers
        server.hold()
        asking = asyncio.create_task(front.complete())
        await front.cluster.until(lambda: server.open_streams)
        asking.cancel()
        await front.cluster.until(lambda: not server.open_streams)


async def test_server_without_metrics_is_used(fronts, folder):
    server = FakeVllm(folder)
    server.metrics_on = False
    async with fronts(servers=[server]) as front:
        await front.up()
        server.has_details = False
        assert (await front.complete())["status"] == 200
        again = await front.complete("the rain in Spain stays mainly in the plain")
        assert again["usage"]["completion_tokens"] == 12


async def test_full_server_is_left_for_another(fronts):
    async with fronts(2) as front:
        await front.up()
        front.servers[0].status = 503
        for _ in range(4):
            assert (await front.complete())["status"] == 200


async def test_refused_request_is_the_clients(fronts):
    async with fronts() as front:
        await front.up()
        front.servers[0].status = 400
        answer = await front.complete()
        assert (answer["status"], "refused the request: no" in answer["error"]["message"]) == (400, True)


async def test_unoffered_wishes_are_named(fronts):
    async with fronts() as front:
        await front.up()
        answer = await front.complete(prompt_logprobs=1)
        assert answer["status"] == 400
        assert "plain vllm server" in answer["error"]["message"]
        assert not front.servers[0].requests


async def test_begun_grammar_fails_plainly(fronts):
    async with fronts(2) as front:
        await front.up()
        for server in front.servers:
            server.hold()
        asking = asyncio.create_task(front.complete(structured_outputs={"regex": ".*"}))
        await front.cluster.until(lambda: any(each.requests for each in front.servers))
        first = next(each for each in front.servers if each.requests)
        first.step(2)
        await front.cluster.until(lambda: front.cluster.dispatcher.flights()[0]["generated_tokens"] == 2)
        await first.die()
        answer = await asking
        assert answer["status"] >= 500
        assert "bound to a grammar" in answer["error"]["message"]


async def test_wrong_tokens_reject_the_server(fronts):
    async with fronts() as front:
        workers = front.cluster.registry.workers
        (server,) = front.servers
        await front.up()
        server.more_ids = [7]
        await server.die()
        name = f"127.0.0.1:{server.port}"
        await front.cluster.until(lambda: workers[name].session is None)
        await server.start(server.port)
        await front.cluster.until(lambda: "tokenises" in workers[name].last_error)
        assert not workers[name].usable
        assert "from token" in workers[name].last_error
        server.more_ids = []
        await front.up()


async def test_template_that_refuses_system_messages(fronts, folder):
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    write_model(folder, refusal + TEMPLATE)
    async with fronts() as front:
        await front.up()


async def test_missing_folder_names_the_option(fronts, folder):
    server = FakeVllm(folder / "elsewhere")
    async with fronts(servers=[server]) as front:
        worker = f"127.0.0.1:{server.port}"
        workers = front.cluster.registry.workers
        await front.cluster.until(lambda: worker in workers and "model=FOLDER" in workers[worker].last_error)


def test_events_that_came_together_are_one_piece():
    def event(*ids: int, reason: str | None = None) -> bytes:
        return json.dumps({"choices": [{"token_ids": ids, "finish_reason": reason}]}).encode()

    usage = json.dumps({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 8}}}).encode()
    piece = VllmStream("w").read_all([event(5), event(6, 7), event(8, reason="length"), usage])
    assert (piece.tokens, piece.finish, piece.cached_tokens) == ([5, 6, 7, 8], FinishReason.LENGTH, 8)
    with pytest.raises(TanghuluError, match="it broke"):
        VllmStream("w").read_all([event(5), b'{"error": {"message": "it broke", "code": 500}}'])
