"""The fields of the APIs that are spoken here: OpenAI's, vLLM's additions to it, SGLang's ``/generate``.

One table says of each what becomes of it: it works, it is refused with 400, or it is taken and changes nothing, and
why. Bodies are checked by it, docs/http.md is written from it, and a test sends every row. Owns the names; the types
and bounds of those that work are `inference.schema`'s.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from tanghulu.conductor.inference.schema import Api
from tanghulu.web.errors import BadField

#: Names of unknown fields that an answer tells of.
_MOST_TOLD: Final = 8
_MOST_NAME_CHARACTERS: Final = 64
_UNPRINTABLE: Final = re.compile(r"[^A-Za-z0-9_.\-]")


class Effect(Enum):
    """What becomes of a field."""

    WORKS = "works"
    REFUSED = "refused"
    NONE = "no effect"


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One field of some APIs. ``example`` is sent by a test; ``neutral`` are values that ask for nothing."""

    name: str
    apis: tuple[Api, ...]
    effect: Effect
    note: str
    example: Any
    neutral: tuple[Any, ...] = ()


OPENAI: Final = (Api.CHAT, Api.COMPLETIONS)
BODIES: Final = (*OPENAI, Api.GENERATE)
ROUTED: Final = (*BODIES, Api.RESPONSES)
SAMPLING: Final = (*OPENAI, Api.SAMPLING_PARAMS)
_CHAT: Final = (Api.CHAT,)
_COMPLETIONS: Final = (Api.COMPLETIONS,)
_RESPONSES: Final = (Api.RESPONSES,)
_GENERATE: Final = (Api.GENERATE,)
_PARAMS: Final = (Api.SAMPLING_PARAMS,)
_STREAM: Final = (Api.STREAM_OPTIONS,)
_STRUCTURED: Final = (Api.STRUCTURED_OUTPUTS,)
_FORMAT: Final = (Api.RESPONSE_FORMAT,)
_SCHEMA: Final = (Api.JSON_SCHEMA,)
_TEXT_FORMAT: Final = (Api.TEXT_FORMAT,)


def _works(name: str, apis: tuple[Api, ...], example: Any, note: str = "") -> FieldRow:
    return FieldRow(name, apis, Effect.WORKS, note, example)


def _refused(name: str, apis: tuple[Api, ...], example: Any, note: str, *neutral: Any) -> FieldRow:
    return FieldRow(name, apis, Effect.REFUSED, note, example, neutral)


def _idle(name: str, apis: tuple[Api, ...], example: Any, note: str) -> FieldRow:
    return FieldRow(name, apis, Effect.NONE, note, example)


_TEXT_ONLY: Final = "models here read and write text alone; leave it out"
_NO_ADAPTERS: Final = "no adapters are served; start workers with the merged model and name it in model"
_OWN_CODE: Final = "code of a request's own is not run; use logit_bias, a grammar or a stop rule"
_SAMPLED_SEARCH: Final = "there is no beam search; use n with temperature"
_OWN_HAND_OVER: Final = "KV is handed over without the client's doing; send the request to the conductor alone"
_OWN_ROUTING: Final = "workers are named by id; use routing.worker"
_OF_TEXT: Final = "the answer has text and log probabilities alone"
_NO_CFG: Final = "context-free grammars are not compiled here; use json_schema or regex"
_NO_CONTROLLED: Final = "only logit_bias acts on single tokens; use it with -100 or 100"
_NOTHING_KEPT: Final = "nothing of a request is kept"
_FOR_OTHERS: Final = "of use to whoever bills or logs, which the conductor does not"

ROWS: Final = (
    # --- the prompt
    _works("messages", _CHAT, [{"role": "user", "content": "hi"}], "required; content as a text or as text parts"),
    _works("prompt", _COMPLETIONS, "x", "required; a text, token ids, or a list of either"),
    _works("text", _GENERATE, "x", "a text or a list; either this or input_ids"),
    _works("input_ids", _GENERATE, [1, 2], "token ids or a list of them; either this or text"),
    _works("model", ROUTED, "tiny", "the first model that is served, if it is left out"),
    _works("sampling_params", _GENERATE, {"n": 1}, "an object, or one for each prompt"),
    _works("truncate_prompt_tokens", OPENAI, 4, "the last tokens of the prompt that are kept; -1: as many as fit"),
    _works("add_special_tokens", OPENAI, True, "whether the tokenizer adds its own (bos) to a text"),
    _works("add_generation_prompt", _CHAT, True, "whether the template opens the assistant's turn"),
    _works("chat_template_kwargs", _CHAT, {"x": 1}, "variables for the template; not messages, tools or self"),
    _works("documents", _CHAT, [{"title": "a", "text": "b"}], "a variable for the template"),
    _works("reasoning_effort", _CHAT, "low", "a variable for the template"),
    _refused("chat_template", _CHAT, "{{ x }}", "templates come with the model; use chat_template_kwargs"),
    _refused("continue_final_message", _CHAT, True, "the last message is closed; use /v1/completions to go on with it"),
    _refused("input_ids", _CHAT, [1], "send them to /generate or as the prompt of /v1/completions"),
    _refused("prompt_embeds", _COMPLETIONS, "AA==", "prompts are texts or token ids"),
    _refused("input_embeds", _GENERATE, [[0.5]], "prompts are texts or token ids; use text or input_ids"),
    _refused("positional_embed_overrides", _GENERATE, {"x": 1}, "prompts are texts or token ids"),
    *(_refused(f"{kind}_data", _GENERATE, "x", _TEXT_ONLY) for kind in ("image", "video", "audio")),
    _refused("audio", _CHAT, {"voice": "x"}, _TEXT_ONLY),
    _refused("modalities", (Api.CHAT, Api.GENERATE), ["audio"], _TEXT_ONLY, ["text"]),
    _refused("mm_processor_kwargs", OPENAI, {"x": 1}, _TEXT_ONLY),
    _refused("media_io_kwargs", _CHAT, {"x": 1}, _TEXT_ONLY),
    _refused("video_config", _GENERATE, {"x": 1}, _TEXT_ONLY),
    _refused("images_config", _GENERATE, {"x": 1}, _TEXT_ONLY),
    _refused("mm_hashes", _GENERATE, ["x"], _TEXT_ONLY),
    _refused("mm_content_hashes", _GENERATE, ["x"], _TEXT_ONLY),
    _idle("use_audio_in_video", _GENERATE, True, "there is no video to take it from"),
    _idle("max_dynamic_patch", _GENERATE, 1, "for images"),
    _idle("min_dynamic_patch", _GENERATE, 1, "for images"),
    _idle("image_max_dynamic_patch", _GENERATE, 1, "for images"),
    _idle("video_max_dynamic_patch", _GENERATE, 1, "for images"),
    _refused("multi_item_delimiter_indices", _GENERATE, [1], "prompts are not scored in parts; send one for each"),
    _refused("session_params", _GENERATE, {"id": "x"}, "prompts are not kept; send the whole, its prefix is cached"),
    _refused("suffix", _COMPLETIONS, "x", "text is only written behind the prompt"),
    _refused("web_search_options", _CHAT, {"x": 1}, "nothing is searched; give what was found in messages", {}),
    _refused("moderation", _CHAT, {"model": "x"}, "nothing is moderated; do it beside this request"),
    # --- how long, and what ends it
    _works("max_tokens", _CHAT, 2, "to the end of the context, if it is left out"),
    _works("max_tokens", _COMPLETIONS, 2, "16, if it is left out; 0: no text, with echo and logprobs the prompt's"),
    _works("max_completion_tokens", _CHAT, 2, "goes before max_tokens"),
    _works("max_new_tokens", _PARAMS, 2, "128, if it is left out; null: to the end of the context; 0: no text"),
    _works("min_tokens", SAMPLING, 1, "no stop rule ends the text before"),
    _works("min_new_tokens", _PARAMS, 1, "as min_tokens"),
    _works("stop", OPENAI, ["q", "z"], "a text or up to 4"),
    _works("stop", _PARAMS, ["1", "2", "3", "4", "5"], "a text or up to 64"),
    _works("stop_regex", SAMPLING, ["q+z"], "an expression or up to 4, without anchors or looking around"),
    _works("stop_token_ids", SAMPLING, [9], "up to 256"),
    _works("ignore_eos", SAMPLING, True),
    _works("include_stop_str_in_output", SAMPLING, True, "vLLM's name"),
    _works("no_stop_trim", SAMPLING, True, "SGLang's name for the same"),
    # --- drawing tokens
    _works("temperature", SAMPLING, 0.5, "0 to 100; the model's own default, else 1"),
    _works("top_p", SAMPLING, 0.5, "the model's own default, else 1"),
    _works("top_k", SAMPLING, 5, "-1 or 0: off; the model's own default, else off"),
    _works("min_p", SAMPLING, 0.1, "the model's own default, else 0"),
    _works("frequency_penalty", SAMPLING, 0.5, "-2 to 2"),
    _works("presence_penalty", SAMPLING, 0.5, "-2 to 2"),
    _works("repetition_penalty", SAMPLING, 1.1, "above 0, to 10; the model's own default, else 1"),
    _works("logit_bias", SAMPLING, {"3": 1.5}, "token id -> -100 to 100; up to 1024"),
    _works("seed", SAMPLING, 7, "choice i of n draws with seed + i; the same text again only with --batch-invariant"),
    _works("sampling_seed", _PARAMS, 7, "goes before seed"),
    _works("n", SAMPLING, 2, "1 to 16; the prompt is shared; alike for all prompts of a batch"),
    _works("best_of", OPENAI, 1, "only as many as n"),
    _refused("use_beam_search", OPENAI, True, _SAMPLED_SEARCH),
    _refused("length_penalty", OPENAI, 2.0, _SAMPLED_SEARCH, 1, 1.0),
    _refused("allowed_token_ids", OPENAI, [1], "use guided_choice or guided_regex, or logit_bias"),
    _refused("bad_words", OPENAI, ["x"], _NO_CONTROLLED),
    _refused("logits_processors", OPENAI, ["x"], _OWN_CODE),
    _refused("custom_logit_processor", BODIES, "x", _OWN_CODE),
    _refused("custom_params", SAMPLING, {"x": 1}, _OWN_CODE),
    _refused("vllm_xargs", OPENAI, {"x": 1}, _OWN_CODE),
    _refused("max_thinking_tokens", BODIES, 5, "a chain of thought has no bound of its own; use max_tokens"),
    _refused("thinking_token_budget", OPENAI, 5, "a chain of thought has no bound of its own; use max_tokens"),
    _refused("require_reasoning", _GENERATE, True, "say so in chat_template_kwargs of a chat, where the model can"),
    _refused("verbosity", (Api.CHAT, Api.TEXT), "low", "no model here knows it; say so in messages", "medium"),
    _idle("prediction", _CHAT, {"type": "content", "content": "x"}, "would only make it faster"),
    # --- grammars
    _works("response_format", OPENAI, {"type": "text"}, "text, json_object or json_schema"),
    _works("type", _FORMAT, "text", "text, json_object or json_schema"),
    _works("json_schema", _FORMAT, {"name": "x", "schema": {"type": "object"}}, "with type json_schema"),
    _works("name", (*_SCHEMA, *_TEXT_FORMAT), "x", "not shown to the model"),
    _works("schema", (*_SCHEMA, *_TEXT_FORMAT), {"type": "object"}, "any JSON, if it is left out"),
    _works("strict", (*_SCHEMA, *_TEXT_FORMAT), True, "rejects a schema of which something would not be enforced"),
    _idle("description", (*_SCHEMA, *_TEXT_FORMAT), "x", "the model is not shown it; say it in a message"),
    _works("json_schema", SAMPLING, '{"type":"object"}', "a JSON schema as a text; one grammar a request"),
    _works("regex", SAMPLING, "a+", "the whole text matches it"),
    _works("guided_json", OPENAI, {"type": "object"}, "a JSON schema, as a text or not"),
    _works("guided_regex", OPENAI, "a+", "as regex"),
    _works("guided_choice", OPENAI, ["a", "b"], "up to 256 texts, of which the answer is one"),
    _works("structured_outputs", OPENAI, {"choice": ["a"]}, "one of json, regex, choice, json_object"),
    _works("json", _STRUCTURED, {"type": "object"}, "as guided_json"),
    _works("regex", _STRUCTURED, "a+", "as regex"),
    _works("choice", _STRUCTURED, ["a"], "as guided_choice"),
    _works("json_object", _STRUCTURED, True, "any JSON object"),
    _refused("grammar", _STRUCTURED, "x", _NO_CFG),
    _refused("structural_tag", _STRUCTURED, "x", _NO_CFG),
    _refused("whitespace_pattern", _STRUCTURED, "x", "blanks are as the grammar's compiler has them; write a regex"),
    _idle("disable_fallback", _STRUCTURED, True, "there is one compiler of grammars"),
    _idle("disable_any_whitespace", _STRUCTURED, False, "blanks are as the grammar's compiler has them"),
    _idle("disable_additional_properties", _STRUCTURED, False, "say so in the schema"),
    _refused("guided_grammar", OPENAI, "x", _NO_CFG),
    _refused("ebnf", SAMPLING, "x", _NO_CFG),
    _refused("structural_tag", SAMPLING, "x", _NO_CFG),
    _refused("guided_whitespace_pattern", OPENAI, "x", "blanks are as the grammar's compiler has them; write a regex"),
    _idle("guided_decoding_backend", OPENAI, "auto", "there is one compiler of grammars"),
    # --- tools and reasoning
    _works(
        "tools",
        _CHAT,
        [{"type": "function", "function": {"name": "f"}}],
        "functions that the model may call; docs/tools.md",
    ),
    _works("tool_choice", _CHAT, "none"),
    _works("parallel_tool_calls", _CHAT, True),
    _refused("functions", _CHAT, [{"name": "f"}], "the old name; use tools"),
    _refused("function_call", _CHAT, "auto", "the old name; use tool_choice", "none"),
    _idle("separate_reasoning", _CHAT, True, "the model's parser decides, not the request"),
    _idle("stream_reasoning", _CHAT, True, "the model's parser decides, not the request"),
    _idle("include_reasoning", _CHAT, True, "the model's parser decides, not the request"),
    # --- what the answer has
    _works("stream", ROUTED, False),
    _works("stream_options", OPENAI, {"include_usage": True}),
    _works("include_usage", _STREAM, True, "a last chunk with the usage"),
    _works("continuous_usage_stats", _STREAM, True, "the usage so far in each chunk"),
    _idle("include_obfuscation", _STREAM, True, "chunks are not padded"),
    _works("stream_output", _GENERATE, True, "a stream's texts and ids are what is new; else all so far"),
    _idle("stream_interval", _PARAMS, 1, "a chunk for each step"),
    _works("echo", _COMPLETIONS, True, "the prompt in front of the text, and its log probabilities with logprobs"),
    _refused("echo", _CHAT, True, "of /v1/completions alone"),
    _works("logprobs", _CHAT, True, "of the generated tokens"),
    _works("top_logprobs", _CHAT, 0, "0 to 20; with logprobs"),
    _works("logprobs", _COMPLETIONS, 2, "0 to 20, of the generated tokens; with echo of the prompt's, too"),
    _works("prompt_logprobs", OPENAI, 1, "0 to 20 beside each token of the prompt; not in a stream"),
    _refused("logprob_token_ids", OPENAI, [1], "those of the most likely tokens are given: top_logprobs or logprobs"),
    _refused("return_tokens_as_token_ids", OPENAI, True, "/generate gives token ids: output_ids"),
    _refused("return_token_ids", OPENAI, True, "/generate gives token ids: output_ids"),
    _works("return_logprob", _GENERATE, True, "of the generated tokens; one value, or one for each prompt"),
    _works("logprob_start_len", _GENERATE, 0, "the prompt's from this token on, whose own is null; -1: none"),
    _works("top_logprobs_num", _GENERATE, 2, "0 to 20"),
    _works("token_ids_logprob", _GENERATE, [1], "up to 128 token ids, or such a list for each prompt"),
    _works("return_text_in_logprobs", _GENERATE, True),
    *(
        _refused(name, _GENERATE, True, "log probabilities are lists for each token")
        for name in ("return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64", "return_sampling_mask")
    ),
    _works("skip_special_tokens", SAMPLING, False, "whether special tokens are left out of the text"),
    _idle("spaces_between_special_tokens", SAMPLING, False, "for tokenizers that are not served here"),
    *(
        _refused(name, BODIES, True, _OF_TEXT)
        for name in ("return_hidden_states", "return_routed_experts", "return_indexer_topk", "return_bytes")
    ),
    _refused("return_entropy", _GENERATE, True, _OF_TEXT),
    _refused("return_prompt_token_ids", BODIES, True, "/tokenize gives them"),
    _idle("routed_experts_start_len", _GENERATE, 0, "for return_routed_experts"),
    _idle("return_cached_tokens_details", OPENAI, True, "cached tokens are always told"),
    # --- names, order, place
    _works("request_id", OPENAI, "mine", "the id of the answer, without its prefix"),
    _works("rid", OPENAI, "mine", "SGLang's name for request_id"),
    _works("rid", _GENERATE, "mine", "one, or one for each prompt; /abort_request takes it"),
    _works("priority", ROUTED, 1, "higher goes first among a client's own, -2^31 to 2^31 - 1"),
    _works("user", ROUTED, "me", "where many wait, users take turns; without it, keys or addresses do"),
    _works("request_timeout", ROUTED, 30.0, "seconds; no longer than the conductor's own, nor are the next two"),
    _works("first_token_timeout", ROUTED, 30.0, "seconds from the request's arrival"),
    _works("token_timeout", ROUTED, 30.0, "seconds from each token to the next"),
    _works("cache_salt", ROUTED, "me", "only requests of the same salt share KV"),
    _works("extra_key", ROUTED, "me", "a further salt"),
    _works("prompt_cache_key", ROUTED, "me", "requests of one key go to one worker, with +session-affinity"),
    _works("session_id", _GENERATE, "me", "as prompt_cache_key"),
    _works("routing", ROUTED, {"policy": "ttft-min"}, "policy, worker, prefill_worker, decode_worker, weights"),
    *(_refused(n, BODIES, 1, _OWN_ROUTING) for n in ("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank")),
    *(
        _refused(name, BODIES, "x", _OWN_HAND_OVER)
        for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size")
    ),
    _refused("kv_transfer_params", OPENAI, {"x": 1}, _OWN_HAND_OVER),
    _refused("kv_router_hint", _GENERATE, {"x": 1}, _OWN_HAND_OVER),
    *(_refused(name, BODIES, "x", _NO_ADAPTERS) for name in ("lora_path", "lora_id")),
    _refused("background", _GENERATE, True, "an answer is not kept for later; leave it out"),
    _idle("routing_key", BODIES, "x", "use prompt_cache_key"),
    _idle("conversation_id", BODIES, "x", "use prompt_cache_key"),
    _idle("prompt_cache_retention", (Api.CHAT, Api.RESPONSES), "24h", "the caches keep what is used"),
    _idle("prompt_cache_options", (Api.CHAT, Api.RESPONSES), {"x": 1}, "the caches keep what is used"),
    _idle("safety_identifier", (Api.CHAT, Api.RESPONSES), "me", _FOR_OTHERS),
    _idle("service_tier", (Api.CHAT, Api.RESPONSES), "auto", "there is one; use priority"),
    _idle("store", OPENAI, True, _NOTHING_KEPT),
    _idle("metadata", OPENAI, {"a": "b"}, _NOTHING_KEPT),
    # --- /v1/responses
    _works("input", _RESPONSES, "hi", "required; a text, or items: messages, calls, their outputs, reasoning"),
    _works("instructions", _RESPONSES, "be brief", "a system message in front; not kept for the next turn"),
    _works("max_output_tokens", _RESPONSES, 2, "to the end of the context, if it is left out"),
    _works("temperature", _RESPONSES, 0.5, "as of a chat"),
    _works("top_p", _RESPONSES, 0.5, "as of a chat"),
    _works("top_logprobs", _RESPONSES, 2, "0 to 20; beside the text in the output"),
    _works(
        "include",
        _RESPONSES,
        ["message.output_text.logprobs"],
        "message.output_text.logprobs; there is no more",
    ),
    _works("tools", _RESPONSES, [{"type": "function", "name": "f"}], "functions; docs/tools.md"),
    _works("tool_choice", _RESPONSES, "none", "none, auto, required, or a function by its name"),
    _works("parallel_tool_calls", _RESPONSES, True),
    _works("text", _RESPONSES, {"format": {"type": "text"}}, "format: text, json_object or json_schema"),
    _works("format", (Api.TEXT,), {"type": "text"}, "text, json_object or json_schema, with name and schema in it"),
    _works("type", _TEXT_FORMAT, "json_schema", "text, json_object or json_schema"),
    _works("reasoning", _RESPONSES, {"effort": "low"}, "effort"),
    _works("effort", (Api.REASONING,), "low", "a variable for the template"),
    _works("store", _RESPONSES, False, "true, if it is left out: kept in this process, as long as there is room"),
    _works("previous_response_id", _RESPONSES, None, "the turns before; 400 if they are no longer kept"),
    _works("metadata", _RESPONSES, {"a": "b"}, "comes back in the response"),
    _refused("background", _RESPONSES, True, "an answer is not made for later; leave it out"),
    _refused("conversation", _RESPONSES, "conv_1", "conversations are not kept; use previous_response_id"),
    _refused("prompt", _RESPONSES, {"id": "x"}, "no templates of prompts are kept; send the text as input"),
    _refused("truncation", _RESPONSES, "auto", "nothing is left out of an input; shorten it", "disabled"),
    _refused("context_management", _RESPONSES, [{"type": "compaction"}], "nothing is left out of an input; shorten it"),
    _refused("moderation", _RESPONSES, {"model": "x"}, "nothing is moderated; do it beside this request"),
    _refused("image", _RESPONSES, {"x": 1}, _TEXT_ONLY),
    _refused("access_programs", _RESPONSES, ["x"], "there are none"),
    _idle("max_tool_calls", _RESPONSES, 1, "of tools that a server runs, and there are none"),
    _idle("stream_options", _RESPONSES, {"include_obfuscation": False}, "chunks are not padded"),
    _idle("no_logs", _GENERATE, True, "prompts and answers are never logged"),
    _idle("log_metrics", _GENERATE, False, "requests always count"),
    _idle("custom_labels", BODIES, {"a": "b"}, "metrics have the model and the status alone"),
    _idle("external_trace_header", _GENERATE, {"a": "b"}, _FOR_OTHERS),
    _idle("received_time", _GENERATE, 1.5, _FOR_OTHERS),
)

TABLE: Final[Mapping[Api, Mapping[str, FieldRow]]] = {
    api: {row.name: row for row in ROWS if api in row.apis} for api in Api
}

#: The fields that hold objects with fields of their own.
INSIDE: Final = {
    "sampling_params": Api.SAMPLING_PARAMS,
    "stream_options": Api.STREAM_OPTIONS,
    "structured_outputs": Api.STRUCTURED_OUTPUTS,
    "response_format": Api.RESPONSE_FORMAT,
    "json_schema": Api.JSON_SCHEMA,
    "text": Api.TEXT,
    "format": Api.TEXT_FORMAT,
    "reasoning": Api.REASONING,
}
#: Where null says something, and not that the field is left out.
NULL_SAYS: Final = frozenset(("max_new_tokens",))


def check(api: Api, given: Mapping[str, Any], inside: str = "") -> list[str]:
    """The names of ``given`` that no row has. Raises BadField for a field that is refused and asks for something.

    ``inside`` is the path of the object that has them, with a dot behind.
    """
    rows = TABLE[api]
    unknown = []
    for name, value in given.items():
        row = rows.get(name)
        if row is None:
            unknown.append(f"{inside}{name}")
        elif row.effect is Effect.REFUSED and not (_asks_nothing(value) or value in row.neutral):
            raise BadField(f"{inside}{name} is not supported: {row.note}", inside.partition(".")[0] or name)
    return unknown


def _asks_nothing(value: Any) -> bool:
    """Whether ``value`` is what clients send that mean to leave a field out."""
    if isinstance(value, list):
        return all(item is None or item is False for item in value)
    return value is None or value is False or value in ("", {})


def refusal(api: Api | None, unknown: Iterable[str]) -> BadField:
    """The error for ``unknown`` names, with the nearest known one where there is one that is near."""
    first = next(iter(unknown))
    name = first.rpartition(".")[2]
    near = difflib.get_close_matches(name[:_MOST_NAME_CHARACTERS], TABLE[api] if api else (), 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return BadField(f"{shown(first)} is no field of this request{hint}", shown(first).partition(".")[0])


def shown(name: str) -> str:
    """A client's name for a field as it may stand in a header: short, and of harmless characters."""
    return _UNPRINTABLE.sub("?", name[:_MOST_NAME_CHARACTERS])


def warning(unknown: tuple[str, ...]) -> str:
    """The value of a Warning header (RFC 7234, code 299) that tells of ``unknown`` names."""
    more = f" and {len(unknown) - _MOST_TOLD} more" if len(unknown) > _MOST_TOLD else ""
    return f'299 tanghulu "unknown fields have no effect: {", ".join(map(shown, unknown[:_MOST_TOLD]))}{more}"'
