"""Every field of the APIs: it works, is refused by name, or is known to change nothing. Nothing else is silent."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from tanghulu.conductor.http import fields
from tanghulu.conductor.http.fields import ROWS, TABLE, Effect, FieldRow
from tanghulu.conductor.http.reply import parse_fields
from tanghulu.conductor.http.responses.bodies import FormatOfText, ReasoningOptions, ResponsesBody, TextOptions
from tanghulu.conductor.inference import schema
from tanghulu.conductor.inference.schema import Api
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
BODIES = {
    Api.CHAT: schema.ChatBody,
    Api.COMPLETIONS: schema.CompletionBody,
    Api.RESPONSES: ResponsesBody,
    Api.GENERATE: schema.GenerateBody,
    Api.SAMPLING_PARAMS: schema.SGLangSampling,
    Api.STREAM_OPTIONS: schema.StreamOptions,
    Api.STRUCTURED_OUTPUTS: schema.StructuredOutputs,
    Api.RESPONSE_FORMAT: schema.ResponseFormat,
    Api.JSON_SCHEMA: schema.JsonSchema,
    Api.TEXT: TextOptions,
    Api.TEXT_FORMAT: FormatOfText,
    Api.REASONING: ReasoningOptions,
}
_BODY_OF = {api.value: BODIES[api] for api in (Api.CHAT, Api.COMPLETIONS, Api.RESPONSES, Api.GENERATE)}
#: vLLM's and SGLang's own fields, as their servers define them, beyond those that OpenAI has.
VLLM = """
    best_of use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output
    ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs
    allowed_token_ids bad_words echo add_special_tokens mm_processor_kwargs guided_json guided_regex guided_choice
    guided_grammar structural_tag guided_decoding_backend guided_whitespace_pattern structured_outputs priority
    request_id logits_processors return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs
    """.split()  # noqa: SIM905
VLLM_CHAT = """
    include_reasoning add_generation_prompt continue_final_message documents chat_template chat_template_kwargs
    """.split()  # noqa: SIM905
SGLANG = """
    rid session_id text input_ids input_embeds image_data video_data audio_data mm_hashes use_audio_in_video
    sampling_params return_logprob logprob_start_len top_logprobs_num token_ids_logprob return_sampling_mask
    return_text_in_logprobs return_flat_raw_top_logprobs stream log_metrics return_hidden_states return_routed_experts
    modalities session_params lora_path lora_id custom_logit_processor positional_embed_overrides bootstrap_host
    bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size routed_dp_rank data_parallel_rank
    disagg_prefill_dp_rank kv_router_hint routing_key conversation_id background require_reasoning max_thinking_tokens
    priority extra_key no_logs custom_labels return_bytes return_entropy return_prompt_token_ids external_trace_header
    received_time max_dynamic_patch min_dynamic_patch images_config multi_item_delimiter_indices cache_salt
    """.split()  # noqa: SIM905
SGLANG_SAMPLING = """
    max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty presence_penalty
    repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag ignore_eos skip_special_tokens
    spaces_between_special_tokens no_stop_trim custom_params stream_interval logit_bias sampling_seed
    """.split()  # noqa: SIM905


def _request(row: FieldRow, api: Api) -> tuple[str, dict]:
    """The route and the body that carry the row's example."""
    given = {row.name: row.example}
    match api:
        case Api.CHAT:
            return api.value, CHAT | given
        case Api.COMPLETIONS:
            return api.value, COMPLETION | given
        case Api.RESPONSES:
            return api.value, RESPONSE | given
        case Api.GENERATE:
            return api.value, {k: v for k, v in GENERATE.items() if (row.name, k) != ("input_ids", "text")} | given
        case Api.SAMPLING_PARAMS:
            return "/generate", GENERATE | {"sampling_params": GENERATE["sampling_params"] | given}
        case Api.STREAM_OPTIONS:
            return "/v1/completions", COMPLETION | {"stream": True, "stream_options": given}
        case Api.STRUCTURED_OUTPUTS:
            return "/v1/completions", COMPLETION | {"structured_outputs": given}
        case Api.RESPONSE_FORMAT:
            typed = {"type": row.name if row.name == "json_schema" else "text"}
            return "/v1/completions", COMPLETION | {"response_format": typed | given}
        case Api.JSON_SCHEMA:
            return "/v1/completions", COMPLETION | {"response_format": {"type": "json_schema", "json_schema": given}}
        case Api.TEXT:
            return "/v1/responses", RESPONSE | {"text": given}
        case Api.TEXT_FORMAT:
            return "/v1/responses", RESPONSE | {"text": {"format": {"type": "json_schema", "name": "x"} | given}}
        case Api.REASONING:
            return "/v1/responses", RESPONSE | {"reasoning": given}


@pytest.mark.parametrize("row", [row for row in ROWS if row.effect is Effect.REFUSED], ids=lambda row: row.name)
def test_what_is_refused_is_refused_by_name(row):
    for api in row.apis:
        path, body = _request(row, api)
        with pytest.raises(BadField, match="is not supported") as caught:
            parse_fields(_BODY_OF[path], json.dumps(body).encode())
        inside = {
            Api.SAMPLING_PARAMS: "sampling_params",
            Api.STRUCTURED_OUTPUTS: "structured_outputs",
            Api.TEXT: "text",
        }.get(api)
        assert caught.value.param == (inside or row.name)
        assert row.name in caught.value.message
        assert row.note in caught.value.message


@pytest.mark.parametrize("row", [row for row in ROWS if row.effect is Effect.REFUSED], ids=lambda row: row.name)
def test_what_is_refused_passes_where_it_asks_for_nothing(row):
    for api in row.apis:
        for value in (None, False, "", {}, [], [None, False], *row.neutral):
            path, body = _request(dataclasses.replace(row, example=value), api)
            assert not parse_fields(_BODY_OF[path], json.dumps(body).encode()).unknown


async def test_what_is_not_refused_is_served_without_a_warning(cluster):
    await cluster.add()

    async def send(row: FieldRow, api: Api) -> None:
        path, body = _request(row, api)
        response = await cluster.http.post(path, json=body)
        told = (row.name, api.value, response.text)
        assert (response.status_code, response.headers.get("warning")) == (200, None), told

    rows = [(row, api) for row in ROWS for api in row.apis if row.effect is not Effect.REFUSED]
    named = [(row, api) for row, api in rows if row.name in ("rid", "request_id")]
    for row, api in named:  # one of a name at a time
        await send(row, api)
    for first in range(0, len(rows), 16):
        some = [(row, api) for row, api in rows[first : first + 16] if (row, api) not in named]
        await asyncio.gather(*(send(row, api) for row, api in some))


@pytest.mark.parametrize("api", list(Api))
def test_what_works_has_a_type_and_what_has_a_type_works(api):
    model = BODIES[api]
    typed = {field.alias or name for name, field in model.model_fields.items()}
    works = {row.name for row in TABLE[api].values() if row.effect is Effect.WORKS}
    assert model.api is api
    assert works == typed
    assert len(TABLE[api]) == sum(api in row.apis for row in ROWS), "a name stands twice"


def test_a_field_that_does_not_work_says_why():
    assert not [row.name for row in ROWS if row.effect is not Effect.WORKS and not row.note]


def test_all_fields_of_the_apis_have_rows():
    openai_chat = set(chat_create_params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    openai_response = set(response_create_params.ResponseCreateParamsBase.__annotations__) | {"stream"}
    openai_text = set(completion_create_params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    assert not openai_chat - TABLE[Api.CHAT].keys()
    assert not openai_response - TABLE[Api.RESPONSES].keys()
    assert not openai_text - TABLE[Api.COMPLETIONS].keys()
    assert not {*VLLM, *VLLM_CHAT} - TABLE[Api.CHAT].keys()
    assert not set(VLLM) - TABLE[Api.COMPLETIONS].keys()
    assert not set(SGLANG) - TABLE[Api.GENERATE].keys()
    assert not set(SGLANG_SAMPLING) - TABLE[Api.SAMPLING_PARAMS].keys()


def test_the_table_of_the_docs_is_this_one():
    path = Path(__file__).parents[3] / "tools" / "field_tables.py"
    spec = importlib.util.spec_from_file_location("field_tables", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["field_tables"] = module
    spec.loader.exec_module(module)
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
            assert error["message"] == "temperatur is no field of this request; did you mean 'temperature'?"
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
        assert (response.status_code, "needs logprobs" in response.text) == (400, True)
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
    assert fields.shown("a b\r\nc\x00é" + "x" * 99) == "a?b??c??" + "x" * 56


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
