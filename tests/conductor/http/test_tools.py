"""Tools, tool choices and reasoning in chats, with the openai package against the real HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import AddedToken, Tokenizer

from tanghulu.types import Role
from tests.conductor.cluster import Cluster, running_cluster
from tests.conductor.fake_worker import TOKENIZER, FakeWorker
from tests.conductor.text.test_templates import TEMPLATES

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "$defs": {"City": {"type": "string"}},
}
FUNCTION = {"name": "get_weather", "description": "The weather of a city", "parameters": PARAMETERS}
TOOL: Any = {"type": "function", "function": FUNCTION}
OTHER: Any = {"type": "function", "function": {"name": "get_time"}}
ASK: Any = [{"role": "user", "content": "How is the weather in Köln?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
CONTEXT = 8192


def _template(name: str) -> str:
    return next(path for path in TEMPLATES if path.stem == name).read_text()


@contextlib.asynccontextmanager
async def _served(
    run_dir: Path, script: str, template: str = "", tokenizer: Tokenizer = TOKENIZER, **options: object
) -> AsyncIterator[tuple[openai.AsyncOpenAI, Cluster]]:
    """A client of a cluster whose worker says ``script``."""
    async with running_cluster(run_dir, **options) as cluster:
        await _add(cluster, script, template, tokenizer)
        async with (
            httpx.AsyncClient(trust_env=False) as http,
            openai.AsyncOpenAI(
                base_url=f"http://{cluster.conductor.address}/v1",
                api_key="x",
                max_retries=0,
                timeout=60,
                http_client=http,
            ) as client,
        ):
            yield client, cluster


async def _add(cluster: Cluster, script: str, template: str = "", tokenizer: Tokenizer = TOKENIZER) -> FakeWorker:
    worker = FakeWorker(f"both-{len(cluster.workers)}", Role.BOTH, cluster.run_dir)
    worker.script = tokenizer.encode(script).ids
    worker.card = {
        "context_length": CONTEXT,
        "vocab_size": tokenizer.get_vocab_size(),
        "tokenizer_json_zlib": zlib.compress(tokenizer.to_str().encode()),
        "chat_template": template or _template("qwen2.5"),
    }
    cluster.workers.append(worker)
    await worker.start(cluster.discovery)
    await cluster.until(lambda: worker.id in cluster.registry.workers and cluster.registry.workers[worker.id].usable)
    return worker


def _prompt(cluster: Cluster) -> str:
    """The last prompt that a worker was given."""
    submit = cluster.workers[0].submits[-1]
    tokens = memoryview(submit.tokens).cast("I").tolist()
    return TOKENIZER.decode(tokens[: submit.num_prompt_tokens], skip_special_tokens=False)


async def _joined(stream: Any) -> dict[int, dict[str, Any]]:
    """What a client puts together from a stream's deltas, by choice."""
    choices: dict[int, dict[str, Any]] = {}
    async for chunk in stream:
        for choice in chunk.choices:
            out = choices.setdefault(
                choice.index, {"content": "", "reasoning": "", "calls": [], "logprobs": [], "finish": None}
            )
            out["content"] += choice.delta.content or ""
            out["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                if call.id is not None:
                    assert call.index == len(out["calls"])
                    assert (call.type, call.function.arguments) == ("function", "")
                    out["calls"].append([call.function.name, ""])
                else:
                    out["calls"][call.index][1] += call.function.arguments
            if choice.logprobs is not None:
                out["logprobs"] += choice.logprobs.content
            out["finish"] = choice.finish_reason or out["finish"]
    return choices


class TestAuto:
    async def test_a_call_with_content_in_front(self, tmp_path):
        async with _served(tmp_path, f"Let me look.\n{CALL}") as (client, cluster):
            answer = await client.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL, OTHER])
            choice = answer.choices[0]
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "Let me look."
            assert [(c.type, c.function.name) for c in choice.message.tool_calls] == [("function", "get_weather")]
            assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Köln"}
            assert answer.usage.completion_tokens == len(cluster.workers[0].script) + 1
            assert '"name": "get_weather"' in _prompt(cluster)

    async def test_two_calls_and_no_content_streamed(self, tmp_path):
        async with _served(tmp_path, f"{CALL}\n{CALL}") as (client, _):
            stream = await client.chat.completions.create(
                model="tiny", messages=ASK, tools=[TOOL], stream=True, stream_options={"include_usage": True}
            )
            out = (await _joined(stream))[0]
            assert out["calls"] == [["get_weather", '{"city": "Köln"}']] * 2
            assert (out["content"], out["finish"]) == ("", "tool_calls")
            whole = await client.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL])
            assert whole.choices[0].message.content is None
            assert len({call.id for call in whole.choices[0].message.tool_calls}) == 2
            one = await client.chat.completions.create(
                model="tiny", messages=ASK, tools=[TOOL], parallel_tool_calls=False
            )
            assert len(one.choices[0].message.tool_calls) == 1
        many = tmp_path / "many"
        many.mkdir()
        async with _served(many, '<tool_call>{"name": "f"}</tool_call>' * 20) as (client, _):
            answer = await client.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL])
            assert len(answer.choices[0].message.tool_calls) == 20

    async def test_each_chunk_has_the_usage_so_far_where_that_is_wanted(self, tmp_path):
        options = {"include_usage": True, "continuous_usage_stats": True}
        async with _served(tmp_path, f"Hm. {CALL}") as (client, _):
            stream = await client.chat.completions.create(
                model="tiny", messages=ASK, tools=[TOOL], stream=True, stream_options=options
            )
            counts = [chunk.usage.completion_tokens async for chunk in stream]
            assert counts == sorted(counts)
            assert counts[-1] > counts[0]

    async def test_the_client_s_own_accumulation(self, tmp_path):
        async with _served(tmp_path, CALL) as (client, _):
            async with client.chat.completions.stream(model="tiny", messages=ASK, tools=[TOOL]) as stream:
                done = [event async for event in stream if event.type == "tool_calls.function.arguments.done"]
                message = (await stream.get_final_completion()).choices[0].message
            assert [event.name for event in done] == ["get_weather"]
            assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Köln"}

    async def test_several_choices_with_logprobs(self, tmp_path):
        async with _served(tmp_path, f"Hm. {CALL}") as (client, cluster):
            ask = {"model": "tiny", "messages": ASK, "tools": [TOOL], "n": 2, "logprobs": True, "top_logprobs": 2}
            answer = await client.chat.completions.create(**ask)
            count = len(cluster.workers[0].script) + 1
            assert [len(c.logprobs.content) for c in answer.choices] == [count] * 2
            assert len({c.message.tool_calls[0].id for c in answer.choices}) == 2
            choices = await _joined(await client.chat.completions.create(**ask, stream=True))
            for choice in choices.values():
                assert choice["calls"] == [["get_weather", '{"city": "Köln"}']]
                assert [entry.token for entry in choice["logprobs"]] == [
                    entry.token for entry in answer.choices[0].logprobs.content
                ]

    async def test_what_is_no_call_is_content(self, tmp_path):
        text = 'Use <tool_call>{"oh": </tool_call> so'
        async with _served(tmp_path, text) as (client, _):
            answer = await client.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL])
            assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "stop")
            assert answer.choices[0].message.tool_calls is None

    async def test_a_call_that_is_cut_off_ends_by_length(self, tmp_path):
        async with _served(tmp_path, CALL) as (client, _):
            answer = await client.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL], max_tokens=60)
            assert answer.choices[0].finish_reason == "length"
            arguments = answer.choices[0].message.tool_calls[0].function.arguments
            assert '{"city": "Köln"}'.startswith(arguments)

    async def test_none_shows_no_tools_and_reads_no_calls(self, tmp_path):
        async with _served(tmp_path, CALL) as (client, cluster):
            answer = await client.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL], tool_choice="none")
            assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (CALL, "stop")
            assert "get_weather" not in _prompt(cluster)
            plain = await client.chat.completions.create(model="tiny", messages=ASK)
            assert plain.choices[0].message.content == CALL

    async def test_a_turn_with_calls_and_results_comes_back(self, tmp_path):
        async with _served(tmp_path, CALL) as (client, cluster):
            first = await client.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL])
            message = first.choices[0].message
            messages = [*ASK, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}]
            await client.chat.completions.create(
                model="tiny",
                messages=messages,
                tools=[TOOL],
                extra_body={"chat_template_kwargs": {"enable_thinking": False}},
            )
            assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}' in _prompt(cluster)
            assert "<tool_response>\nsunny\n</tool_response>" in _prompt(cluster)

    @pytest.mark.parametrize("name", ["smollm2", "phi_3.5_mini"])
    async def test_a_template_that_knows_no_tools(self, tmp_path, name):
        async with _served(tmp_path, CALL, _template(name)) as (client, cluster):
            first = await client.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL])
            message = first.choices[0].message
            assert message.tool_calls[0].function.name == "get_weather"
            assert "<tools>" in _prompt(cluster)
            messages = [*ASK, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}]
            await client.chat.completions.create(model="tiny", messages=messages)
            assert "<tool_response>\nsunny\n</tool_response>" in _prompt(cluster)

    async def test_markers_that_are_special_tokens(self, tmp_path):
        tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
        tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True), AddedToken("[X]", special=True)])
        script = '[X]Hm.[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Köln"}}]'
        template = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}[TOOL_CALLS]"
        async with _served(tmp_path, script, template, tokenizer) as (client, _):
            answer = await client.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL])
            message = answer.choices[0].message
            assert message.content == "Hm."
            assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Köln"}
            assert len(message.tool_calls[0].id) == 9
            plain = await client.chat.completions.create(model="tiny", messages=ASK)
            assert "[TOOL_CALLS]" not in plain.choices[0].message.content

    async def test_the_parser_can_be_named(self, tmp_path):
        script = '[get_weather(city="Köln")]'
        async with _served(tmp_path, script, tool_call_parser="pythonic") as (client, _):
            answer = await client.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL])
            assert answer.choices[0].message.tool_calls[0].function.arguments == '{"city": "Köln"}'
        async with _served(tmp_path, CALL, tool_call_parser="none") as (client, _):
            answer = await client.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL])
            assert answer.choices[0].message.content == CALL

    async def test_a_call_goes_on_at_another_worker(self, tmp_path):
        async with _served(tmp_path, CALL) as (client, cluster):
            first = cluster.workers[0]
            first.die_after_tokens = 60
            stream = await client.chat.completions.create(
                model="tiny", messages=ASK, tools=[TOOL], stream=True, temperature=0
            )
            joined = asyncio.create_task(_joined(stream))
            await first.until(lambda: first.num_emitted >= 60)
            second = await _add(cluster, CALL)
            assert (await joined)[0]["calls"] == [["get_weather", '{"city": "Köln"}']]
            assert second.num_emitted > 0


class TestForced:
    async def test_required_asks_for_a_list_of_calls(self, tmp_path):
        script = '[{"name": "get_time", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "x"}}]'
        async with _served(tmp_path, script) as (client, cluster):
            ask = {"model": "tiny", "messages": ASK, "tools": [TOOL, OTHER], "tool_choice": "required"}
            answer = await client.chat.completions.create(**ask)
            assert [c.function.name for c in answer.choices[0].message.tool_calls] == ["get_time", "get_weather"]
            assert answer.choices[0].finish_reason == "tool_calls"
            schema = json.loads(cluster.workers[0].submits[-1].sampling.json_schema)
            assert schema["minItems"] == 1
            assert [call["properties"]["name"] for call in schema["items"]["anyOf"]] == [
                {"const": "get_weather"},
                {"const": "get_time"},
            ]
            assert schema["$defs"]["t0"]["properties"]["city"] == {"$ref": "#/$defs/t0/$defs/City"}
            out = (await _joined(await client.chat.completions.create(**ask, stream=True)))[0]
            assert out["calls"] == [["get_time", "{}"], ["get_weather", '{"city": "x"}']]
            await client.chat.completions.create(**ask, parallel_tool_calls=False)
            assert json.loads(cluster.workers[0].submits[-1].sampling.json_schema)["maxItems"] == 1

    async def test_a_named_function_asks_for_its_arguments(self, tmp_path):
        choice: Any = {"type": "function", "function": {"name": "get_weather"}}
        async with _served(tmp_path, '{"city": "Köln"}', _template("qwen3")) as (client, cluster):
            answer = await client.chat.completions.create(
                model="tiny", messages=ASK, tools=[OTHER, TOOL], tool_choice=choice
            )
            call = answer.choices[0].message.tool_calls[0]
            assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Köln"}')
            schema = json.loads(cluster.workers[0].submits[-1].sampling.json_schema)
            assert schema["$defs"] == PARAMETERS["$defs"]


class TestStrict:
    STRICT: Any = {"type": "function", "function": {**FUNCTION, "strict": True}}  # noqa: RUF012

    async def test_a_call_that_may_be_is_held_to_its_schema(self, tmp_path):
        async with _served(tmp_path, CALL) as (client, cluster):
            answer = await client.chat.completions.create(model="tiny", messages=ASK, tools=[self.STRICT, OTHER])
            assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"
            sampling = cluster.workers[0].submits[-1].sampling
            assert sampling.grammar[0] == "lark"
            assert '"required":["city"]' in sampling.lark
            await client.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL])
            assert cluster.workers[0].submits[-1].sampling.grammar is None

    async def test_a_form_that_no_grammar_holds_is_refused_by_name(self, tmp_path):
        async with _served(tmp_path, CALL, tool_call_parser="pythonic") as (client, _):
            with pytest.raises(openai.BadRequestError, match="pythonic"):
                await client.chat.completions.create(model="tiny", messages=ASK, tools=[self.STRICT])


REFUSED = [
    ({"tool_choice": "required"}, "tool_choice", "requires tools"),
    ({"tool_choice": "auto", "tools": []}, "tool_choice", "requires tools"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "'any'"),
    ({"tools": [TOOL], "tool_choice": {"type": "x"}}, "tool_choice", "must be one of"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "'g'"),
    ({"tools": [TOOL] * 2}, "tools", "twice"),
    ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools", "128"),
    ({"tools": [{"type": "retrieval"}]}, "tools", "function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "pattern"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools", "object"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": 1}}}]}, "tools", "object"),
    ({"functions": [FUNCTION]}, "functions", "tools"),
    ({"function_call": "auto"}, "function_call", "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "tool_choice",
        "grammar",
    ),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 7}}]},
            ]
        },
        "messages",
        "valid",
    ),
]


async def test_what_cannot_be_served_is_refused_by_name(tmp_path):
    deep: dict[str, Any] = {}
    for _ in range(70):
        deep = {"properties": {"a": deep}}
    long = {"type": "object", "properties": {f"p{i}": {"description": "x" * 100} for i in range(1000)}}
    more = [
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": deep}}]}, "tools", "deep"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": long}}], "tool_choice": "required"},
            "tools",
            "characters",
        ),
    ]
    async with _served(tmp_path, "x") as (_, cluster):
        for fields, param, words in [*REFUSED, *more]:
            response = await cluster.http.post("/v1/chat/completions", json={"messages": ASK, **fields})
            error = response.json()["error"]
            assert response.status_code == 400, fields
            assert param in (error["param"] or error["message"]), error
            assert words in error["message"], error


class TestReasoning:
    SCRIPT = f"<think>\nLook it up.\n</think>\n\n{CALL}"

    async def test_reasoning_goes_apart(self, tmp_path):
        async with _served(tmp_path, self.SCRIPT, _template("qwen3")) as (client, _):
            ask = {"model": "tiny", "messages": ASK, "tools": [TOOL]}
            message = (await client.chat.completions.create(**ask)).choices[0].message
            assert (message.reasoning_content, message.content) == ("Look it up.", None)
            assert message.tool_calls[0].function.name == "get_weather"
            out = (await _joined(await client.chat.completions.create(**ask, stream=True)))[0]
            assert (out["reasoning"], out["content"]) == ("Look it up.", "")
            assert out["calls"] == [["get_weather", '{"city": "Köln"}']]
            plain = (await client.chat.completions.create(model="tiny", messages=ASK)).choices[0].message
            assert (plain.reasoning_content, plain.content) == ("Look it up.", CALL)

    async def test_reasoning_that_the_prompt_has_opened(self, tmp_path):
        async with _served(tmp_path, "Hm.</think>\n\nSunny.", _template("qwq")) as (client, _):
            message = (await client.chat.completions.create(model="tiny", messages=ASK)).choices[0].message
            assert (message.reasoning_content, message.content) == ("Hm.", "Sunny.")
            # Under a grammar the text begins with what the grammar asks for.
            formatted = await client.chat.completions.create(
                model="tiny", messages=ASK, response_format={"type": "json_object"}
            )
            assert formatted.choices[0].message.content == "Hm.</think>\n\nSunny."

    async def test_it_can_be_left_in(self, tmp_path):
        async with _served(tmp_path, self.SCRIPT, _template("qwen3"), reasoning_parser="none") as (client, _):
            message = (await client.chat.completions.create(model="tiny", messages=ASK)).choices[0].message
            assert message.content == self.SCRIPT
