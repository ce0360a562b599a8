"""Real clients against the real thing."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.e2e.cluster import eventually

MODEL = "smollm2"


@pytest.fixture(scope="module")
def client(cluster):
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        yield client


def _ask(client, **more):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    return client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=16, **more)


def test_chat_makes_sense(client):
    answer = _ask(client)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_is_the_same_text_with_usage_at_its_end(client):
    whole = _ask(client)
    chunks = list(_ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


def test_completions_with_a_list_of_prompts(client):
    prompts = ["The capital of France is", "Two and two make"]
    answer = client.completions.create(model=MODEL, prompt=prompts, max_tokens=5, temperature=0)
    assert [c.index for c in answer.choices] == [0, 1]
    alone = [client.completions.create(model=MODEL, prompt=p, max_tokens=5, temperature=0) for p in prompts]
    assert [c.text for c in answer.choices] == [a.choices[0].text for a in alone]
    stream = client.completions.create(model=MODEL, prompt=prompts[0], max_tokens=5, temperature=0, stream=True)
    assert "".join(c.choices[0].text for c in stream) == alone[0].choices[0].text


def test_stop_ends_the_text_before_the_stop_string(client):
    whole = client.completions.create(model=MODEL, prompt="Count: one, two, three,", max_tokens=20, temperature=0)
    text = whole.choices[0].text
    stop = text[4:8]
    cut = client.completions.create(
        model=MODEL, prompt="Count: one, two, three,", max_tokens=20, temperature=0, stop=[stop]
    )
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_a_seed_gives_the_same_text_alone_and_in_company(client):
    def sample(seed):
        answer = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=12, seed=seed)
        return answer.choices[0].text

    alone = [sample(seed) for seed in range(6)]
    assert len(set(alone)) > 1
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(sample, range(6))) == alone


def test_sixteen_at_once_all_finish(client):
    with ThreadPoolExecutor(16) as pool:
        answers = list(
            pool.map(
                lambda i: client.completions.create(
                    model=MODEL,
                    prompt=f"Fact number {i}: " * (1 + 3 * i),
                    max_tokens=24,
                    extra_body={"ignore_eos": True},
                ),
                range(16),
            )
        )
    assert [a.usage.completion_tokens for a in answers] == [24] * 16


def test_a_schema_is_kept_to_also_behind_the_hand_over(client):
    pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'tanghulu[worker]'")
    properties = {"city": {"enum": ["Paris", "Rome"]}, "number": {"type": "integer", "minimum": 0, "maximum": 9}}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    messages = [{"role": "user", "content": "What is the capital of France? Answer in JSON."}]
    for temperature in (0, 1.5):
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, temperature=temperature, max_tokens=60, response_format=wanted, seed=3
        )
        assert answer.choices[0].finish_reason == "stop"
        found = json.loads(answer.choices[0].message.content)
        assert found["city"] in ("Paris", "Rome")
        assert 0 <= found["number"] <= 9
    with pytest.raises(openai.BadRequestError, match="regex"):
        _ask(client, extra_body={"regex": "[a"})


CITY = {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"}
PARAMETERS = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}},
    {"type": "function", "function": {"name": "get_capital", "parameters": {"type": "object", "properties": {}}}},
]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "get_capital"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
    ],
)
def test_a_tool_call_that_is_wanted_comes(client, choice, names):
    pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'tanghulu[worker]'")
    messages = [{"role": "user", "content": "How is the weather in Rome?"}]
    ask = {"model": MODEL, "messages": messages, "tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
    for temperature in (0, 1.5):
        answer = client.chat.completions.create(**ask, parallel_tool_calls=False, temperature=temperature, seed=5)
        assert answer.choices[0].finish_reason == "tool_calls"
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name in names
        arguments = json.loads(call.function.arguments)
        if call.function.name == "get_weather":
            assert arguments["city"].isalpha()
    stream = client.chat.completions.create(**ask, parallel_tool_calls=False, temperature=1.5, seed=5, stream=True)
    pieces = [piece for chunk in stream for piece in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments


class City(BaseModel):
    """A city and its country; nothing says that there may be no more."""

    name: Literal["Rome", "Paris"]
    country: Literal["Italy", "France"]


CITY_TOOL = {"type": "function", "function": {"name": "show_city", "parameters": City.model_json_schema()}}
ABOUT_ROME = [{"role": "user", "content": "Which country is Rome in? Show it."}]


@pytest.mark.slow
def test_langchain_s_tools_and_structured_answers(cluster):
    pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'tanghulu[worker]'")
    langchain = pytest.importorskip("langchain_openai", reason="extra: langchain-openai is not installed")
    with httpx.Client(trust_env=False) as http:
        chat = langchain.ChatOpenAI(
            model=MODEL,
            base_url=f"{cluster.url}/v1",
            api_key="unused",
            max_retries=0,
            temperature=0,
            max_tokens=120,
            http_client=http,
        )
        answer = chat.bind_tools([CITY_TOOL], tool_choice="any", parallel_tool_calls=False).invoke(ABOUT_ROME)
        (call,) = answer.tool_calls
        assert call["name"] == "show_city"
        assert City.model_validate(call["args"]).model_dump() == call["args"], "no argument is invented"
        result = {"role": "tool", "tool_call_id": call["id"], "content": "shown"}
        assert chat.invoke([*ABOUT_ROME, answer, result], max_tokens=8).text
        assert isinstance(chat.with_structured_output(City).invoke(ABOUT_ROME), City)


@pytest.mark.slow
def test_litellm_s_tools(cluster, monkeypatch):
    pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'tanghulu[worker]'")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    litellm = pytest.importorskip("litellm", reason="extra: litellm is not installed")
    ask = {"model": f"openai/{MODEL}", "api_base": f"{cluster.url}/v1", "api_key": "unused", "messages": ABOUT_ROME}
    ask |= {"tools": [CITY_TOOL], "tool_choice": "required", "temperature": 0, "max_tokens": 120}
    ask |= {"parallel_tool_calls": False, "max_retries": 0}
    (choice,) = litellm.stream_chunk_builder(list(litellm.completion(**ask, stream=True))).choices
    assert choice.finish_reason == "tool_calls"
    arguments = json.loads(choice.message.tool_calls[0].function.arguments)
    assert City.model_validate(arguments).model_dump() == arguments, "no argument is invented"


@pytest.mark.slow
def test_anthropics_messages(client, cluster):
    """The same answer as by chat, its stream, a call that is wanted, and the counts of a prompt that is cached."""
    pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'tanghulu[worker]'")
    anthropic = pytest.importorskip("anthropic", reason="extra: anthropic is not installed")
    tool = {"name": "show_city", "input_schema": City.model_json_schema()}
    ask = {"model": MODEL, "max_tokens": 16, "extra_body": {"temperature": 0}}
    ask |= {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    http = anthropic.DefaultHttpxClient(trust_env=False)
    with anthropic.Anthropic(base_url=cluster.url, api_key="unused", max_retries=0, http_client=http) as claude:
        whole = claude.messages.create(**ask)
        assert whole.content[0].text == _ask(client).choices[0].message.content
        with claude.messages.stream(**ask) as stream:
            streamed = stream.get_final_message()
        assert (streamed.content[0].text, streamed.stop_reason) == (whole.content[0].text, whole.stop_reason)
        about = {**ask, "messages": ABOUT_ROME, "max_tokens": 120, "system": "Answer by a tool. " * 30}
        forced = {"tools": [tool], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
        made = claude.messages.create(**about, **forced)
        (call,) = made.content
        assert (made.stop_reason, call.name) == ("tool_use", "show_city")
        assert City.model_validate(call.input).model_dump() == call.input
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "shown"}
        turns = [{"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
        then = claude.messages.create(**{**about, "messages": [*ABOUT_ROME, *turns], "tools": [tool], "max_tokens": 8})
        assert then.usage.cache_read_input_tokens >= 64
        counted = claude.messages.count_tokens(
            model=MODEL, system=about["system"], messages=[*ABOUT_ROME, *turns], tools=[tool]
        )
        assert counted.input_tokens == then.usage.input_tokens + then.usage.cache_read_input_tokens


def test_errors_are_typed(client, cluster):
    with pytest.raises(openai.NotFoundError, match="nosuch"):
        client.completions.create(model="nosuch", prompt="x")
    with pytest.raises(openai.BadRequestError, match="context") as caught:
        client.completions.create(model=MODEL, prompt=[1] * 100_000)
    assert caught.value.code == "context_length_exceeded"
    response = cluster.http.post(f"{cluster.url}/v1/completions", content=b"{oops")
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "code", "param"}


def test_hanging_up_frees_the_blocks(client, cluster):
    def in_use():
        return sum(cluster.metric(role, "tanghulu_worker_blocks_in_use") for role in ("prefill", "decode"))

    eventually(lambda: in_use() == 0, what="idle")
    body = {
        "model": MODEL,
        "prompt": "A very long story: " * 40,
        "max_tokens": 2000,
        "stream": True,
        "ignore_eos": True,
    }
    with cluster.http.stream("POST", f"{cluster.url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        assert in_use() > 0
    eventually(lambda: in_use() == 0, what="blocks are free after the client hung up")
