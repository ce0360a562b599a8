"""Every field of the bodies works, is refused by name, is ignored, or is named in a warning. Nothing else is silent."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tanghulu.conductor.http.anthropic.bodies import (
    JsonFormat,
    MessagesBody,
    Metadata,
    OutputConfig,
    ThinkingConfig,
    ToolChoice,
)
from tanghulu.conductor.http.reply import parse_fields
from tanghulu.conductor.http.responses.bodies import FormatOfText, ReasoningOptions, ResponsesBody, TextOptions
from tanghulu.conductor.inference import grammars, schema
from tanghulu.conductor.inference.body import IGNORED, UNSUPPORTED, Body, shown
from tanghulu.session.sampling import SamplingDefaults
from tanghulu.types import Role
from tanghulu.web.errors import BadField
from tests.conductor.cluster import running_cluster
from tests.conductor.fake_worker import CONTEXT, EOS, TOKENIZER, FakeWorker

TEXT = "Hello, wörld! "
IDS = TOKENIZER.encode(TEXT).ids
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
COMPLETION = {"prompt": "x", "max_tokens": 2}
RESPONSE = {"input": "x", "max_output_tokens": 2}
GENERATE = {"text": "x", "sampling_params": {"max_new_tokens": 2}}
ROUTES: dict[type[Body], tuple[str, dict]] = {
    schema.ChatBody: ("/v1/chat/completions", CHAT),
    schema.CompletionBody: ("/v1/completions", COMPLETION),
    ResponsesBody: ("/v1/responses", RESPONSE),
    MessagesBody: ("/v1/messages", CHAT),
    schema.GenerateBody: ("/generate", GENERATE),
}
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "seed": 7,
    "logit_bias": {"3": 1.5},
    "stop": ["q", "z"],
    "stop_token_ids": [9],
    "ignore_eos": True,
    "min_tokens": 1,
    "n": 2,
    "include_stop_str_in_output": True,
    "no_stop_trim": True,
    "skip_special_tokens": False,
    "stop_regex": ["q+z"],
    "regex": "a+",
    "json_schema": '{"type":"object"}',
}
ROUTED = {
    "model": "tiny",
    "cache_salt": "me",
    "prompt_cache_key": "me",
    "extra_key": "me",
    "priority": 1,
    "routing": {"policy": "ttft-min"},
    "user": "me",
    "request_timeout": 30.0,
    "first_token_timeout": 30.0,
    "token_timeout": 30.0,
    "explain_cache": True,
    "stream": False,
}
OPENAI = {
    "stream_options": {"include_usage": True},
    "max_tokens": 2,
    "response_format": {"type": "text"},
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "structured_outputs": {"choice": ["a"]},
    "truncate_prompt_tokens": 4,
    "best_of": 1,
    "request_id": "mine",
    "rid": "mine",
    "prompt_logprobs": 1,
}
FORMAT = {"name": "x", "strict": True, "schema": {"type": "object"}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
#: A value of each field of each body, and of each object in one.
EXAMPLES: dict[type[Body], dict] = {
    schema.ChatBody: SAMPLING
    | ROUTED
    | OPENAI
    | {
        "messages": CHAT["messages"],
        "tools": TOOLS,
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "add_generation_prompt": True,
        "documents": [{"title": "a", "text": "b"}],
        "reasoning_effort": "low",
        "chat_template_kwargs": {"x": 1},
        "max_completion_tokens": 2,
        "logprobs": True,
        "top_logprobs": 0,
        "add_special_tokens": True,
    },
    schema.CompletionBody: SAMPLING
    | ROUTED
    | OPENAI
    | {"prompt": "x", "echo": True, "logprobs": 2, "add_special_tokens": True},
    ResponsesBody: ROUTED
    | {
        "input": "hi",
        "instructions": "be brief",
        "max_output_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
        "tools": [{"type": "function", "name": "f"}],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "store": False,
        "previous_response_id": None,
        "metadata": {"a": "b"},
    },
    MessagesBody: ROUTED
    | {
        "messages": CHAT["messages"],
        "max_tokens": 2,
        "system": [{"type": "text", "text": "be brief"}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "none"},
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "low"},
        "cache_control": {"type": "ephemeral"},
        "stop_sequences": ["q", "z"],
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 5,
        "metadata": {"user_id": "me"},
    },
    schema.GenerateBody: ROUTED
    | {
        "text": "x",
        "input_ids": [1, 2],
        "sampling_params": {"n": 1},
        "stream_output": True,
        "rid": "mine",
        "session_id": "me",
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "token_ids_logprob": [1],
        "return_text_in_logprobs": True,
    },
    schema.SGLangSampling: SAMPLING
    | {"stop": ["1", "2", "3", "4", "5"], "max_new_tokens": 2, "min_new_tokens": 1, "sampling_seed": 7},
    schema.StreamOptions: {"include_usage": True, "continuous_usage_stats": True},
    grammars.StructuredOutputs: {"json": {"type": "object"}, "regex": "a+", "choice": ["a"], "json_object": True},
    grammars.ResponseFormat: {"type": "text", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    grammars.JsonSchema: FORMAT,
    TextOptions: {"format": {"type": "text"}},
    FormatOfText: {"type": "json_schema"} | FORMAT,
    ReasoningOptions: {"effort": "low"},
    ToolChoice: {"type": "auto", "name": "f", "disable_parallel_tool_use": True},
    ThinkingConfig: {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    OutputConfig: {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    JsonFormat: {"type": "json_schema", "schema": {"type": "object"}},
    Metadata: {"user_id": "me"},
}


def _request(kind: type[Body], name: str, value: object) -> tuple[str, dict]:
    """The route and the body that carry a field of ``kind``."""
    given = {name: value}
    if kind in ROUTES:
        path, body = ROUTES[kind]
        return path, {k: v for k, v in body.items() if (name, k) != ("input_ids", "text")} | given
    if kind is schema.SGLangSampling:
        return "/generate", GENERATE | {"sampling_params": GENERATE["sampling_params"] | given}
    if kind is schema.StreamOptions:
        return "/v1/completions", COMPLETION | {"stream": True, "stream_options": given}
    if kind is grammars.StructuredOutputs:
        return "/v1/completions", COMPLETION | {"structured_outputs": given}
    if kind is grammars.ResponseFormat:
        typed = {"type": name if name == "json_schema" else "text"}
        return "/v1/completions", COMPLETION | {"response_format": typed | given}
    if kind is grammars.JsonSchema:
        return "/v1/completions", COMPLETION | {"response_format": {"type": "json_schema", "json_schema": given}}
    if kind is TextOptions:
        return "/v1/responses", RESPONSE | {"text": given}
    if kind is FormatOfText:
        return "/v1/responses", RESPONSE | {"text": {"format": {"type": "json_schema", "name": "x"} | given}}
    if kind is ReasoningOptions:
        return "/v1/responses", RESPONSE | {"reasoning": given}
    return "/v1/messages", CHAT | _in_message(kind, given)


def _in_message(kind: type[Body], given: dict) -> dict:
    """The fields of a message that carry an object with the fields ``given``."""
    if kind is ToolChoice:
        tools = [{"name": "f", "input_schema": {"type": "object"}}]
        return {"tools": tools, "tool_choice": {"type": "auto"} | given}
    if kind is ThinkingConfig:
        return {"thinking": {"type": "enabled"} | given}
    if kind is JsonFormat:
        return {"output_config": {"format": EXAMPLES[JsonFormat] | given}}
    return {"output_config" if kind is OutputConfig else "metadata": given}


def _names(kind: type[Body]) -> set[str]:
    return {field.alias or name for name, field in kind.model_fields.items()}


def _without(name: str) -> list[type[Body]]:
    """The bodies that do not have the field ``name``."""
    return [kind for kind in ROUTES if name not in _names(kind)]


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_field_is_refused_by_name(name):
    assert _without(name)
    for kind in _without(name):
        for value in ("x", {"x": 1}, ["x"], True, 5):
            with pytest.raises(BadField, match="is not supported") as caught:
                parse_fields(kind, json.dumps(ROUTES[kind][1] | {name: value}).encode())
            assert caught.value.param == name
            assert caught.value.message == f"{name} is not supported: {UNSUPPORTED[name]}"


@pytest.mark.parametrize(
    ("kind", "name", "param"),
    [
        (schema.SGLangSampling, "ebnf", "sampling_params"),
        (schema.SGLangSampling, "custom_params", "sampling_params"),
        (grammars.StructuredOutputs, "grammar", "structured_outputs"),
        (grammars.StructuredOutputs, "whitespace_pattern", "structured_outputs"),
    ],
)
def test_so_is_one_inside_of_an_object(kind, name, param):
    path, body = _request(kind, name, "x")
    kind = next(kind for kind, (where, _) in ROUTES.items() if where == path)
    with pytest.raises(BadField, match=f"{param}.{name} is not supported") as caught:
        parse_fields(kind, json.dumps(body).encode())
    assert caught.value.param == param


@pytest.mark.parametrize("name", [*UNSUPPORTED, *sorted(IGNORED), "return_hidden_states", "bootstrap_host", "bogus"])
def test_a_field_passes_where_it_asks_for_nothing(name):
    for kind in _without(name):
        empty = ({},) if name in UNSUPPORTED or name in IGNORED else ()
        for value in (None, False, "", [], [None, False], *empty):
            assert not parse_fields(kind, json.dumps(ROUTES[kind][1] | {name: value}).encode()).unknown


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (schema.ChatBody, {"modalities": ["text"], "function_call": "none", "verbosity": "medium"}),
        (schema.CompletionBody, {"length_penalty": 1.0}),
        (ResponsesBody, {"truncation": "disabled", "text": {"verbosity": "medium"}}),
    ],
)
def test_or_for_what_is_done_anyway(kind, given):
    assert not parse_fields(kind, json.dumps(ROUTES[kind][1] | given).encode()).unknown


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_an_ignored_field_gets_no_warning(name):
    for kind in _without(name):
        for value in (True, "auto", {"a": "b"}, 1.5):
            assert not parse_fields(kind, json.dumps(ROUTES[kind][1] | {name: value}).encode()).unknown


async def test_what_works_is_served_without_a_warning(cluster):
    await cluster.add()

    async def send(kind: type[Body], name: str) -> None:
        path, body = _request(kind, name, EXAMPLES[kind][name])
        response = await cluster.http.post(path, json=body)
        told = (name, kind.__name__, response.text)
        assert (response.status_code, response.headers.get("warning")) == (200, None), told

    rows = [(kind, name) for kind, examples in EXAMPLES.items() for name in examples]
    named = [row for row in rows if row[1] in ("rid", "request_id")]
    for row in named:  # one of a name at a time
        await send(*row)
    for first in range(0, len(rows), 16):
        await asyncio.gather(*(send(*row) for row in rows[first : first + 16] if row not in named))


@pytest.mark.parametrize("kind", list(EXAMPLES))
def test_every_field_has_an_example_and_says_what_it_is(kind):
    assert EXAMPLES[kind].keys() == _names(kind)
    assert not (_names(kind) & UNSUPPORTED.keys()) - {"prompt", "input_ids", "echo"}


def _tables() -> ModuleType:
    path = Path(__file__).parents[3] / "tools" / "field_tables.py"
    spec = importlib.util.spec_from_file_location("field_tables", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["field_tables"] = module
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_the_docs_are_these():
    module = _tables()
    assert set(module.BODIES) == set(EXAMPLES)
    assert module.PAGE.read_text() == module.filled(module.PAGE.read_text()), "python tools/field_tables.py"


class TestNamesThatMeanNothing:
    async def test_they_are_told_in_a_header(self, cluster):
        await cluster.add()
        body = COMPLETION | {"temperatur": 1, 'x\r\nset-cookie: a="b': 2}
        for stream in (False, True):
            response = await cluster.http.post("/v1/completions", json=body | {"stream": stream})
            assert response.status_code == 200
            said = response.headers["warning"]
            assert said == '299 tanghulu "unknown fields have no effect: temperatur, x??set-cookie??a??b"'
            assert "set-cookie" not in response.headers
        nested = {"text": "x", "sampling_params": [{"max_new_tokens": 1, "top_kk": 1}], "more": 1}
        response = await cluster.http.post("/generate", json=nested | {"text": ["x"]})
        assert response.headers["warning"].endswith(': more, sampling_params.0.top_kk"')
        response = await cluster.http.post("/v1/completions", json=COMPLETION | {f"x{i}": 1 for i in range(20)})
        assert response.headers["warning"].endswith('x7 and 12 more"')
        response = await cluster.http.post("/tokenize", json={"prompt": "x", "promt": "y"})
        assert "promt" in response.headers["warning"]

    async def test_an_error_tells_of_them_too(self, cluster):
        await cluster.add()
        response = await cluster.http.post("/v1/completions", json={"prompt": "", "max_token": 3})
        assert (response.status_code, "max_token" in response.headers["warning"]) == (400, True)

    async def test_or_are_refused(self, tmp_path):
        async with running_cluster(tmp_path, unknown_fields="refuse") as cluster:
            await cluster.add()
            response = await cluster.http.post("/v1/completions", json=COMPLETION | {"temperatur": 1})
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] == "temperatur"
            assert error["message"] == "unknown field temperatur; did you mean 'temperature'?"
            response = await cluster.http.post("/v1/completions", json=COMPLETION | {"user": "me", "store": False})
            assert response.status_code == 200


class TestValuesThatAskForNothing:
    async def test_benchmark_clients_pass(self, cluster):
        """The bodies of `vllm bench serve`, sglang's bench_serving, guidellm and lm-eval."""
        await cluster.add()
        vllm = {"model": "tiny", "prompt": "x", "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 4}
        vllm |= {"logprobs": None, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        sglang = {"text": "x", "stream": True, "lora_path": None, "return_logprob": False, "logprob_start_len": -1}
        sglang |= {"sampling_params": {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}}
        guidellm = CHAT | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        guidellm |= {"max_completion_tokens": 4, "stop": None, "ignore_eos": True}
        for path, body in [("/v1/completions", vllm), ("/generate", sglang), ("/v1/chat/completions", guidellm)]:
            response = await cluster.http.post(path, json=body)
            assert (response.status_code, response.headers.get("warning")) == (200, None), response.text
            assert response.text.endswith("data: [DONE]\n\n")

    @pytest.mark.parametrize(
        "given",
        [
            {"lora_path": None, "image_data": [None], "return_hidden_states": False, "bootstrap_host": ""},
            {"return_hidden_states": [False], "custom_logit_processor": [], "session_params": {}},
        ],
    )
    async def test_of_generate(self, cluster, given):
        await cluster.add()
        response = await cluster.http.post("/generate", json=GENERATE | given)
        assert (response.status_code, response.headers.get("warning")) == (200, None), response.text

    async def test_null_is_as_good_as_nothing(self, cluster):
        await cluster.add()
        body = COMPLETION | dict.fromkeys(("ignore_eos", "min_tokens", "priority", "logit_bias", "guided_json"))
        assert (await cluster.http.post("/v1/completions", json=body)).status_code == 200
        body = {"text": "x", "sampling_params": {"ignore_eos": None, "n": None, "max_new_tokens": 1}}
        assert (await cluster.http.post("/generate", json=body)).status_code == 200
        response = await cluster.http.post("/v1/chat/completions", json=CHAT | {"top_logprobs": 2})
        assert (response.status_code, "requires logprobs" in response.text) == (400, True)
        response = await cluster.http.post("/v1/completions", json={"prompt": None})
        assert response.json()["error"]["message"] == "prompt: Field required"


class TestWhatWorks:
    async def _text(self, cluster, **fields) -> str:
        response = await cluster.http.post("/v1/completions", json={"prompt": "x", **fields})
        assert response.status_code == 200, response.text
        whole = response.json()["choices"][0]["text"]
        response = await cluster.http.post("/v1/completions", json={"prompt": "x", "stream": True, **fields})
        chunks = [json.loads(c[6:]) for c in response.text.split("\n\n")[:-2]]
        assert "".join(c["choices"][0]["text"] for c in chunks) == whole
        return whole

    async def test_what_ends_the_text(self, cluster):
        await cluster.add()
        assert await self._text(cluster, stop=["wör"]) == "Hello, "
        assert await self._text(cluster, stop="wör", include_stop_str_in_output=True) == "Hello, wör"
        assert await self._text(cluster, stop_regex="w.r") == "Hello, "
        assert await self._text(cluster, stop_regex=["q", "w.r"], no_stop_trim=True) == "Hello, wör"
        assert await self._text(cluster, stop_regex="zz", stop="ld") == "Hello, wör"
        assert await self._text(cluster, stop_token_ids=[IDS[2]]) == "He"
        assert await self._text(cluster, stop_token_ids=[IDS[2]], include_stop_str_in_output=True) == "Hell"

    async def test_special_tokens(self, cluster):
        await cluster.add()
        assert await self._text(cluster) == TEXT
        assert await self._text(cluster, include_stop_str_in_output=True) == TEXT
        shown = await self._text(cluster, include_stop_str_in_output=True, skip_special_tokens=False)
        assert shown == TEXT + "<|endoftext|>"
        assert await self._text(cluster, skip_special_tokens=False, stop_token_ids=[EOS]) == TEXT

    @pytest.mark.parametrize("pattern", ["(", "a*", "^a", "(?=b)a", r"(a)\1", "(a{99}){99}", "a" * 2000])
    async def test_expressions_that_are_refused(self, cluster, pattern):
        await cluster.add()
        response = await cluster.http.post("/v1/completions", json=COMPLETION | {"stop_regex": pattern})
        assert response.status_code == 400
        assert "stop_regex" in response.json()["error"]["message"]

    @pytest.mark.parametrize("least", [1e-6, 1e-44, 1e-46, 1e-300])
    async def test_a_tiny_share_is_not_none(self, cluster, least):
        """As a 32-bit float it would be 0, which says that nothing is given."""
        worker = await cluster.add()
        for path, body in (("/v1/completions", COMPLETION), ("/generate", {"text": "x"})):
            given = {"top_p": least, "repetition_penalty": least}
            body = {**body, **given} if path != "/generate" else {**body, "sampling_params": given}
            assert (await cluster.http.post(path, json=body)).status_code == 200
            sampling = worker.submits[-1].sampling
            assert 0 < sampling.top_p <= 1.1e-6
            assert 0 < sampling.repetition_penalty <= 1.1e-6

    async def test_grammars_under_all_their_names(self, cluster):
        worker = await cluster.add()
        schema_text = '{"type": "object"}'
        wanted = [
            ({"guided_json": {"type": "object"}}, "json_schema", schema_text),
            ({"guided_json": schema_text}, "json_schema", schema_text),
            ({"guided_regex": "a+"}, "regex", "a+"),
            ({"guided_choice": ["a.b", "c"]}, "regex", r"a\.b|c"),
            ({"structured_outputs": {"json": {"type": "object"}}}, "json_schema", schema_text),
            ({"structured_outputs": {"json_object": True, "regex": None}}, "json_schema", schema_text),
            ({"structured_outputs": {"choice": ["a", "b"]}}, "regex", "a|b"),
        ]
        for given, kind, text in wanted:
            response = await cluster.http.post("/v1/completions", json=COMPLETION | given)
            assert response.status_code == 200, response.text
            sampling = worker.submits[-1].sampling
            shown = getattr(sampling, kind)
            if kind == "json_schema":
                schema = json.loads(shown)
                assert schema.pop("x-guidance")["lenient"]
                assert schema == json.loads(text)
            else:
                assert (sampling.grammar, shown) == ((kind, text), text)
        two = COMPLETION | {"guided_json": {}, "structured_outputs": {"regex": "a"}}
        response = await cluster.http.post("/v1/completions", json=two)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "structured_outputs")

    async def test_the_prompt_is_cut(self, cluster):
        worker = await cluster.add()
        await cluster.http.post("/v1/completions", json=COMPLETION | {"prompt": "abcdef", "truncate_prompt_tokens": 3})
        long = {"prompt": "x" * (CONTEXT + 9), "truncate_prompt_tokens": -1, "max_tokens": 12}
        assert (await cluster.http.post("/v1/completions", json=long)).status_code == 200
        await cluster.http.post("/v1/chat/completions", json=CHAT | {"truncate_prompt_tokens": 2})
        assert [submit.num_prompt_tokens for submit in worker.submits] == [3, CONTEXT - 12, 2]
        assert worker.submits[0].tokens == b"".join(i.to_bytes(4, "little") for i in TOKENIZER.encode("def").ids)

    async def test_the_model_s_own_defaults(self, cluster):
        defaults = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.5}
        worker = FakeWorker("worker-9", Role.BOTH, cluster.run_dir)
        worker.card = {"sampling_defaults": SamplingDefaults(**defaults)}
        cluster.workers.append(worker)
        await worker.start(cluster.discovery)
        assert (await cluster.http.post("/v1/completions", json=COMPLETION)).status_code == 200
        assert {name: getattr(worker.submits[0].sampling, name) for name in defaults} == defaults
        given = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
        await cluster.http.post("/v1/completions", json=COMPLETION | given)
        assert {name: getattr(worker.submits[1].sampling, name) for name in given} == given

    async def test_usage_in_every_chunk(self, cluster):
        await cluster.add()
        options = {"continuous_usage_stats": True, "include_usage": True}
        body = CHAT | {"stream": True, "stream_options": options}
        response = await cluster.http.post("/v1/chat/completions", json=body)
        usages = [json.loads(c[6:])["usage"]["completion_tokens"] for c in response.text.split("\n\n")[:-2]]
        assert usages == sorted(usages)
        assert usages[-1] == 2

    async def test_ids_of_the_client(self, cluster):
        await cluster.add()
        response = await cluster.http.post("/v1/completions", json=COMPLETION | {"request_id": "mine"})
        assert response.json()["id"] == "cmpl-mine"
        response = await cluster.http.post("/v1/chat/completions", json=CHAT | {"rid": "mine"})
        assert response.json()["id"] == "chatcmpl-mine"


def test_a_name_in_a_header_is_harmless():
    assert shown("a b\r\nc\x00é" + "x" * 99) == "a?b??c??" + "x" * 56


@pytest.mark.parametrize(
    ("path", "more", "told"),
    [
        ("/v1/responses", {"text": {"fromat": {"type": "json_object"}}}, "text.fromat"),
        ("/v1/responses", {"text": {"format": {"type": "text", "shema": {}}}}, "text.format.shema"),
        ("/v1/responses", {"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ("/v1/responses", {"include": ["reasoning.encrypted_content"]}, "include.reasoning.encrypted_content"),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "shema": {}}}},
            "response_format.json_schema.shema",
        ),
        ("/v1/completions", {"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    ],
)
async def test_an_unknown_name_inside_of_an_object_is_named(cluster, path, more, told):
    await cluster.add()
    body = {"/v1/responses": RESPONSE, "/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}[path]
    response = await cluster.http.post(path, json=body | more)
    assert response.status_code == 200, response.text
    assert response.headers["warning"] == f'299 tanghulu "unknown fields have no effect: {told}"'


class TestJson:
    async def test_a_byte_order_mark_is_passed_over(self, cluster):
        await cluster.add()
        response = await cluster.http.post("/v1/completions", content=b"\xef\xbb\xbf" + json.dumps(COMPLETION).encode())
        assert response.status_code == 200, response.text

    async def test_a_number_without_a_fraction_is_an_integer_however_it_is_written(self, cluster):
        await cluster.add()
        generate = {"text": "x", "sampling_params": {"max_new_tokens": 2.0, "temperature": 1}}
        for path, body in (("/v1/completions", COMPLETION | {"max_tokens": 2.0, "n": 1.0}), ("/generate", generate)):
            response = await cluster.http.post(path, json=body)
            assert response.status_code == 200, response.text
        response = await cluster.http.post("/v1/completions", json=COMPLETION | {"max_tokens": 2.5})
        assert response.status_code == 400

    @pytest.mark.parametrize("coding", ["gzip", "br", "deflate, gzip"])
    async def test_a_compressed_body_is_unsupported(self, cluster, coding):
        await cluster.add()
        for path, body in (("/v1/completions", COMPLETION), ("/v1/responses", RESPONSE), ("/generate", GENERATE)):
            response = await cluster.http.post(path, json=body, headers={"content-encoding": coding})
            assert response.status_code == 415, response.text
            assert coding in response.json()["error"]["message"]
        response = await cluster.http.post("/v1/completions", json=COMPLETION, headers={"content-encoding": "identity"})
        assert response.status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", COMPLETION | {"prompt": ""}, "prompt"),
        ("/v1/completions", COMPLETION | {"prompt": []}, "prompt"),
        ("/v1/completions", COMPLETION | {"prompt": [10**6]}, "prompt"),
        ("/v1/completions", COMPLETION | {"max_tokens": CONTEXT}, "prompt"),
        ("/v1/chat/completions", CHAT | {"max_tokens": CONTEXT}, "messages"),
        ("/v1/responses", RESPONSE | {"input": ""}, "input"),
        ("/v1/responses", RESPONSE | {"input": []}, "input"),
        ("/v1/responses", RESPONSE | {"max_output_tokens": CONTEXT}, "input"),
        ("/generate", GENERATE | {"text": ""}, "text"),
        ("/generate", GENERATE | {"sampling_params": {"max_new_tokens": CONTEXT}}, "text"),
        ("/generate", {"input_ids": [10**6]}, "input_ids"),
        ("/generate", {"input_ids": []}, "input_ids"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
    ],
)
async def test_an_error_about_the_prompt_names_the_field_that_has_it(cluster, path, body, param):
    await cluster.add()
    response = await cluster.http.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text


async def test_a_default_number_of_tokens_is_cut_to_the_context(cluster):
    await cluster.add()
    prompt = [1] * (CONTEXT - 3)
    for path, body in (("/v1/completions", {"prompt": prompt}), ("/generate", {"input_ids": prompt})):
        response = await cluster.http.post(path, json=body)
        assert response.status_code == 200, response.text
