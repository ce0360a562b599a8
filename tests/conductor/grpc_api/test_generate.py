"""Inference over gRPC: the same answers as over HTTP, errors as statuses, and calls that end early."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest

from tanghulu.conductor.grpc_api.replies import PIECE_TOKENS
from tanghulu.hashing import joined
from tanghulu.protos import inference_pb2 as pb
from tanghulu.types import Role
from tests.conductor.fake_worker import CONTEXT, EOS, TOKENIZER
from tests.conductor.grpc_api.client import add_worker, grpc_cluster, refusal, text_request, trailing, whole

TEXT = "Hello, wörld! "
IDS = TOKENIZER.encode(TEXT).ids


@pytest.fixture
async def served(tmp_path):
    async with grpc_cluster(tmp_path) as (cluster, stub):
        yield cluster, stub


async def test_a_stream_has_the_tokens_and_the_text_that_http_has(served):
    cluster, stub = served
    await cluster.add()
    prompt = pb.TokenIds(ids=[1, 2, 3, 4, 5])
    sampling = pb.SamplingOptions(max_tokens=40, seed=7, logprobs=2)
    request = pb.GenerateRequest(input_ids=prompt, sampling=sampling, request_id="mine", priority=3)
    replies = [reply async for reply in stub.Generate(request)]
    over_http = await cluster.http.post(
        "/generate",
        json={"input_ids": [1, 2, 3, 4, 5], "sampling_params": {"max_new_tokens": 40, "seed": 7}},
    )
    expected = over_http.json()
    assert [token for reply in replies for token in reply.tokens] == expected["output_ids"]
    assert "".join(reply.text for reply in replies) == expected["text"] == TEXT
    first, last = replies[0], replies[-1]
    assert (first.request_id, first.model) == ("mine", "tiny")
    assert not any(reply.request_id or reply.model or reply.finish_reason for reply in replies[1:-1])
    assert last.finish_reason == expected["meta_info"]["finish_reason"]["type"] == "stop"
    assert last.stop_token == EOS
    assert last.usage.prompt_tokens == 5
    assert last.usage.completion_tokens == expected["meta_info"]["completion_tokens"]
    shown = [position for reply in replies for position in reply.logprobs]
    assert [position.sampled.token for position in shown] == expected["output_ids"]
    assert [each.token for each in shown[0].top] == [0, 1]
    submits = cluster.workers[0].submits
    assert submits[0].sampling.seed == submits[1].sampling.seed == 7
    assert cluster.metric("grpc_requests_total", method="Generate", status="OK", model="tiny") == 1
    assert not cluster.conductor.service.calls


async def test_a_chat_is_rendered_by_the_template_and_several_answers_have_an_index_each(served):
    cluster, stub = served
    await cluster.add()
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    answers = await whole(stub.Generate(pb.GenerateRequest(chat=chat, sampling=pb.SamplingOptions(n=2, max_tokens=6))))
    assert [answer.tokens for answer in answers] == [IDS[:6]] * 2
    assert all(answer.last.finish_reason == "length" for answer in answers)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}
    await cluster.http.post("/v1/chat/completions", json=body)
    prompts = {submit.tokens for submit in cluster.workers[0].submits}
    assert len(prompts) == 1


async def test_stop_strings_end_the_text_and_are_told(served):
    cluster, stub = served
    await cluster.add()
    (answer,) = await whole(stub.Generate(text_request(max_tokens=30, stop=["wör"])))
    assert answer.text == "Hello, "
    assert (answer.last.finish_reason, answer.last.stop_text) == ("stop", "wör")


async def test_a_prompt_that_is_only_scored_is_told_as_over_http(served):
    cluster, stub = served
    await cluster.add()
    prompt = "the café"
    request = text_request(prompt, max_tokens=0, logprobs=2)
    request.echo = True
    (answer,) = await whole(stub.Generate(request))
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 0}
    (choice,) = (await cluster.http.post("/v1/completions", json=body)).json()["choices"]
    assert answer.prompt.text == choice["text"] == prompt
    assert list(answer.prompt.tokens) == TOKENIZER.encode(prompt).ids
    first, *rest = answer.prompt.logprobs
    assert first == pb.PositionLogprobs()
    assert [one.sampled.token for one in rest] == list(answer.prompt.tokens[1:])
    assert [one.sampled.logprob for one in rest] == choice["logprobs"]["token_logprobs"][1:]
    assert [[each.token for each in one.top] for one in rest] == [[0, 1]] * len(rest)
    assert rest[0].rank == 3
    assert (answer.tokens, answer.text, answer.last.finish_reason) == ([], "", "length")
    assert answer.last.usage.completion_tokens == 0
    assert cluster.workers[0].submits[0].scoring == cluster.workers[0].submits[1].scoring


async def test_a_prompt_is_told_before_its_answer(served):
    cluster, stub = served
    await cluster.add()
    request = text_request("the", n=2)
    request.echo = True
    answers = await whole(stub.Generate(request))
    assert [(each.prompt.text, each.tokens) for each in answers] == [("the", IDS[:4])] * 2
    assert not any(each.prompt.logprobs for each in answers)
    assert cluster.workers[0].submits[0].scoring is None


async def test_a_long_prompt_comes_in_pieces(served):
    cluster, stub = served
    await cluster.add()
    prompt = "é1" * 150
    request = text_request(prompt)
    request.echo, request.prompt_logprobs = True, 0
    (answer,) = await whole(stub.Generate(request))
    ids = TOKENIZER.encode(prompt).ids
    assert answer.prompt.text == prompt
    assert list(answer.prompt.tokens) == ids
    assert [one.sampled.token for one in answer.prompt.logprobs[1:]] == ids[1:]
    assert answer.num_pieces == -(-len(ids) // PIECE_TOKENS) > 1
    assert answer.tokens == IDS[:4]


async def test_the_prompt_of_a_chat_is_scored_too(served):
    cluster, stub = served
    await cluster.add()
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    (answer,) = await whole(stub.Generate(pb.GenerateRequest(chat=chat, prompt_logprobs=1)))
    body = {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 1}
    shown = (await cluster.http.post("/v1/chat/completions", json=body)).json()["prompt_logprobs"]
    for one, entry in zip(answer.prompt.logprobs[1:], shown[1:], strict=True):
        own = entry[str(one.sampled.token)]
        assert (one.sampled.logprob, one.rank) == (own["logprob"], own["rank"])
        assert [each.logprob for each in one.top] == [entry[str(one.top[0].token)]["logprob"]]
    assert not answer.prompt.text


async def test_several_prompts_in_one_call(served):
    cluster, stub = served
    await cluster.add()
    sampling = pb.SamplingOptions(max_tokens=4, n=2, seed=5)
    texts = ["the", "café"]
    for request in (
        pb.GenerateRequest(texts=pb.Texts(texts=texts), sampling=sampling, echo=True, request_id="mine"),
        pb.GenerateRequest(
            input_id_lists=pb.TokenIdLists(lists=[pb.TokenIds(ids=TOKENIZER.encode(text).ids) for text in texts]),
            sampling=sampling,
            echo=True,
        ),
    ):
        answers = await whole(stub.Generate(request))
        assert [answer.prompt.text for answer in answers] == ["the", "the", "café", "café"]
        assert [answer.tokens for answer in answers] == [IDS[:4]] * 4
        assert all(answer.last.usage.completion_tokens == 4 for answer in answers)
    assert sorted(submit.sampling.seed for submit in cluster.workers[0].submits[:4]) == [5, 5, 6, 6]
    assert not cluster.conductor.service.calls


async def test_tools_are_called(tmp_path):
    async with grpc_cluster(tmp_path, tool_call_parser="hermes") as (cluster, stub):
        script = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
        await add_worker(cluster, "one", script, context_length=8192)
        tool = pb.ChatTool(name="look", parameters='{"type": "object", "properties": {"at": {"type": "string"}}}')
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")], tools=[tool])
        (answer,) = await whole(stub.Generate(pb.GenerateRequest(chat=chat)))
        assert answer.tool_calls == [("look", '{"at": "sky"}')]
        assert answer.last.finish_reason == "tool_calls"
        assert not answer.text


async def test_all_that_can_be_sampled_by_reaches_the_worker(served):
    cluster, stub = served
    await cluster.add()
    sampling = pb.SamplingOptions(
        max_tokens=3, min_tokens=1, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, frequency_penalty=0.25,
        presence_penalty=0.75, repetition_penalty=1.5, seed=9, logit_bias={3: 1.5}, stop_token_ids=[9],
        ignore_eos=True, skip_special_tokens=False, include_stop_str_in_output=True, json_schema='{"type": "object"}',
    )  # fmt: skip
    (answer,) = await whole(stub.Generate(pb.GenerateRequest(text="x", sampling=sampling, cache_salt="s", user="u")))
    assert answer.last.finish_reason == "length"
    (submit,) = cluster.workers[0].submits
    got = submit.sampling
    assert (got.temperature, got.top_k, got.seed) == (0.5, 5, 9)
    assert json.loads(got.json_schema)["type"] == "object"
    assert dict(got.logit_bias) == {3: 1.5}
    assert (submit.stop.max_new_tokens, submit.stop.min_tokens, submit.stop.ignore_eos) == (3, 1, True)
    assert list(submit.stop.stop_token_ids) == [9]
    assert submit.salt == joined(b"s", b"")


BAD = [
    (pb.GenerateRequest(), "INVALID_ARGUMENT", "give one of text, texts, input_ids, input_id_lists, chat"),
    (pb.GenerateRequest(texts=pb.Texts()), "INVALID_ARGUMENT", "the list of prompts is empty"),
    (pb.GenerateRequest(input_id_lists=pb.TokenIdLists(lists=[pb.TokenIds()])), "INVALID_ARGUMENT", "prompt"),
    (
        pb.GenerateRequest(texts=pb.Texts(texts=["x"] * 65), sampling=pb.SamplingOptions(n=2)),
        "INVALID_ARGUMENT",
        "at most 128 sequences",
    ),
    (pb.GenerateRequest(text="x", prompt_logprobs=21), "INVALID_ARGUMENT", "prompt_logprobs"),
    (
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")]), echo=True),
        "INVALID_ARGUMENT",
        "echo does not work with a chat",
    ),
    (text_request(temperature=-1), "INVALID_ARGUMENT", "temperature"),
    (text_request(n=17), "INVALID_ARGUMENT", "n:"),
    (text_request(stop=[""]), "INVALID_ARGUMENT", "stop"),
    (text_request(json_schema="{}", logprobs=21), "INVALID_ARGUMENT", "logprobs"),
    (pb.GenerateRequest(input_ids=pb.TokenIds(ids=[100_000])), "INVALID_ARGUMENT", "outside the vocabulary"),
    (pb.GenerateRequest(input_ids=pb.TokenIds(ids=[1] * CONTEXT)), "INVALID_ARGUMENT", "context length"),
    (pb.GenerateRequest(text="x", model="nosuch"), "NOT_FOUND", "nosuch"),
    (pb.GenerateRequest(chat=pb.Chat()), "INVALID_ARGUMENT", "messages"),
    (
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user")], chat_template_kwargs="[1]")),
        "INVALID_ARGUMENT",
        "chat_template_kwargs",
    ),
    (pb.GenerateRequest(text="x", routing=pb.RoutingOptions(policy="nosuch")), "INVALID_ARGUMENT", "policy"),
]


async def test_bad_requests_are_refused_by_their_field(served):
    cluster, stub = served
    await cluster.add()
    for request, status, named in BAD:
        error = await refusal(stub.Generate(request))
        assert error.code().name == status, (request, error)
        assert named in error.details(), error
        assert trailing(error)["tanghulu-error"]
    assert not cluster.workers[0].submits


async def test_who_is_refused_for_the_load_is_told_when_to_come_back(tmp_path):
    async with grpc_cluster(tmp_path, max_in_flight=1, max_queued=1) as (cluster, stub):
        worker = await cluster.add()
        worker.hold()
        under_way = [stub.Generate(text_request()) for _ in range(2)]
        reading = [asyncio.create_task(whole(call)) for call in under_way]
        await cluster.until(lambda: cluster.dispatcher.num_requests == 2)
        error = await refusal(stub.Generate(text_request()))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert trailing(error)["tanghulu-error"] == "OVERLOADED"
        assert int(trailing(error)["retry-after"]) >= 1
        worker.release()
        await asyncio.gather(*reading)


async def test_who_cancels_ends_the_request_at_the_worker(served):
    cluster, stub = served
    worker = await cluster.add()
    worker.hold()
    call = stub.Generate(text_request(max_tokens=30))
    reader = aiter(call)
    worker_has_it = asyncio.create_task(worker.until(lambda: worker.num_running))
    first = asyncio.create_task(anext(reader))
    await worker_has_it
    worker.step()
    assert len((await first).tokens) == 1
    call.cancel()
    await worker.until(lambda: worker.aborts and not worker.num_running)
    await cluster.until(lambda: not cluster.conductor.service.calls and not cluster.dispatcher.num_requests)
    await cluster.until(
        lambda: cluster.metric("grpc_requests_total", method="Generate", status="CANCELLED", model="tiny") == 1
    )


async def test_a_deadline_ends_the_request_at_the_worker(served):
    cluster, stub = served
    worker = await cluster.add()
    worker.hold()
    error = await refusal(stub.Generate(text_request(), timeout=0.3))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await worker.until(lambda: worker.aborts and not worker.num_running)
    await cluster.until(lambda: not cluster.conductor.service.calls)


async def test_abort_by_name_ends_the_stream_in_order(served):
    cluster, stub = served
    worker = await cluster.add()
    worker.hold()
    request = text_request()
    request.request_id = "mine"
    reading = asyncio.create_task(whole(stub.Generate(request)))
    await worker.until(lambda: worker.num_running)
    assert (await stub.Abort(pb.AbortRequest(request_id="other"))).num_aborted == 0
    again = await refusal(stub.Generate(request))
    assert again.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "in use" in again.details()
    assert (await stub.Abort(pb.AbortRequest(request_id="mine"))).num_aborted == 1
    (answer,) = await reading
    assert answer.last.finish_reason == "abort"


async def test_a_stream_goes_on_when_its_worker_dies(served):
    cluster, stub = served
    workers = [await cluster.add(), await cluster.add()]
    for worker in workers:
        worker.hold()
    reading = asyncio.create_task(whole(stub.Generate(text_request(max_tokens=30))))
    await cluster.until(lambda: any(worker.submits for worker in workers))
    for worker in workers:
        worker.die_after_tokens = 5 if worker.submits else None
        worker.release()
    (answer,) = await reading
    assert answer.tokens == [*IDS, EOS]
    assert answer.text == TEXT
    assert all(worker.submits for worker in workers)


async def test_two_models_have_a_name_each(served):
    cluster, stub = served
    await add_worker(cluster, "first", "one")
    second = await add_worker(cluster, "second", "two", model="other", fingerprint=bytes(16))
    names = {model.name for model in (await stub.ListModels(pb.ListModelsRequest())).models}
    assert names == {"tiny", "other"}
    for name, text in (("tiny", "one"), ("other", "two")):
        request = text_request(max_tokens=9)
        request.model = name
        (answer,) = await whole(stub.Generate(request))
        assert answer.text == text
    assert len(second.submits) == 1


async def test_texts_and_chats_are_tokenised_as_over_http(served):
    cluster, stub = served
    await cluster.add(Role.BOTH)
    reply = await stub.Tokenize(pb.TokenizeRequest(text=TEXT))
    assert list(reply.tokens) == IDS
    assert reply.max_model_len == CONTEXT
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")], add_generation_prompt=False)
    reply = await stub.Tokenize(pb.TokenizeRequest(chat=chat))
    body = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}
    assert list(reply.tokens) == (await cluster.http.post("/tokenize", json=body)).json()["tokens"]
    with pytest.raises(grpc.aio.AioRpcError, match="give text or chat"):
        await stub.Tokenize(pb.TokenizeRequest())


async def test_a_call_is_found_by_its_ids_in_the_stories(served):
    cluster, stub = served
    await cluster.add()
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    call = stub.Generate(text_request(), metadata=(("x-request-id", "abc"), ("traceparent", trace)))
    metadata = dict(await call.initial_metadata())
    await whole(call)
    assert metadata["x-request-id"] == "abc"
    assert metadata["traceresponse"].startswith("00-0af7651916cd43dd8448eb211c80319c-")
    stories = (await cluster.http.get("/debug/requests/abc")).json()["requests"]
    assert len(stories) == 1
