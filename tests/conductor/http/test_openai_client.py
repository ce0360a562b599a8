"""The openai package against the real HTTP server."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.conductor.fake_worker import TOKENIZER

TEXT = "Hello, wörld! "
IDS = TOKENIZER.encode(TEXT).ids
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]


@pytest.fixture
async def client(cluster):
    await cluster.add()
    http = httpx.AsyncClient(trust_env=False)
    url = f"http://{cluster.conductor.address}/v1"
    async with openai.AsyncOpenAI(
        base_url=url, api_key="unused", max_retries=0, timeout=60, http_client=http
    ) as client:
        yield client


async def test_chat(client):
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(IDS) + 1
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.id.startswith("chatcmpl-")
    short = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=3, n=2)
    assert [c.finish_reason for c in short.choices] == ["length"] * 2


async def test_chat_stream(client):
    options = {"include_usage": True}
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, stream_options=options)
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == len(IDS) + 1
    assert len({c.id for c in chunks}) == 1


async def test_completions(client):
    answer = await client.completions.create(model="tiny", prompt=["a", "bc"], max_tokens=5)
    assert [c.text for c in answer.choices] == [TOKENIZER.decode(IDS[:5])] * 2
    assert answer.usage.prompt_tokens == 3
    stream = await client.completions.create(model="tiny", prompt="a", max_tokens=5, stream=True)
    assert "".join([c.choices[0].text async for c in stream]) == TOKENIZER.decode(IDS[:5])


async def test_stop(client):
    answer = await client.completions.create(model="tiny", prompt="a", max_tokens=50, stop=["lo, w"])
    assert answer.choices[0].text == "Hel"
    assert answer.choices[0].finish_reason == "stop"
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stop="wör", stream=True)
    assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "Hello, "


async def test_logprobs(client):
    answer = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=2, logprobs=True, top_logprobs=3
    )
    assert [c.token for c in answer.choices[0].logprobs.content] == ["H", "e"]
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 3


async def test_errors(client):
    with pytest.raises(openai.NotFoundError, match="nosuch") as missing:
        await client.completions.create(model="nosuch", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="context") as too_long:
        await client.completions.create(model="tiny", prompt=[1] * 2000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.chat.completions.create(model="tiny", messages=MESSAGES, temperature="hot")
    assert wrong.value.param == "temperature"


async def test_models(client):
    assert [m.id async for m in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "tanghulu"
