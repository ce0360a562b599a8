"""Bodies as clients send them: whole, huge, by halves; and what they cost everybody else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from pydantic import ValidationError

import tanghulu.conductor.inference.grammars as grammars_module
import tanghulu.web.bodies as web_bodies
from tanghulu.conductor.http import reply
from tanghulu.conductor.http.reply import dumps, dumps_large, parse_fields
from tanghulu.conductor.http.responses.bodies import ResponsesBody
from tanghulu.conductor.inference import preprocess
from tanghulu.conductor.inference.json_marks import BRACKET_MARKS, JsonMarks, check_marks
from tanghulu.conductor.inference.schema import (
    AbortBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
)
from tanghulu.conductor.inference.service import MAX_JSON_BYTES_PER_TOKEN
from tanghulu.conductor.text import preparing, served_model
from tanghulu.conductor.text.served_model import MAX_CHARACTERS_PER_TOKEN
from tanghulu.conductor.text.stop_regex import StopPattern
from tanghulu.errors import ContextLengthExceeded
from tanghulu.web.bodies import Bodies
from tanghulu.web.errors import BadField, from_validation
from tests.conductor.cluster import Cluster
from tests.conductor.fake_worker import CONTEXT

BODIES = (ChatBody, CompletionBody, GenerateBody, TokenizeBody, DetokenizeBody, AbortBody)
ASK = {"model": "tiny", "prompt": "x", "max_tokens": 4}


@contextlib.asynccontextmanager
async def half_sent(cluster: Cluster, size_bytes: int, sent_bytes: int) -> AsyncIterator[asyncio.StreamReader]:
    """A connection on which a completion's body has stopped coming."""
    address = cluster.conductor.address
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size_bytes)
    writer.write(b'{"prompt": "' + b"x" * (sent_bytes - 12))
    await writer.drain()
    try:
        yield reader
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


class TestHalfSent:
    async def test_a_body_that_stops_coming_is_given_up(self, cluster):
        await cluster.add()
        cluster.conductor.service.bodies = Bodies(1 << 20, 1 << 20, stall_s=0.2)
        async with half_sent(cluster, 1000, 100) as reader:
            answer = await reader.read()  # to the end: the connection closes, too
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"received 100 of 1000 bytes" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_too_slow"
        assert len(cluster.conductor.service.bodies.room) == 0

    async def test_the_oldest_give_way_when_there_is_no_room(self, cluster, monkeypatch):
        await cluster.add()
        monkeypatch.setattr(web_bodies, "GRACE_S", 0.0)
        bodies = cluster.conductor.service.bodies = Bodies(100_000, 100_000)
        async with half_sent(cluster, 90_000, 50_000) as first, half_sent(cluster, 90_000, 40_000) as second:
            await cluster.until(lambda: bodies.room.num_bytes == 90_000)
            honest = await cluster.http.post("/v1/completions", json={**ASK, "user": "x" * 30_000})
            assert honest.status_code == 200, honest.text
            assert (await first.readline()).startswith(b"HTTP/1.1 408")
            assert bodies.room.num_bytes == 40_000
            cluster.conductor.service.bodies.stop()
            assert (await second.readline()).startswith(b"HTTP/1.1 503")
        await cluster.until(lambda: len(bodies.room) == 0)
        bodies.room.check()

    async def test_without_old_ones_the_newcomer_is_sent_away(self, cluster):
        await cluster.add()
        bodies = cluster.conductor.service.bodies = Bodies(100_000, 100_000)
        async with half_sent(cluster, 90_000, 80_000):
            await cluster.until(lambda: bodies.room.num_bytes == 80_000)
            refused = await cluster.http.post("/v1/completions", json={**ASK, "user": "x" * 30_000})
        assert refused.status_code == 503, refused.text
        error = refused.json()["error"]
        assert (error["code"], error["type"]) == ("bodies_full", "service_unavailable_error")
        assert refused.headers["retry-after"] == "1"


class TestLargePrompts:
    async def test_what_cannot_fit_is_refused_before_it_is_tokenised(self, cluster, monkeypatch):
        await cluster.add()
        model = await cluster.conductor.service.find_model("tiny")
        monkeypatch.setattr(model, "_encode", None)  # would fail
        text = "x" * (MAX_CHARACTERS_PER_TOKEN * CONTEXT + 1)
        chat = {"messages": [{"role": "user", "content": text}]}
        asks = [("/v1/completions", {**ASK, "prompt": text}), ("/v1/completions", {**ASK, "prompt": [text]})]
        asks += [("/v1/chat/completions", chat), ("/generate", {"text": text}), ("/tokenize", {"prompt": text})]
        for path, body in asks:
            response = await cluster.http.post(path, json=body)
            assert response.status_code == 400, (path, response.text)
            assert response.json()["error"]["code"] == "context_length_exceeded"
        ids = await cluster.http.post("/v1/completions", json={**ASK, "prompt": [1] * 100_000})
        assert ids.json()["error"]["code"] == "context_length_exceeded"

    async def test_a_text_that_may_not_fit_is_counted_in_pieces(self, cluster, monkeypatch):
        await cluster.add()
        model = await cluster.conductor.service.find_model("tiny")
        monkeypatch.setattr(served_model, "_COUNTED_CHARACTERS", 100)
        counted: list[int] = []
        count = model._count
        monkeypatch.setattr(model, "_count", lambda text: counted.append(len(text)) or count(text))
        fits = await model.encode("the" * (CONTEXT - 10), add_special_tokens=False)  # a token each
        assert (len(fits), sum(counted)) == (CONTEXT - 10, 3 * (CONTEXT - 10))
        counted.clear()
        with pytest.raises(ContextLengthExceeded):
            await model.encode("x" * (10 * CONTEXT), add_special_tokens=False)
        assert sum(counted) < 2 * CONTEXT, "the rest is not looked at"

    async def test_others_are_served_while_one_is_tokenised(self, cluster, monkeypatch):
        """The tokenizer lets the loop go on: it answers others before the large prompt has its answer."""
        await cluster.add()
        model = await cluster.conductor.service.find_model("tiny")
        begun, go_on, count = asyncio.Event(), asyncio.Event(), model._count
        loop = asyncio.get_running_loop()

        def held(text: str) -> int:
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(30)
            return count(text)

        text = "x" * (preparing.INLINE_CHARACTERS + 1)
        with monkeypatch.context() as patch:
            patch.setattr(model, "_count", held)
            large = asyncio.create_task(cluster.http.post("/v1/completions", json={**ASK, "prompt": text}))
            async with asyncio.timeout(30):
                await begun.wait()
        assert (await cluster.http.get("/live")).status_code == 200
        assert (await cluster.http.post("/v1/completions", json=ASK)).status_code == 200
        assert not large.done()
        go_on.set()
        assert (await large).json()["error"]["code"] == "context_length_exceeded"

    async def test_the_tokenizer_lets_other_threads_run(self, cluster):
        """Its call for many texts releases the interpreter; that for one text does not."""
        await cluster.add()
        model = await cluster.conductor.service.find_model("tiny")
        calls: list[str] = []

        class Spy:
            def __getattr__(self, name: str):
                calls.append(name)
                return getattr(tokenizer, name)

        tokenizer, model.tokenizer = model.tokenizer, Spy()
        await model.encode("some text", add_special_tokens=False)
        assert calls == ["encode_batch_fast"]


class TestJson:
    @pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
    def test_marks_are_counted_outside_of_strings_however_the_text_is_cut(self, step):
        value = {"a": 'x, "y", z\\', "b": [1, 2, {"c": "[[,,\\\\"}], 'k"': '\\"'}
        text = json.dumps(value).encode()
        marks = JsonMarks()
        for start in range(0, len(text), step):
            marks.feed(text[start : start + step])
        assert marks.num_marks == 7 * BRACKET_MARKS + 2 + 2
        assert marks.longest_string == len("x, y, z")

    async def test_a_string_that_fits_no_context_is_refused_before_it_is_parsed(self, cluster, monkeypatch):
        await cluster.add()
        monkeypatch.setattr(reply, "parse_fields", None)  # would fail
        text = "x, " * (MAX_JSON_BYTES_PER_TOKEN * CONTEXT // 3 + 1)
        response = await cluster.http.post("/v1/completions", json={**ASK, "prompt": text})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"

    async def test_a_body_of_very_many_values_is_refused(self, cluster):
        await cluster.add()
        body = b'{"prompt": "x", "more": [' + b"[]," * 300_000 + b"[]]}"
        response = await cluster.http.post("/v1/completions", content=body)
        assert response.status_code == 400
        assert "values" in response.json()["error"]["message"]

    @pytest.mark.parametrize(
        "body",
        [b"{", b"\xff", b'"\xff"', b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"seed": NaN}', b"", b'{"seed": 1e999}'],
    )
    def test_what_is_no_json_is_refused(self, body):
        with pytest.raises(BadField):
            parse_fields(CompletionBody, body)


def test_an_answer_has_no_character_that_anybody_takes_for_the_end_of_a_line():
    text = "".join(map(chr, range(0x3000))) + "\U0001f361"
    said = dumps({"text": text})
    assert len(said.splitlines()) == 1
    assert json.loads(said) == {"text": text}
    assert "\U0001f361" in said, "other characters stand as they are"


#: Texts that go into the prompt, where the context bounds them, or are hashed.
PROMPT_TEXTS = {
    "arguments", "content", "description", "input", "instructions", "name", "output", "prompt", "refusal", "text",
    "type", "role", "effort", "tool_choice", "call_id",
}  # fmt: skip


def _unbounded(schema: Any, definitions: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[str]:
    """The paths of lists, typed objects and texts in a JSON schema that have no bound."""
    if not isinstance(schema, dict):
        return
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name not in path:
            yield from _unbounded(definitions[name], definitions, (*path, name))
        return
    kind, named = schema.get("type"), path[-1] if path else ""
    if kind == "array" and "maxItems" not in schema:
        yield ".".join(path)
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict) and "maxProperties" not in schema:
        yield ".".join(path)
    is_free = not schema.keys() & {"maxLength", "enum", "const", "pattern"}
    if kind == "string" and is_free and named not in PROMPT_TEXTS:
        yield ".".join(path)
    for name, inner in schema.get("properties", {}).items():
        yield from _unbounded(inner, definitions, (*path, name))
    for inner in (*schema.get("anyOf", ()), schema.get("items"), schema.get("additionalProperties")):
        yield from _unbounded(inner, definitions, path)


@pytest.mark.parametrize("model", [*BODIES, ResponsesBody], ids=lambda model: model.__name__)
def test_all_that_a_body_may_list_has_a_bound(model):
    schema = model.model_json_schema(mode="serialization")
    assert not list(_unbounded(schema, schema.get("$defs", {})))


FAULTS = [
    {"stop": ["a", 1] * 100_000},
    {"logit_bias": {str(i): "x" for i in range(200_000)}},
    {"routing": {f"w{i}": 1 for i in range(200_000)}},
    {"routing": {"weights": {f"w{i}": "x" for i in range(200_000)}}},
    {"stop_token_ids": ["a"] * 200_000},
    {"prompt": [1] * 100_000 + ["a"] * 100_000},
    {"prompt": [["a"]] * 100_000},
]


@pytest.mark.parametrize("given", FAULTS, ids=lambda given: next(iter(given)))
def test_a_body_of_many_faults_names_the_first_few(given):
    """Each fault would be an object of its own, larger than the value: seconds, and gigabytes."""
    with pytest.raises(ValidationError) as caught:
        CompletionBody.model_validate({"prompt": "x", **given})
    assert caught.value.error_count() < 20


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 2, -3], "prompt.2: Input should be greater than or equal to 0"),
        ([10**12], "prompt.0: Input should be less than or equal to 4294967295"),
        (["a", 3], "prompt.1: Input should be a valid string"),
        ([[1, 2], [3, "x"]], "prompt.1.1: Input should be a valid integer"),
        ([[1, 2], 3], "prompt.1: Input should be a valid list"),
        (5, "prompt: Input should be a valid string"),
    ],
    ids=str,
)
def test_of_the_kinds_of_a_prompt_the_intended_one_is_named(prompt, message):
    with pytest.raises(ValidationError) as caught:
        CompletionBody.model_validate({"prompt": prompt})
    assert from_validation(caught.value).message == message


async def test_choices_beyond_a_grammar_are_refused_before_they_are_escaped(cluster, monkeypatch):
    await cluster.add()
    monkeypatch.setattr(grammars_module, "one_of", None)  # would fail
    for name in ("guided_choice", "structured_outputs"):
        texts = ["." * 20_000] * 4
        body = {**ASK, name: texts if name == "guided_choice" else {"choice": texts}}
        response = await cluster.http.post("/v1/completions", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)


async def test_an_expression_is_built_once_for_all_prompts(cluster, monkeypatch):
    await cluster.add()
    built: list[str] = []
    build = StopPattern.__init__
    monkeypatch.setattr(StopPattern, "__init__", lambda self, source: built.append(source) or build(self, source))
    body = {**ASK, "prompt": ["a"] * 100, "stop_regex": ["q{9}", "z"]}
    assert (await cluster.http.post("/v1/completions", json=body)).status_code == 200
    assert built == ["q{9}", "z"]
    params = [{"max_new_tokens": 1, "stop_regex": f"{number}x"} for number in range(20)]
    different = await cluster.http.post("/generate", json={"text": ["a"] * 20, "sampling_params": params})
    assert (different.status_code, different.json()["error"]["param"]) == (400, "stop_regex"), different.text
    large = await cluster.http.post("/v1/completions", json={**body, "stop_regex": "[a-z]{1000}"})
    assert (large.status_code, large.json()["error"]["param"]) == (400, "stop_regex")


async def test_values_inside_of_arguments_count(cluster):
    await cluster.add()
    arguments = '{"a": [' + ",".join(["[]"] * 9_000) + "]}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call] * 7}]
    for path in ("/v1/chat/completions", "/tokenize"):
        response = await cluster.http.post(path, json={"messages": messages})
        assert response.status_code == 400
        assert "arguments" in response.json()["error"]["message"]


async def test_the_memory_of_values_has_a_bound(cluster):
    await cluster.add()
    service = cluster.conductor.service
    service.values = Bodies(0, 4096)
    assert (await cluster.http.post("/v1/completions", json=ASK)).status_code == 200
    service.values.room.check()
    assert not len(service.values.room)
    refused = await cluster.http.post("/v1/completions", json={**ASK, "metadata": {f"k{i}": "v" for i in range(50)}})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "bodies_full")


async def test_many_short_texts_are_not_tokenised_in_the_loop(cluster, monkeypatch):
    await cluster.add()
    model = await cluster.conductor.service.find_model("tiny")
    threads: set[str] = set()
    encode = model._encode
    monkeypatch.setattr(model, "_encode", lambda *given: threads.add(threading.current_thread().name) or encode(*given))
    for path in ("/tokenize", "/v1/completions"):
        body = {"prompt": ["the " * 100] * 100, "max_tokens": 1}
        assert (await cluster.http.post(path, json=body)).status_code == 200
    assert threading.main_thread().name not in threads
    refused = await cluster.http.post("/tokenize", json={"prompt": ["a"] * 129})
    assert refused.status_code == 400


def test_a_large_answer_is_encoded_as_any_other():
    entries = [{"token": f"\u2028{number}", "logprob": -0.5, "bytes": [1, 2]} for number in range(1000)]
    for value in ({"choices": [{"logprobs": {"content": entries}, "n": None}], "id": "x"}, entries, [], {}, "a", [[]]):
        assert dumps_large(value) == dumps(value).encode()


async def test_log_probabilities_of_prompts_have_a_bound(cluster, monkeypatch):
    await cluster.add()
    monkeypatch.setattr(preprocess, "MAX_PROMPT_SCORES", 100)
    few = {"prompt": [1] * 40, "max_tokens": 1, "prompt_logprobs": 1}
    assert (await cluster.http.post("/v1/completions", json=few)).status_code == 200
    asked = [
        ("/v1/completions", {**few, "prompt_logprobs": 2}),
        ("/v1/completions", {**few, "n": 2}),
        ("/v1/completions", {"prompt": [[1] * 40] * 2, "echo": True, "logprobs": 1}),
        ("/generate", {"input_ids": [1] * 60, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}),
    ]
    for path, body in asked:
        refused = await cluster.http.post(path, json=body)
        assert refused.status_code == 400, refused.text
        assert "log probabilities" in refused.json()["error"]["message"]


def test_marks_inside_of_strings_take_no_memory():
    assert check_marks(json.dumps({"prompt": "[1, 2], " * 1000}).encode()) == 2 * BRACKET_MARKS
