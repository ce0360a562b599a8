"""Demand of a request's body on the pools: its length in tokens, estimated without a tokenizer.

Pure. Token ids are counted; texts are estimated by their characters, since the router serves several models and has no
tokenizer. Targets are given in ``"slo": {"ttft_s": 1.0, "tbt_s": 0.05}`` of the body; that field is not forwarded to
conductors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import msgspec

from tanghulu.conductor.inference.json_marks import check_marks
from tanghulu.conductor.pool_router.grid import Demand
from tanghulu.errors import InvalidRequest

_PROMPTS = ("messages", "prompt", "input", "input_ids", "text")
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens")
#: Upper limit of tokens and seconds; larger numbers are clamped to it.
_MOST = 1 << 32

#: A text in a tool's result: a message has a list of blocks, one of which has a list of blocks with a text each.
_MOST_DEPTH = 6


def parse_body(body: bytes) -> dict[str, Any]:
    """Parse the body as an object. Raises InvalidRequest; BadField for too many values."""
    check_marks(body)
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # not JSON, not UTF-8, nested too deep
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidRequest("the body is not a JSON object")
    return data


def is_token_ids(prompt: Any) -> TypeGuard[list[int]]:
    """Return whether ``prompt`` is a list of token ids, at least one."""
    return isinstance(prompt, list) and bool(prompt) and all(type(i) is int and 0 <= i < 1 << 32 for i in prompt)


def demand_of(data: Mapping[str, Any], characters_per_token: float) -> Demand:
    """Return the demand of the body of any generating route. Raises InvalidRequest for malformed targets."""
    tokens = _tokens(data.get(_prompt_field(data)), characters_per_token)
    tokens += round(_characters(data.get("system")) / characters_per_token)
    slo = data.get("slo")
    if slo is None:
        slo = {}
    if not isinstance(slo, dict):
        raise InvalidRequest(f"slo is {slo!r:.80}; it must be an object with ttft_s and tbt_s")
    return Demand(tokens, tokens + _most_new(data), _target(slo, "ttft_s"), _target(slo, "tbt_s"))


def prefill_only(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request for one token only: it leaves the prompt's KV in the store, and its answer is discarded."""
    once = {key: value for key, value in data.items() if key not in ("stream", "stream_options", "n", "best_of", "rid")}
    field = _prompt_field(data)
    if field == "input":
        return {**once, "max_output_tokens": 1, "store": False}
    if field in ("input_ids", "text"):
        sampling = data.get("sampling_params")
        sampling = {key: value for key, value in sampling.items() if key != "n"} if isinstance(sampling, dict) else {}
        return {**once, "sampling_params": {**sampling, "max_new_tokens": 1}}
    once.pop("max_completion_tokens", None)
    return {**once, "max_tokens": 1}


def _prompt_field(data: Mapping[str, Any]) -> str:
    """Return the name of the field with the prompt; "" if none has it."""
    return next((name for name in _PROMPTS if data.get(name) is not None), "")


def _tokens(prompt: Any, characters_per_token: float, *, several: bool = True) -> int:
    """Return the tokens of the longest of ``several`` prompts, which are served one by one."""
    if isinstance(prompt, str):
        return round(len(prompt) / characters_per_token)
    if not isinstance(prompt, list) or not prompt:
        return 0
    if isinstance(prompt[0], int):
        return len(prompt)
    if isinstance(prompt[0], dict):
        return round(sum(_characters(message) for message in prompt) / characters_per_token)
    if not several:
        raise InvalidRequest("the prompt must be a text, token ids, or a list of these")
    return max(_tokens(each, characters_per_token, several=False) for each in prompt)


def _characters(item: Any, depth: int = _MOST_DEPTH) -> int:
    """Return the characters in a text, in a message or a part of one, or in a list of them."""
    if isinstance(item, list) and depth:
        return sum(_characters(each, depth - 1) for each in item)
    if isinstance(item, dict) and depth:
        return sum(_characters(item.get(name), depth - 1) for name in ("content", "text"))
    return len(item) if isinstance(item, str) else 0


def _most_new(data: Mapping[str, Any]) -> int:
    sampling = data.get("sampling_params")
    for fields in (data, sampling if isinstance(sampling, dict) else {}):
        for name in _LIMITS:
            value = fields.get(name)
            if isinstance(value, int) and value > 0:
                return min(value, _MOST)
    return 0


def _target(slo: Mapping[str, Any], name: str) -> float | None:
    value = slo.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST:
        raise InvalidRequest(f"slo.{name} is {value!r:.80}; it must be a number of seconds above 0")
    return float(value)
