"""From a validated body to its sequences: chat template, tokens, sampling, stop rules.

Owns the defaults. All errors of a request beyond its shape are detected here, before any work starts.
"""

from __future__ import annotations

import re
import secrets
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from msgspec import structs

from tanghulu.conductor.explain.place import message_starts
from tanghulu.conductor.inference.generation import AnswerReader, TextRules
from tanghulu.conductor.inference.grammars import MAX_GRAMMAR_CHARS
from tanghulu.conductor.inference.messages import Message
from tanghulu.conductor.inference.schema import (
    MAX_CHOICES,
    MAX_SEQUENCES,
    ChatBody,
    ChatPrompt,
    CompletionBody,
    GenerateBody,
    OpenAIBody,
    Prompts,
    RoutedBody,
    SamplingFields,
    TokenizeBody,
)
from tanghulu.conductor.inference.tool_requests import WantedCalls
from tanghulu.conductor.routing.overrides import NO_OVERRIDES
from tanghulu.conductor.routing.requests import GenerationRequest
from tanghulu.conductor.text.preparing import INLINE_CHARACTERS, made_ready
from tanghulu.conductor.text.served_model import ServedModel
from tanghulu.conductor.text.stop_regex import MAX_PATTERN_CHARACTERS, StopPattern
from tanghulu.conductor.tools.choosing import AnswerForm, ParserNames, form_of
from tanghulu.conductor.tools.events import AnswerParser
from tanghulu.conductor.tools.reasoning import PlainAnswer, is_open
from tanghulu.hashing import Tokens
from tanghulu.session.sampling import MAX_LOGPROBS, PromptScoring, Sampling, StopRule
from tanghulu.types import RequestId
from tanghulu.web.errors import BadField

DEFAULT_COMPLETION_TOKENS = 16
#: Template variables that chat_template_kwargs must not set.
TEMPLATE_NAMES_TAKEN = frozenset(("messages", "tools", "self"))
_DEVELOPER = re.compile(r"""['"]developer['"]""")
_SEED_MASK = (1 << 64) - 1
#: Smallest top_p and repetition_penalty: smaller values become 0 as 32-bit floats, which means "not given".
LEAST_SHARE = 1e-30
MAX_ID_DIGITS = 10
#: Most log probabilities of prompts in one answer.
MAX_PROMPT_SCORES = 1 << 18
#: Most different stop expressions of one body; and the work per character over all its sequences.
MAX_DIFFERENT_PATTERNS = 16
MAX_PATTERN_MOVES = 4096

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A validated body ready to run: its sequences (prompt major, choices minor), and the text rules of each.

    ``new_parser`` makes the parser of an answer; its first ``most_calls`` calls count, or all; ``markers`` are the
    special tokens the parser needs.
    """

    model: ServedModel
    requests: list[GenerationRequest]
    rules: list[TextRules]
    num_choices: int
    new_parser: Callable[[], AnswerParser] = PlainAnswer
    most_calls: int | None = None
    markers: tuple[str, ...] = ()

    def new_reader(self) -> AnswerReader:
        """Return the reader of one sequence's answer."""
        return AnswerReader(self.new_parser(), self.most_calls)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The settings for one prompt: sampling and stop rules, most new tokens, log probabilities shown.

    ``scoring`` requests those of the prompt itself, ``logprob_token_ids`` those of certain tokens at every position.
    """

    fields: SamplingFields
    max_tokens: int | None
    num_logprobs: int | None
    scoring: PromptScoring | None = None
    logprob_token_ids: tuple[int, ...] = ()


async def parse_chat(
    body: ChatBody, model: ServedModel, parsers: ParserNames, within_context: bool = False
) -> ParsedRequest:
    """Build the sequences of a chat completion; ``within_context`` lowers its limit of tokens to the room for them."""
    form = form_of(model.card.chat_template, parsers)
    shown = await made_ready(body.is_large, _shown, body, model, form)
    text = await model.render_chat(shown.messages, shown.variables)
    prompt = await model.encode(text, body.add_special_tokens, body.salt)
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    scoring = _scoring(body.prompt_logprobs)
    most = body.max_completion_tokens or body.max_tokens
    if within_context and most is not None:
        most = _within_context(prompt, most, model)
    wanted = _Wanted(body, most, num_logprobs, scoring)
    parsed = await _parsed(model, [_truncated(prompt, body, wanted.max_tokens, model)], [wanted], body)
    starts = message_starts(text, [message.get("content") for message in shown.messages])
    parsed = replace(parsed, requests=[structs.replace(each, messages=starts) for each in parsed.requests])
    return await made_ready(body.is_large, _with_calls, parsed, shown.calls, shown.schema, form, is_open(text))


class _ShownChat(NamedTuple):
    """A chat for its template, the calls it requests, and the schema that enforces them."""

    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    calls: WantedCalls
    schema: str | None


def _shown(body: ChatPrompt, model: ServedModel, form: AnswerForm) -> _ShownChat:
    calls = WantedCalls.of(body)
    schema = calls.schema()
    messages, tools = calls.shown(_for_template(body.messages or (), model), form)
    variables = {**_template_variables(body), "tools": tools, "add_generation_prompt": body.add_generation_prompt}
    return _ShownChat(messages, variables, calls, schema)


def _for_template(messages: Sequence[Message], model: ServedModel) -> list[dict[str, Any]]:
    has_developer = _DEVELOPER.search(model.card.chat_template) is not None
    return [message.for_template(has_developer) for message in messages]


def _is_free(parsed: ParsedRequest) -> bool:
    """Return whether the client requests no grammar of its own."""
    sampling = parsed.requests[0].sampling
    return sampling.json_schema is None and sampling.regex is None


def _with_grammar(parsed: ParsedRequest, json_schema: str | None = None, lark: str | None = None) -> ParsedRequest:
    """Return ``parsed``, which is free, under a grammar of one kind or none."""
    changed = [structs.replace(each.sampling, json_schema=json_schema, lark=lark) for each in parsed.requests]
    requests = [
        structs.replace(each, sampling=sampling) for each, sampling in zip(parsed.requests, changed, strict=True)
    ]
    return replace(parsed, requests=requests)


def _with_calls(
    parsed: ParsedRequest, calls: WantedCalls, schema: str | None, form: AnswerForm, opened: bool
) -> ParsedRequest:
    """Return ``parsed`` with the grammar that enforces ``calls`` or their strict schemas, and the answer's parser."""
    free = _is_free(parsed)
    if schema is not None:
        if not free:
            raise BadField("tool_choice and another field each require a grammar; give only one", "tool_choice")
        parsed = _with_grammar(parsed, json_schema=schema)
    elif free:
        parsed = _with_grammar(parsed, lark=calls.strict_grammar(parsed.model, form))
    new_parser = calls.new_parser(form, free, opened)
    markers = form.markers if new_parser is not PlainAnswer and not calls.forced else ()
    return replace(parsed, new_parser=new_parser, most_calls=calls.most, markers=markers)


def _template_variables(body: ChatPrompt) -> dict[str, Any]:
    """Return the template variables of a chat; refuses names that are set elsewhere or not at all."""
    given = body.chat_template_kwargs or {}
    for name in TEMPLATE_NAMES_TAKEN & given.keys():
        raise BadField(f"chat_template_kwargs must not set {name!r}, a field of the request", "chat_template_kwargs")
    named = {"documents": body.documents, "reasoning_effort": body.reasoning_effort}
    return given | {name: value for name, value in named.items() if value is not None}


async def parse_completion(body: CompletionBody, model: ServedModel) -> ParsedRequest:
    """Build the sequences of a text completion."""
    prompts = await _tokenised(model, body.prompt, body.is_large, body.add_special_tokens)
    most = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    prompts = [_truncated(prompt, body, most, model) for prompt in prompts]
    scoring = _scoring(body.logprobs if body.echo else None, body.prompt_logprobs)
    wanted = []
    for prompt in prompts:
        max_tokens = _within_context(prompt, most, model) if body.max_tokens is None else most
        wanted.append(_Wanted(body, max_tokens, body.logprobs, scoring))
    return await _parsed(model, prompts, wanted, body)


def _within_context(prompt: Tokens, num_tokens: int, model: ServedModel) -> int:
    """Return ``num_tokens``, or the rest of the context if that is shorter."""
    return max(min(num_tokens, model.card.context_length - len(prompt)), 1)


async def tokenise(
    body: TokenizeBody, model: ServedModel, parsers: ParserNames, salt: bytes | None = None
) -> list[Tokens]:
    """Return the tokens of a text, of several, or of a chat, counted as in a completion's or chat's usage.

    With a ``salt``, common beginnings of chats with that salt are cached.
    """
    if body.messages is None:
        return await _tokenised(model, body.prompt or "", body.is_large, body.add_special_tokens)
    form = form_of(model.card.chat_template, parsers)
    shown = await made_ready(body.is_large, _shown, body, model, form)
    text = await model.render_chat(shown.messages, shown.variables)
    return [await model.encode(text, False, salt)]


def _scoring(*num_top: int | None) -> PromptScoring | None:
    """Return scoring of the whole prompt with the largest given number of likely tokens; None without any."""
    wanted = [count for count in num_top if count is not None]
    return PromptScoring(1, max(wanted)) if wanted else None


async def parse_generate(body: GenerateBody, model: ServedModel) -> ParsedRequest:
    """Build the sequences of SGLang's /generate."""
    prompts = await _tokenised(model, body.prompts, body.is_large)
    wanted = []
    known: dict[int, SamplingFields] = {}
    for number, prompt in enumerate(prompts):
        sampling = body.sampling_of(number)
        seed = sampling.sampling_seed if sampling.sampling_seed is not None else sampling.seed
        changed = {"min_tokens": sampling.min_new_tokens or sampling.min_tokens, "seed": seed}
        fields = known.setdefault(id(sampling), sampling.model_copy(update=changed))
        num_logprobs = _num_logprobs(body, number)
        asked = _logprob_token_ids(body, number, model)
        start = body.logprob_start_len_of(number)
        # The first token has no log probability, as no token precedes it.
        scores = num_logprobs is not None and 0 <= start < len(prompt)
        scoring = PromptScoring(start + 1, num_logprobs or 0) if scores else None
        most = sampling.max_new_tokens
        if most is not None and "max_new_tokens" not in sampling.model_fields_set:
            most = _within_context(prompt, most, model)
        wanted.append(_Wanted(fields, most, num_logprobs, scoring, asked))
    return await _parsed(model, prompts, wanted, body)


def _num_logprobs(body: GenerateBody, number: int) -> int | None:
    """Return the number of most likely tokens to show; None for no log probabilities."""
    count = body.num_logprobs_of(number)
    if count is None:
        return None
    if not 0 <= count <= MAX_LOGPROBS:
        raise BadField(f"top_logprobs_num is {count}; it must be 0 to {MAX_LOGPROBS}", "top_logprobs_num")
    if (start := body.logprob_start_len_of(number)) < -1:
        raise BadField(
            f"logprob_start_len is {start}; give a position, or -1 to omit the prompt",
            "logprob_start_len",
        )
    return count


def _logprob_token_ids(body: GenerateBody, number: int, model: ServedModel) -> tuple[int, ...]:
    ids = body.logprob_token_ids_of(number)
    for token in ids:
        if token >= model.card.vocab_size:
            raise BadField(f"{token} is not a token id below {model.card.vocab_size}", "token_ids_logprob")
    return ids


def _truncated(prompt: Tokens, body: OpenAIBody, max_tokens: int | None, model: ServedModel) -> Tokens:
    """Return the last tokens of ``prompt``, as many as the body keeps; -1 leaves room for the new ones."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep == -1:
        keep = max(model.card.context_length - (max_tokens or 1), 1)
    return prompt[max(len(prompt) - keep, 0) :]


async def _tokenised(
    model: ServedModel, prompts: Prompts, is_large: bool, add_special_tokens: bool = True
) -> list[Tokens]:
    if isinstance(prompts, str):
        return [await model.encode(prompts, add_special_tokens)]
    if not prompts:
        raise BadField("the list of prompts is empty; give at least one", "prompt")
    if isinstance(prompts[0], int):
        return [await made_ready(is_large, _checked, model, prompts)]
    in_loop = sum(map(len, prompts)) <= INLINE_CHARACTERS
    ready: list[Tokens] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ready.append(await model.encode(prompt, add_special_tokens, in_loop=in_loop))
        else:
            ready.append(await made_ready(is_large, _checked, model, prompt))
    return ready


def _checked(model: ServedModel, ids: Sequence[int]) -> Tokens:
    """Return the token ids of one prompt; too many are refused before they are checked."""
    if ids:
        model.max_new_tokens(len(ids), None)
    return model.checked_tokens(ids)


async def _parsed(
    model: ServedModel, prompts: Sequence[Tokens], wanted: Sequence[_Wanted], body: RoutedBody
) -> ParsedRequest:
    has_patterns = any(each.fields.stop_regex for each in wanted)
    return await made_ready(body.is_large or has_patterns, _sequences, model, prompts, wanted, body)


def _sequences(
    model: ServedModel, prompts: Sequence[Tokens], wanted: Sequence[_Wanted], body: RoutedBody
) -> ParsedRequest:
    num_choices = wanted[0].fields.n or 1
    if any((each.fields.n or 1) != num_choices for each in wanted):
        raise BadField("n differs between the prompts; give the same n for all", "n")
    if len(prompts) * num_choices > MAX_SEQUENCES:
        raise BadField(
            f"{len(prompts)} prompts with n={num_choices} are too many: "
            f"at most {MAX_SEQUENCES} sequences, n <= {MAX_CHOICES}",
            "n",
        )
    _check_scores(prompts, wanted, num_choices)
    session = body.prompt_cache_key or (body.session_id if isinstance(body, GenerateBody) else None) or ""
    routing = body.routing.overrides() if body.routing is not None else NO_OVERRIDES
    made = _MadeOnce(model, num_choices)
    requests: list[GenerationRequest] = []
    rules: list[TextRules] = []
    for prompt, each in zip(prompts, wanted, strict=True):
        rules += [made.rules(each.fields, each.max_tokens == 0)] * num_choices
        stop = _stop_rule(model, each.fields, len(prompt), each.max_tokens)
        drawn = structs.replace(
            made.sampling(each.fields), num_logprobs=each.num_logprobs, logprob_token_ids=each.logprob_token_ids
        )
        requests += [
            GenerationRequest(
                RequestId(uuid.uuid4().hex),
                model.card.model,
                prompt,
                structs.replace(drawn, seed=_seed(each.fields.seed, choice)),
                stop,
                body.salt,
                body.priority,
                session,
                routing,
                body.timeouts,
                body.client,
                body.weight,
                each.scoring,
                body.origin if not requests and not choice else body.origin and body.origin.beside(),
                each.fields.seed is not None,
                body.tenant,
                body.explain,
            )
            for choice in range(num_choices)
        ]
    return ParsedRequest(model, requests, rules, num_choices)


def _check_scores(prompts: Sequence[Tokens], wanted: Sequence[_Wanted], num_choices: int) -> None:
    """Refuse more log probabilities of prompts than one answer may have. Raises BadField."""
    pairs = zip(prompts, wanted, strict=True)
    scored = [(len(prompt) - each.scoring.start, each.scoring.num_top) for prompt, each in pairs if each.scoring]
    count = num_choices * sum(num_tokens * (1 + num_top) for num_tokens, num_top in scored)
    if count > MAX_PROMPT_SCORES:
        raise BadField(
            f"the answer would have {count} log probabilities of prompts, and the limit is {MAX_PROMPT_SCORES}: "
            "request fewer per token, or send fewer prompts"
        )


class _MadeOnce:
    """Sampling and text rules of one body, each built once for all prompts with the same fields."""

    def __init__(self, model: ServedModel, num_choices: int) -> None:
        self._model, self._num_choices = model, num_choices
        self._samplings: dict[int, Sampling] = {}
        self._rules: dict[tuple[int, bool], TextRules] = {}
        self._patterns: dict[str, StopPattern] = {}
        self._num_moves = 0

    def sampling(self, fields: SamplingFields) -> Sampling:
        """Return the sampling without seeds and log probabilities."""
        if id(fields) not in self._samplings:
            self._samplings[id(fields)] = _sampling(self._model, fields)
        return self._samplings[id(fields)]

    def rules(self, fields: SamplingFields, hides_output: bool) -> TextRules:
        """Return the text rules of a prompt's choices. Raises BadField if the expressions are too costly in total."""
        key = (id(fields), hides_output)
        if key not in self._rules:
            self._rules[key] = _text_rules(fields, hides_output, self._pattern)
        rules = self._rules[key]
        self._num_moves += self._num_choices * sum(pattern.num_moves for pattern in rules.stop_patterns)
        if self._num_moves > MAX_PATTERN_MOVES:
            raise BadField(
                f"the stop_regex of all sequences exceed {MAX_PATTERN_MOVES} characters and transitions in total; "
                "use shorter expressions or fewer prompts",
                "stop_regex",
            )
        return rules

    def _pattern(self, source: str) -> StopPattern:
        if source not in self._patterns:
            if len(self._patterns) >= MAX_DIFFERENT_PATTERNS:
                raise BadField(f"more than {MAX_DIFFERENT_PATTERNS} different stop_regex; use fewer", "stop_regex")
            self._patterns[source] = StopPattern(source)
        return self._patterns[source]


def _sampling(model: ServedModel, fields: SamplingFields) -> Sampling:
    """Build the sampling from ``fields``; values left open take the model's default."""
    defaults = model.card.sampling_defaults
    kind, grammar = _grammar(fields)
    return Sampling(
        temperature=_first(fields.temperature, defaults.temperature),
        top_p=max(_first(fields.top_p, defaults.top_p), LEAST_SHARE),
        top_k=max(_first(fields.top_k, defaults.top_k), 0),
        min_p=_first(fields.min_p, defaults.min_p),
        repetition_penalty=max(_first(fields.repetition_penalty, defaults.repetition_penalty), LEAST_SHARE),
        frequency_penalty=fields.frequency_penalty or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        logit_bias=_logit_bias(model, fields.logit_bias or {}),
        json_schema=grammar if kind == "json_schema" else None,
        regex=grammar if kind == "regex" else None,
    )


def _first(given: N | None, default: N) -> N:
    return default if given is None else given


def _grammar(fields: SamplingFields) -> tuple[str, str] | tuple[None, None]:
    """Return the grammar requested under any of its names; refuses more than one."""
    given = fields.grammars()
    if len(given) > 1:
        raise BadField(f"{' and '.join(given)} each set a grammar; give only one", list(given)[-1].partition(".")[0])
    for name, (kind, text) in given.items():
        if len(text) > MAX_GRAMMAR_CHARS:
            raise BadField(
                f"{name} has {len(text)} characters; the limit is {MAX_GRAMMAR_CHARS}", name.partition(".")[0]
            )
        return kind, text
    return None, None


def _seed(given: int | None, choice: int) -> int:
    """Return the seed of a choice's random stream; always set, so that the stream survives a move of the request."""
    return secrets.randbits(64) if given is None else (given + choice) & _SEED_MASK


def _logit_bias(model: ServedModel, given: dict[str, float]) -> dict[int, float]:
    bias = {}
    for token, value in given.items():
        if not token.isdecimal() or len(token) > MAX_ID_DIGITS or int(token) >= model.card.vocab_size:
            raise BadField(f"{token[:32]!r} is not a token id below {model.card.vocab_size}", "logit_bias")
        if not -100 <= value <= 100:
            raise BadField(f"the bias of token {token} is {value}; it must be within -100 and 100", "logit_bias")
        bias[int(token)] = value
    return bias


def _stop_rule(model: ServedModel, fields: SamplingFields, num_prompt_tokens: int, wanted: int | None) -> StopRule:
    most = max(model.max_new_tokens(num_prompt_tokens, wanted), 1)
    return StopRule(most, tuple(fields.stop_token_ids or ()), fields.ignore_eos, min(fields.min_tokens, most))


def _text_rules(fields: SamplingFields, hides_output: bool, pattern: Callable[[str], StopPattern]) -> TextRules:
    strings = tuple(fields.stop or ())
    patterns = tuple(map(pattern, fields.stop_regex or ()))
    if patterns and sum(map(len, strings)) > MAX_PATTERN_CHARACTERS:
        raise BadField(f"with stop_regex, stop may have at most {MAX_PATTERN_CHARACTERS} characters in total", "stop")
    if patterns:
        patterns, strings = (*patterns, *map(StopPattern.literal, strings)), ()
    keep = fields.include_stop_str_in_output or fields.no_stop_trim
    return TextRules(strings, patterns, keep, fields.skip_special_tokens, hides_output)
