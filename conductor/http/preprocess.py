"""From a checked body to the sequences it asks for: chat template, tokens, sampling, stop rules.

Owns the defaults. Everything that can be wrong with a request beyond its shape is found here, before any work starts.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tanghulu.conductor.http.schema import (
    MAX_CHOICES,
    MAX_SEQUENCES,
    ChatBody,
    CompletionBody,
    GenerateBody,
    OpenAIBody,
    Prompts,
    RoutedBody,
    SamplingFields,
)
from tanghulu.conductor.routing.overrides import NO_OVERRIDES
from tanghulu.conductor.routing.requests import GenerationRequest, Sampling, StopRule
from tanghulu.conductor.text.served_model import ServedModel
from tanghulu.hashing import Tokens
from tanghulu.types import RequestId
from tanghulu.web.errors import BadField

DEFAULT_COMPLETION_TOKENS = 16
#: Variables of a template that chat_template_kwargs must not set.
TEMPLATE_NAMES_TAKEN = frozenset(("messages", "tools", "self"))
_SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A checked body made ready: its sequences (prompt major, choices minor) and what their text stops at."""

    model: ServedModel
    requests: list[GenerationRequest]
    stop_strings: tuple[str, ...]
    num_choices: int


async def parse_chat(body: ChatBody, model: ServedModel) -> ParsedRequest:
    """Make the sequences of a chat completion."""
    messages = [message.for_template() for message in body.messages]
    variables = {**_template_variables(body), "tools": body.tools, "add_generation_prompt": body.add_generation_prompt}
    text = await model.render_chat(messages, variables)
    prompt = await model.encode(text, add_special_tokens=False)
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    wanted = body.max_completion_tokens or body.max_tokens
    return _parsed(model, [prompt], body, wanted, num_logprobs, body)


def _template_variables(body: ChatBody) -> dict[str, Any]:
    """The variables of its own that a chat gives its template; refuses the names that have another door or none."""
    given = body.chat_template_kwargs or {}
    for name in TEMPLATE_NAMES_TAKEN & given.keys():
        raise BadField(f"chat_template_kwargs must not have {name!r}", "chat_template_kwargs")
    return given


async def parse_completion(body: CompletionBody, model: ServedModel) -> ParsedRequest:
    """Make the sequences of a text completion."""
    prompts = await _tokenised(model, body.prompt)
    wanted = body.max_tokens or DEFAULT_COMPLETION_TOKENS
    return _parsed(model, prompts, body, wanted, body.logprobs, body)


async def parse_generate(body: GenerateBody, model: ServedModel) -> ParsedRequest:
    """Make the sequences of SGLang's /generate."""
    prompts = await _tokenised(model, body.prompts)
    sampling = body.sampling_params
    changed = {"min_tokens": sampling.min_new_tokens or sampling.min_tokens}
    seed = sampling.sampling_seed if sampling.sampling_seed is not None else sampling.seed
    fields = sampling.model_copy(update={**changed, "seed": seed})
    return _parsed(model, prompts, fields, sampling.max_new_tokens, None, body)


async def _tokenised(model: ServedModel, prompts: Prompts) -> list[Tokens]:
    if isinstance(prompts, str):
        return [await model.encode(prompts, add_special_tokens=True)]
    if not prompts:
        raise BadField("the list of prompts is empty", "prompt")
    if isinstance(prompts[0], int):
        return [_checked(model, prompts)]
    if len(prompts) > MAX_SEQUENCES:
        raise BadField(f"{len(prompts)} prompts in one request; at most {MAX_SEQUENCES}", "prompt")
    ready = []
    for prompt in prompts:
        assert not isinstance(prompt, int)
        text = isinstance(prompt, str)
        ready.append(await model.encode(prompt, True) if text else _checked(model, prompt))  # type: ignore[arg-type]
    return ready


def _checked(model: ServedModel, ids: Sequence[int]) -> Tokens:
    """The token ids of one prompt; those that are too many are refused before they are looked at."""
    if ids:
        model.max_new_tokens(len(ids), None)
    return model.checked_tokens(ids)


def _parsed(
    model: ServedModel,
    prompts: Sequence[Tokens],
    fields: SamplingFields,
    wanted: int | None,
    num_logprobs: int | None,
    body: RoutedBody,
) -> ParsedRequest:
    num_choices = fields.n or 1
    if len(prompts) * num_choices > MAX_SEQUENCES:
        raise BadField(
            f"{len(prompts)} prompts with n={num_choices} are too many: "
            f"at most {MAX_SEQUENCES} sequences, n <= {MAX_CHOICES}",
            "n",
        )
    salt = (body.cache_salt or "").encode()
    routing = body.routing.overrides() if body.routing is not None else NO_OVERRIDES
    schema = _schema_of(fields, body)
    requests = [
        GenerationRequest(
            RequestId(uuid.uuid4().hex),
            model.card.model,
            prompt,
            _sampling(model, fields, num_logprobs, choice, schema),
            _stop_rule(model, fields, len(prompt), wanted),
            salt,
            body.priority,
            body.prompt_cache_key or "",
            routing,
            body.timeouts,
            body.client,
        )
        for prompt in prompts
        for choice in range(num_choices)
    ]
    return ParsedRequest(model, requests, _stop_strings(fields), num_choices)


def _sampling(
    model: ServedModel, fields: SamplingFields, num_logprobs: int | None, choice: int, schema: str | None
) -> Sampling:
    default_temperature = model.card.default_temperature or 1.0
    return Sampling(
        temperature=fields.temperature if fields.temperature is not None else default_temperature,
        top_p=fields.top_p if fields.top_p is not None else 1.0,
        top_k=max(fields.top_k or 0, 0),
        min_p=fields.min_p or 0.0,
        repetition_penalty=fields.repetition_penalty if fields.repetition_penalty is not None else 1.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        seed=_seed(fields.seed, choice),
        logit_bias=_logit_bias(model, fields.logit_bias or {}),
        num_logprobs=num_logprobs,
        json_schema=schema,
        regex=fields.regex,
    )


def _schema_of(fields: SamplingFields, body: RoutedBody) -> str | None:
    """The JSON schema that the body asks for under any of its names; refuses more than one grammar."""
    wanted = body.response_format if isinstance(body, OpenAIBody) else None
    given = {"response_format": wanted.schema_text if wanted else None, "json_schema": fields.json_schema}
    named = [name for name, text in {**given, "regex": fields.regex}.items() if text is not None]
    if len(named) > 1:
        raise BadField(f"{' and '.join(named)} each ask for a grammar; give one", named[-1])
    return given["response_format"] or given["json_schema"]


def _seed(given: int | None, choice: int) -> int:
    """The seed of a choice's own random stream; never left open, so that it goes on when the request moves."""
    return secrets.randbits(64) if given is None else (given + choice) & _SEED_MASK


def _logit_bias(model: ServedModel, given: dict[str, float]) -> dict[int, float]:
    bias = {}
    for token, value in given.items():
        if not token.isdecimal() or int(token) >= model.card.vocab_size:
            raise BadField(f"{token!r} is no token id below {model.card.vocab_size}", "logit_bias")
        if not -100 <= value <= 100:
            raise BadField(f"the bias {value} of token {token} is not within -100..100", "logit_bias")
        bias[int(token)] = value
    return bias


def _stop_rule(model: ServedModel, fields: SamplingFields, num_prompt_tokens: int, wanted: int | None) -> StopRule:
    most = model.max_new_tokens(num_prompt_tokens, wanted)
    return StopRule(most, tuple(fields.stop_token_ids or ()), fields.ignore_eos, min(fields.min_tokens, most))


def _stop_strings(fields: SamplingFields) -> tuple[str, ...]:
    stop = fields.stop
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
