"""Anthropic's Messages API, with the anthropic package against the real HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tanghulu.rpc.wire import Failure
from tests.conductor.cluster import Cluster, running_cluster
from tests.conductor.fake_worker import CONTEXT, TOKENIZER
from tests.conductor.http.test_keys import keyed_cluster
from tests.conductor.http.test_tools import CALL, PARAMETERS, _add, _prompt, _template
from tests.conductor.key_files import SECRETS

anthropic: Any = pytest.importorskip("anthropic", reason="extra: anthropic is not installed")

TEXT = "Hello, wörld! "
NUM_TOKENS = len(TOKENIZER.encode(TEXT).ids) + 1
ASK = [{"role": "user", "content": "hi"}]
TOOL = {"name": "get_weather", "description": "The weather of a city", "input_schema": PARAMETERS}
BODY: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 500}
NO_CACHE = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


@contextlib.asynccontextmanager
async def _client(cluster: Cluster, key: str = "x") -> AsyncIterator[Any]:
    http = anthropic.DefaultAsyncHttpxClient(trust_env=False)
    url = f"http://{cluster.conductor.address}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0, timeout=60, http_client=http) as one:
        yield one


@contextlib.asynccontextmanager
async def _served(
    run_dir: Path, script: str, template: str = "", **options: object
) -> AsyncIterator[tuple[Any, Cluster]]:
    """A client of a cluster whose worker says ``script``."""
    async with running_cluster(run_dir, **options) as cluster:
        await _add(cluster, script, template)
        async with _client(cluster) as client:
            yield client, cluster


async def _streamed(client: Any, **body: Any) -> Any:
    """The message that the client puts together from a stream."""
    async with client.messages.stream(**body) as stream:
        return await stream.get_final_message()


def _plain(message: Any) -> dict[str, Any]:
    """What does not differ between two answers to one request."""
    shown = message.to_dict()
    usage = shown["usage"]
    usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    for block in shown["content"]:
        block.pop("id", None)
    return {**shown, "id": "", "stop_details": None}


class TestText:
    async def test_a_whole_message(self, tmp_path):
        sampling = {"temperature": 0, "top_k": 5, "top_p": 0.5}
        async with _served(tmp_path, TEXT) as (client, cluster):
            answer = await client.messages.create(**BODY, system="be brief", extra_body=sampling)
            assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
            assert [(block.type, block.text) for block in answer.content] == [("text", TEXT)]
            assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
            assert answer.id.startswith("msg_")
            assert answer.usage.to_dict().items() >= {**NO_CACHE, "output_tokens": NUM_TOKENS}.items()
            assert "system\nbe brief<|im_end|>" in _prompt(cluster)
            drawn = cluster.workers[0].submits[-1].sampling
            assert (drawn.temperature, drawn.top_k, drawn.top_p) == (0, 5, 0.5)
            counted = await client.messages.count_tokens(model="tiny", messages=ASK, system="be brief")
            assert counted.input_tokens == answer.usage.input_tokens > 0

    async def test_a_stream_has_anthropics_events_in_order(self, tmp_path):
        async with _served(tmp_path, TEXT) as (client, _):
            events = [event async for event in await client.messages.create(**BODY, stream=True)]
            assert [event.type for event in events if event.type != "content_block_delta"] == [
                "message_start",
                "content_block_start",
                "content_block_stop",
                "message_delta",
                "message_stop",
            ]
            assert events[0].message.content == []
            assert "".join(e.delta.text for e in events if e.type == "content_block_delta") == TEXT
            assert (events[-2].delta.stop_reason, events[-2].usage.output_tokens) == ("end_turn", NUM_TOKENS)
            async with client.messages.stream(**BODY) as stream:
                assert "".join([text async for text in stream.text_stream]) == TEXT

    async def test_why_it_ended(self, tmp_path):
        async with _served(tmp_path, TEXT) as (client, _):
            cut = await client.messages.create(**{**BODY, "max_tokens": 3})
            assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
            for ask in (client.messages.create, lambda **body: _streamed(client, **body)):
                stopped = await ask(**BODY, stop_sequences=["zz", "wör"])
                assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "wör")
                assert stopped.content[0].text == "Hello, "

    async def test_a_full_context_is_named(self, cluster):
        await cluster.add(script="x" * CONTEXT)
        async with _client(cluster) as client:
            answer = await client.messages.create(**{**BODY, "max_tokens": 100_000})
            assert answer.stop_reason == "model_context_window_exceeded"
            used = answer.usage.input_tokens + answer.usage.output_tokens
            assert used == CONTEXT
            answer = await client.messages.create(**{**BODY, "max_tokens": answer.usage.output_tokens - 1})
            assert answer.stop_reason == "max_tokens"

    async def test_what_was_cached_is_not_counted_as_input(self, cluster):
        await cluster.add()
        long = {**BODY, "messages": [{"role": "user", "content": "one two three four five six seven"}]}
        async with _client(cluster) as client:
            first = await client.messages.create(**long)
            answers = [await client.messages.create(**long), await _streamed(client, **long)]
            for usage in [answer.usage for answer in answers]:
                assert usage.input_tokens + usage.cache_read_input_tokens == first.usage.input_tokens
                assert usage.cache_read_input_tokens > 0
                assert usage.cache_creation_input_tokens == 0

    async def test_a_schema(self, tmp_path):
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        async with _served(tmp_path, '{"a": 3}') as (client, cluster):
            form = {"format": {"type": "json_schema", "schema": schema}}
            answer = await client.messages.create(**BODY, output_config=form)
            assert answer.content[0].text == '{"a": 3}'
            submitted = json.loads(cluster.workers[0].submits[-1].sampling.json_schema)
            assert submitted["properties"]["a"]["type"] == "integer"

    async def test_no_reason_fits_an_aborted_one(self, tmp_path):
        async with _served(tmp_path, TEXT) as (client, cluster):
            worker = cluster.workers[0]
            worker.hold()
            stream = await _begun(client, worker)
            (name,) = {call.id for calls in cluster.conductor.service.calls.values() for call in calls.values()}
            assert (await cluster.http.post("/abort_request", json={"rid": name})).json() == {"aborted": 1}
            events = [event async for event in stream]
            assert [event.type for event in events[-2:]] == ["message_delta", "message_stop"]
            assert events[-2].delta.stop_reason is None
            worker.release()

    async def test_a_client_that_leaves_ends_its_request(self, tmp_path):
        async with _served(tmp_path, TEXT) as (client, cluster):
            worker = cluster.workers[0]
            worker.hold()
            stream = await _begun(client, worker)
            await stream.close()
            await cluster.until(lambda: worker.aborts)
            worker.release()
            await cluster.until(lambda: not cluster.dispatcher.num_requests)


async def _begun(client: Any, worker: Any) -> Any:
    """A stream of which the first event has come."""
    worker.step()
    stream = await client.messages.create(**BODY, stream=True)
    await anext(stream)
    return stream


class TestPrompt:
    async def _prompted(self, cluster: Cluster, client: Any, **more: Any) -> str:
        await client.messages.create(**{**BODY, "max_tokens": 1, **more})
        return _prompt(cluster)

    async def test_blocks_and_roles(self, tmp_path):
        turns = [
            {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
            {"role": "user", "content": "three"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}]},
            {
                "role": "assistant",
                "content": [{"type": "redacted_thinking", "data": "?"}, {"type": "text", "text": "4"}],
            },
            {"role": "user", "content": "five"},
        ]
        system = [{"type": "text", "text": "be kind"}, {"type": "text", "text": "be brief"}]
        async with _served(tmp_path, TEXT) as (client, cluster):
            prompt = await self._prompted(cluster, client, messages=turns, system=system)
            assert "system\nbe kind\n\nbe brief<|im_end|>" in prompt
            assert "user\none two\n\nthree<|im_end|>\n<|im_start|>assistant\n4<|im_end|>" in prompt

    async def test_the_billing_header_does_not_break_prefixes(self, tmp_path):
        async with _served(tmp_path, TEXT) as (client, cluster):
            told = {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}
            prompts = {await self._prompted(cluster, client, system=[told])}
            for number in range(2):
                bill = {"type": "text", "text": f"x-anthropic-billing-header: cc_version={number};"}
                prompts.add(await self._prompted(cluster, client, system=[bill, told]))
                alone = await self._prompted(cluster, client, system=[bill])
                assert "billing" not in alone
            assert len(prompts) == 1

    async def test_thinking_sets_the_template_s_variable(self, tmp_path):
        async with _served(tmp_path, TEXT, _template("qwen3")) as (client, cluster):
            for thinking, shut in (
                ({"type": "disabled"}, True),
                ({"type": "enabled", "budget_tokens": 1024}, False),
                ({"type": "adaptive"}, False),
            ):
                prompt = await self._prompted(cluster, client, thinking=thinking)
                assert prompt.endswith("<think>\n\n</think>\n\n") == shut, thinking
                counted = await client.messages.count_tokens(model="tiny", messages=ASK, thinking=thinking)
                assert counted.input_tokens == cluster.workers[0].submits[-1].num_prompt_tokens

    async def test_the_user_of_the_metadata_takes_turns(self, tmp_path):
        async with _served(tmp_path, TEXT) as (client, cluster):
            await self._prompted(cluster, client, metadata={"user_id": "me"})
            assert cluster.workers[0].submits[-1].client == "user me"

    async def test_an_agents_request_is_served(self, tmp_path):
        """With all that a coding agent sends: only an edit of the context, which is not made, is reported."""
        mark = {"cache_control": {"type": "ephemeral"}}
        system = [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00000;"},
            {"type": "text", "text": "You are an agent.", **mark},
            {"type": "text", "text": "Be careful.", **mark},
        ]
        turns = [
            {
                "role": "user",
                "content": [{"type": "text", "text": "<system-reminder>"}, {"type": "text", "text": "ls"}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "They want a list.", "signature": ""},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
                    {"type": "tool_use", "id": "toolu_2", "name": "Bash", "input": {"command": "pwd"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.txt", "is_error": False},
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_2",
                        "content": [{"type": "text", "text": "/"}],
                        **mark,
                    },
                ],
            },
        ]
        schema = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
        bash = {"name": "Bash", "description": "Run it.", "input_schema": schema, "eager_input_streaming": True}
        body = {"model": "tiny", "max_tokens": 32_000, "system": system, "messages": turns, "tools": [bash]}
        body |= {"thinking": {"type": "adaptive"}, "metadata": {"user_id": "user_1_account__session_2"}, "stream": True}
        body |= {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
        async with _served(tmp_path, "Done.", _template("qwen3")) as (_, cluster):
            headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "interleaved-thinking-2025-05-14"}
            answer = await cluster.http.post("/v1/messages?beta=true", json=body, headers=headers)
            assert answer.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
            assert answer.headers["warning"].endswith('no effect: context_management"')
            prompt = _prompt(cluster)
            assert "You are an agent.\n\nBe careful." in prompt
            assert "billing" not in prompt
            assert "<think>\nThey want a list.\n</think>\n\nI look." in prompt
            assert "<tool_response>\na.txt\n</tool_response>\n<tool_response>\n/\n</tool_response>" in prompt

    async def test_neither_headers_nor_beta_routes_matter(self, tmp_path):
        async with _served(tmp_path, TEXT) as (client, cluster):
            answer = await client.beta.messages.create(**BODY, betas=["context-1m-2025-08-07"])
            assert answer.content[0].text == TEXT
            counted = await client.beta.messages.count_tokens(model="tiny", messages=ASK)
            assert counted.input_tokens == answer.usage.input_tokens
            raw = await client.messages.with_raw_response.create(**BODY, extra_headers={"x-request-id": "mine"})
            assert raw.headers["request-id"] == raw.headers["x-request-id"] == "mine"
            assert "warning" not in raw.headers
            assert cluster.workers[0].submits[-1].client.startswith("key "), "x-api-key names the sender, too"


class TestTools:
    async def test_a_tool_is_called_and_its_result_comes_back(self, tmp_path):
        async with _served(tmp_path, f"Let me look.\n{CALL}") as (client, cluster):
            answer = await client.messages.create(**BODY, tools=[TOOL])
            text, call = answer.content
            assert (answer.stop_reason, text.text) == ("tool_use", "Let me look.")
            assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Köln"})
            for given in ("rain", [{"type": "text", "text": "ra"}, {"type": "text", "text": "in"}]):
                result = {"type": "tool_result", "tool_use_id": call.id, "content": given}
                turns = [
                    *ASK,
                    {"role": "assistant", "content": answer.content},
                    {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
                ]
                await client.messages.create(**{**BODY, "messages": turns}, tools=[TOOL])
                prompt = _prompt(cluster)
                assert '"name": "get_weather"' in prompt.partition("Let me look.")[2]
                assert "<tool_response>\nrain\n</tool_response>" in prompt
                assert prompt.index("rain") < prompt.index("and now?")
                counted = await client.messages.count_tokens(model="tiny", messages=turns, tools=[TOOL])
                assert counted.input_tokens == cluster.workers[0].submits[-1].num_prompt_tokens

    async def test_choices(self, tmp_path):
        async with _served(tmp_path, f"{CALL}\n{CALL}") as (client, cluster):
            ask = {**BODY, "tools": [TOOL]}
            assert len((await client.messages.create(**ask)).content) == 2
            one = await client.messages.create(**ask, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
            assert len(one.content) == 1
            none = await client.messages.create(**ask, tool_choice={"type": "none"})
            assert (none.content[0].text, none.stop_reason) == (f"{CALL}\n{CALL}", "end_turn")
            assert "get_weather" not in _prompt(cluster)
        forced = '[{"name": "get_weather", "arguments": {"city": "Köln"}}]'
        only = tmp_path / "only"
        only.mkdir()
        async with _served(only, forced) as (client, cluster):
            made = await client.messages.create(**ask, tool_choice={"type": "any"})
            assert (made.content[0].input, made.stop_reason) == ({"city": "Köln"}, "tool_use")
            assert cluster.workers[0].submits[-1].sampling.json_schema
        named = tmp_path / "named"
        named.mkdir()
        async with _served(named, '{"city": "Köln"}') as (client, _):
            made = await client.messages.create(**ask, tool_choice={"type": "tool", "name": "get_weather"})
            assert (made.content[0].name, made.content[0].input) == ("get_weather", {"city": "Köln"})

    async def test_a_call_that_is_cut_off_shows_what_is_complete(self, tmp_path):
        async with _served(tmp_path, CALL.replace('"Köln"', '"Köln", "days": 3, "unit": "degrees"')) as (client, _):
            for num_tokens in range(50, 110, 9):
                body = {**BODY, "tools": [TOOL], "max_tokens": num_tokens}
                whole = await client.messages.create(**body)
                assert _plain(await _streamed(client, **body)) == _plain(whole), num_tokens
                for block in whole.content:
                    assert (
                        block.type == "text"
                        or {"city": "Köln", "days": 3, "unit": "degrees"}.items() >= block.input.items()
                    )


PIECES = [
    "Hello ",
    "wörld",
    "\n\n",
    CALL,
    CALL.replace("Köln", "a\\nb"),
    "<tool_call>",
    '{"x": ',
    "<think>",
    "x</think>",
]


@pytest.mark.parametrize("seed", range(12))
async def test_a_stream_is_the_whole_message(tmp_path, seed):
    """Whatever a model writes, a client puts the same message together from a stream of it."""
    draw = random.Random(seed)
    script = "".join(draw.choice(PIECES) for _ in range(draw.randint(1, 7)))
    if draw.random() < 0.5:
        script = f"<think>\n{draw.choice(PIECES)}.\n</think>\n\n{script}"
    async with _served(tmp_path, script, _template("qwen3")) as (client, _):
        body = {**BODY, "tools": [TOOL], "max_tokens": draw.choice([500, 20, 40, 60]), "stop_sequences": ["zz", "rld"]}
        if draw.random() < 0.3:
            body["thinking"] = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
        whole = await client.messages.create(**body)
        assert _plain(await _streamed(client, **body)) == _plain(whole)
        back = [*ASK, {"role": "assistant", "content": whole.content}, *ASK]
        if whole.content:
            await client.messages.create(**{**BODY, "messages": back, "max_tokens": 1})


class TestThinking:
    SCRIPT = f"<think>\nLook it up.\n</think>\n\nSo.\n{CALL}"

    async def test_thinking_is_a_block_of_its_own(self, tmp_path):
        async with _served(tmp_path, self.SCRIPT, _template("qwen3")) as (client, cluster):
            for ask in (client.messages.create, lambda **body: _streamed(client, **body)):
                answer = await ask(**BODY, tools=[TOOL])
                assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
                assert (answer.content[0].thinking, answer.content[0].signature) == ("Look it up.", "")
            result = {"type": "tool_result", "tool_use_id": answer.content[2].id, "content": "rain"}
            turns = [*ASK, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
            await client.messages.create(**{**BODY, "messages": turns}, tools=[TOOL])
            assert "<think>\nLook it up.\n</think>\n\nSo." in _prompt(cluster)

    async def test_it_can_be_left_out(self, tmp_path):
        async with _served(tmp_path, self.SCRIPT, _template("qwen3")) as (client, _):
            answer = await client.messages.create(
                **BODY, thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
            )
            assert [block.type for block in answer.content] == ["thinking", "text"]
            assert answer.content[0].thinking == ""


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "hi"}}
RESULT = {"type": "tool_result", "tool_use_id": "x", "content": "y"}


def _user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def _marked(*ttls: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": ttl}} for ttl in ttls]


REFUSED: list[tuple[dict[str, Any], str]] = [
    (_user(IMAGE), "blocks of type 'image' are not supported here; send text, tool_use"),
    (_user(DOCUMENT), "blocks of type 'document' are not supported"),
    (_user({**RESULT, "content": [IMAGE]}), "blocks of type 'image' are not supported here; send text$"),
    (_user({"type": "text"}), "a block of type text requires the fields text"),
    (_user({"type": "tool_use", "id": "x", "name": "f", "input": {}}), "belongs in a message of the role assistant"),
    (_user({"type": "text", "text": "x"}, RESULT), "must precede all others"),
    ({"messages": []}, "messages"),
    ({"messages": [*ASK, {"role": "assistant", "content": "The answer is"}]}, "cannot be continued; end with one of"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "are not run here"),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
    ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "must be a schema of type object"),
    ({"tool_choice": {"type": "any"}}, "tool_choice requires tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "type tool requires the field name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "names the function 'g'"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers is not supported"),
    ({"system": _marked("5m"), **_user(*_marked("5m", "5m", "5m", "5m"))}, "set at 5 places; the limit is 4"),
    ({"system": _marked("5m"), **_user(*_marked("1h"))}, "ttl 1h must precede"),
    ({**_user(*_marked("5m")), "cache_control": {"type": "ephemeral", "ttl": "1h"}}, "ttl 1h must precede"),
    (_user(*_marked("2h")), "cache_control.ttl"),
    ({"system": [{"type": "text", "text": "", "cache_control": {"type": "ephemeral"}}]}, "on empty text"),
    ({"stop_sequences": ["a", "b", "c", "d", "e"]}, "stop_sequences"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
async def test_what_is_refused_is_named(cluster, fields, words):
    await cluster.add()
    async with _client(cluster) as client:
        with pytest.raises(anthropic.BadRequestError, match=words.removesuffix("$")) as caught:
            await client.post("/v1/messages", body={**BODY, **fields}, cast_to=object)
        error = caught.value
        assert (error.type, error.error_code) == ("invalid_request_error", "invalid_request")
        assert error.request_id == error.body["request_id"]
        assert not words.endswith("$") or error.body["error"]["message"].endswith(words[:-1])


async def test_breakpoints_are_accepted_at_all_places(tmp_path):
    async with _served(tmp_path, TEXT) as (client, cluster):
        plain = await client.messages.create(**BODY, tools=[TOOL], system="x")
        prompt = _prompt(cluster)
        tools = [{**TOOL, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
        marked = {**BODY, **_user({**_marked("5m")[0], "text": "hi"}), "cache_control": {"type": "ephemeral"}}
        answer = await client.messages.create(**marked, tools=tools, system=_marked("1h"))
        assert _prompt(cluster) == prompt
        assert (answer.usage.cache_creation_input_tokens, answer.content) == (0, plain.content)


class TestErrors:
    async def test_they_are_typed(self, cluster):
        await cluster.add()
        async with _client(cluster) as client:
            with pytest.raises(anthropic.NotFoundError, match="nosuch") as missing:
                await client.messages.create(**{**BODY, "model": "nosuch"})
            assert (missing.value.type, missing.value.error_code) == ("not_found_error", "model_not_found")
            long = {**BODY, "messages": [{"role": "user", "content": "x" * 2 * CONTEXT}]}
            with pytest.raises(anthropic.BadRequestError, match="context") as too_long:
                await client.messages.create(**long)
            assert too_long.value.error_code == "context_length_exceeded"
            with pytest.raises(anthropic.NotFoundError, match="POST /v1/messages/count_tokens"):
                await client.messages.batches.list()
        for path, status in (("/v1/messages", 405), ("/v1/messages/batches", 404)):
            answer = await cluster.http.get(path)
            assert (answer.status_code, answer.json()["type"]) == (status, "error")
        other = await cluster.http.get("/v1/messagesx")
        assert set(other.json()) == {"error"}
        assert "request-id" not in other.headers

    async def test_no_worker_and_a_full_queue(self, tmp_path):
        async with running_cluster(tmp_path, max_queued=1, max_in_flight=1) as cluster:
            worker = await cluster.add()
            worker.hold()
            async with _client(cluster) as client:
                stream = await _begun(client, worker)
                waiting = asyncio.create_task(client.messages.create(**BODY))
                await cluster.until(lambda: cluster.dispatcher.num_waiting == 1)
                with pytest.raises(anthropic.OverloadedError) as full:
                    await client.messages.create(**BODY)
                assert (full.value.status_code, full.value.type) == (529, "overloaded_error")
                assert int(full.value.response.headers["retry-after"]) > 0
                await stream.close()
                worker.release()
                assert (await waiting).content

    async def test_a_stream_that_fails_ends_with_its_error(self, tmp_path):
        async with _served(tmp_path, TEXT) as (client, cluster):
            worker = cluster.workers[0]
            worker.hold()
            stream = await _begun(client, worker)
            worker.fail_with = Failure("INVALID_REQUEST", "no such token")
            worker.release()
            with pytest.raises(anthropic.APIStatusError, match="no such token") as caught:
                async for _ in stream:
                    pass
            assert caught.value.body["type"] == "error"
            assert caught.value.body["request_id"] == stream.response.headers["request-id"]

    async def test_keys_are_those_of_all_routes(self, tmp_path):
        async with keyed_cluster(tmp_path) as cluster:
            worker = await cluster.add()
            async with _client(cluster, SECRETS["user"]) as client:
                assert (await client.messages.create(**BODY)).content
                assert (worker.submits[-1].salt, worker.submits[-1].client) == (b"@acme/", "key user")
                assert (await client.messages.count_tokens(model="tiny", messages=ASK)).input_tokens
            for key, error, kind in (
                ("wrong", anthropic.AuthenticationError, "authentication_error"),
                (SECRETS["watcher"], anthropic.PermissionDeniedError, "permission_error"),
            ):
                async with _client(cluster, key) as client:
                    with pytest.raises(error) as caught:
                        await client.messages.create(**BODY)
                    assert caught.value.type == kind
            async with _client(cluster, SECRETS["limited"]) as client:
                await client.messages.create(**BODY)
                with pytest.raises(anthropic.RateLimitError) as limited:
                    await client.messages.create(**BODY)
                assert limited.value.type == "rate_limit_error"
                assert int(limited.value.response.headers["retry-after"]) > 1
