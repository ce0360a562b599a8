"""The request bodies: supported fields, with their types, bounds and a description of each.

Independent of models and tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from tanghulu.auth.api_keys import ApiKey
from tanghulu.conductor.inference.body import Body, Name
from tanghulu.conductor.inference.grammars import (
    ANY_OBJECT,
    ChoiceTexts,
    GrammarText,
    JsonText,
    ResponseFormat,
    StructuredOutputs,
    json_text,
    one_of,
)
from tanghulu.conductor.inference.json_marks import MAX_MARKS
from tanghulu.conductor.inference.messages import MAX_MESSAGES, Messages, Tool
from tanghulu.conductor.routing.overrides import WEIGHTS, RoutingOverrides
from tanghulu.conductor.routing.policies.registry import POLICY_NAMES
from tanghulu.conductor.routing.requests import Timeouts
from tanghulu.conductor.stories.account import Audience
from tanghulu.conductor.stories.origin import Origin
from tanghulu.conductor.text.stop_regex import MAX_PATTERN_CHARACTERS
from tanghulu.conductor.text.stop_strings import MAX_GENERATE_STOP_STRINGS, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from tanghulu.hashing import joined
from tanghulu.session.sampling import MAX_LOGIT_BIAS, MAX_LOGPROB_TOKEN_IDS, MAX_LOGPROBS
from tanghulu.types import InstanceId
from tanghulu.web.errors import BadField, from_validation

MAX_CHOICES = 16
MAX_SEQUENCES = 128
MAX_STOP_TOKENS = 256
MAX_STOP_PATTERNS = 4
MAX_TOOLS = 128
#: Values of bodies that clients attach to a request for their own use, as ``metadata``.
MAX_LABELS = 16
MAX_CLIENT_CHARS = 65_536
#: A longer user name is replaced by its hash.
MAX_USER_CHARS = 64
_UINT32 = (1 << 32) - 1


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def at_most(count: int) -> BeforeValidator:
    """Refuse a list or an object of more than ``count`` values before validating any of them."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > count:
            raise ValueError(f"{len(value)} values; the limit is {count}")
        return value

    return BeforeValidator(check)


def _few_prompts(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_SEQUENCES and not isinstance(value[0], int):
        raise ValueError(f"{len(value)} prompts in one request; the limit is {MAX_SEQUENCES}")
    return value


#: A single text stands for a list of one.
_ONE_OR_MORE = BeforeValidator(_as_list, json_schema_input_type=str | list[str])

Temperature = Annotated[float, Field(ge=0, le=100)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, le=_UINT32)]
TokenId = Annotated[int, Field(ge=0, le=_UINT32)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stop = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True), _ONE_OR_MORE]
GenerateStop = Annotated[list[StopString], Field(max_length=MAX_GENERATE_STOP_STRINGS, fail_fast=True), _ONE_OR_MORE]
StopExpression = Annotated[str, Field(min_length=1, max_length=MAX_PATTERN_CHARACTERS)]
StopExpressions = Annotated[list[StopExpression], Field(max_length=MAX_STOP_PATTERNS, fail_fast=True), _ONE_OR_MORE]
#: An unknown model name gives "not found", whatever its length.
ModelName = Annotated[str, Field(max_length=MAX_CLIENT_CHARS)]
CallId = Annotated[str, Field(min_length=1, max_length=256)]
NumTokens = Annotated[int, Field(ge=1, le=_UINT32)]
NumTokensOrNone = Annotated[int, Field(ge=0, le=_UINT32)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_MARKS, fail_fast=True)]
Texts = Annotated[list[str], Field(max_length=MAX_SEQUENCES, fail_fast=True)]
TokenIdLists = Annotated[list[TokenIds], Field(max_length=MAX_SEQUENCES, fail_fast=True)]
#: Fail fast: otherwise a prompt of 100 000 ids would first be collected as 100 000 errors of a list of strings.
Prompts = Annotated[str | Texts | TokenIds | TokenIdLists, BeforeValidator(_few_prompts)]


class SamplingFields(Body):
    """Sampling and stopping, under the names shared by OpenAI, vLLM and SGLang."""

    temperature: Temperature | None = None
    """Default: the model's own, else 1."""
    top_p: TopP | None = None
    """Default: the model's own, else 1."""
    top_k: TopK | None = None
    """Default: the model's own, else off; -1 and 0 disable it."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Default: the model's own, else 0."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    """Default: the model's own, else 1."""
    seed: int | None = None
    """Choice i of n uses seed + i; texts are reproducible only with --batch-invariant."""
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS), at_most(MAX_LOGIT_BIAS)] | None = None
    """Token id -> -100 to 100; up to 1,024."""
    stop: Stop | None = None
    """Up to 4 texts."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, le=_UINT32)] = 0
    """Minimum tokens before any stop condition applies."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Number of choices, which share the prompt's KV."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text (vLLM)."""
    no_stop_trim: bool = False
    """As include_stop_str_in_output (SGLang)."""
    skip_special_tokens: bool = True
    """Omit special tokens from the text."""
    stop_regex: StopExpressions | None = None
    """Up to 4 expressions, without anchors or lookaround."""
    regex: GrammarText | None = None
    """The whole text matches this expression."""
    json_schema: GrammarText | None = None
    """A JSON schema as text; one grammar per request."""

    def grammars(self) -> dict[str, tuple[str, str]]:
        """Return the requested grammars: the name of the field -> (json_schema or regex, its text)."""
        found = {}
        if self.json_schema is not None:
            found["json_schema"] = ("json_schema", json_text("json_schema", self.json_schema))
        if self.regex is not None:
            found["regex"] = ("regex", self.regex)
        return found


class StreamOptions(Body):
    """``stream_options``."""

    include_usage: bool = False
    """End the stream with a chunk that has the usage."""
    continuous_usage_stats: bool = False
    """Report the usage so far in each chunk."""


TimeoutSeconds = Annotated[float, Field(gt=0, le=1e6)]
Weight = Annotated[float, Field(ge=0, le=1e6)]


Weights = Annotated[dict[Name, Weight], Field(max_length=MAX_LABELS), at_most(MAX_LABELS)]


class RoutingFields(Body):
    """``routing``: routing overrides of this request; unknown names are refused, since they would have no effect."""

    model_config = ConfigDict(strict=True, extra="forbid")
    policy: Name | None = None
    worker: Annotated[str, Field(max_length=256)] | None = None
    prefill_worker: Annotated[str, Field(max_length=256)] | None = None
    decode_worker: Annotated[str, Field(max_length=256)] | None = None
    weights: Weights = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_LABELS:  # otherwise each unknown name would be an error
            raise ValueError(f"{len(value)} fields; the known ones are {', '.join(cls.model_fields)}")
        return value

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.policy is not None and self.policy not in POLICY_NAMES:
            raise ValueError(f"policy {self.policy!r} is unknown; use one of {', '.join(POLICY_NAMES)}")
        for name in self.weights:
            if name not in WEIGHTS:
                raise ValueError(f"weight {name!r} is unknown; use one of {', '.join(WEIGHTS)}")
        return self

    def overrides(self) -> RoutingOverrides:
        """Return the overrides for routing. ``worker`` applies to each phase without its own."""
        prefill, decode = self.prefill_worker or self.worker or "", self.decode_worker or self.worker or ""
        weights = tuple(sorted(self.weights.items()))
        return RoutingOverrides(self.policy or "", InstanceId(prefill), InstanceId(decode), weights)


class RoutedBody(Body):
    """Fields that select the model, the queueing and the routing of a request."""

    model: ModelName | None = None
    """Default: the first served model."""
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    """Only requests with the same salt share KV."""
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None
    """With +session-affinity, requests with the same key go to one worker."""
    extra_key: Annotated[str, Field(max_length=256)] | None = None
    """An additional salt."""
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] = 0
    """Higher values are served first among requests of one client."""
    routing: RoutingFields | None = None
    """policy, worker, prefill_worker, decode_worker, weights."""
    user: Annotated[str, Field(max_length=MAX_CLIENT_CHARS)] | None = None
    """Waiting requests of several users take turns; default: by key or address."""
    request_timeout: TimeoutSeconds | None = None
    """Seconds for the whole request, at most the conductor's own timeout."""
    first_token_timeout: TimeoutSeconds | None = None
    """Seconds from the request's arrival."""
    token_timeout: TimeoutSeconds | None = None
    """Seconds from each token to the next."""
    explain_cache: bool | None = None
    """Add cache_explanation to the answer; also by the header x-explain-cache: 1."""

    _sender: str = PrivateAttr("")
    _key: ApiKey | None = PrivateAttr(None)
    _origin: Origin | None = PrivateAttr(None)

    def came_from(self, sender: str, key: ApiKey | None = None, origin: Origin | None = None) -> None:
        """Record the sender of the body, for bodies without ``user``; a ``key`` of ours overrides everything else."""
        self._sender, self._key, self._origin = sender, key, origin

    @property
    def origin(self) -> Origin | None:
        """The HTTP request that carried the body."""
        return self._origin

    @property
    def explain(self) -> Audience | None:
        """For whom the prompt's cache misses are explained; None if that was not requested."""
        return Audience.of(self._key, Audience.OPERATOR) if self.explain_cache else None

    @property
    def weight(self) -> float:
        """Turns of the client for each turn of another."""
        return 1.0 if self._key is None else self._key.weight

    @property
    def client(self) -> str:
        """The client for taking turns in the queue."""
        if self._key is not None:
            return self._key.client
        name = self.user or ""
        if len(name) > MAX_USER_CHARS:
            name = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        return f"user {name}" if name else self._sender

    @property
    def tenant(self) -> str:
        """The tenant of the key; "" without one."""
        return "" if self._key is None else self._key.tenant

    @property
    def timeouts(self) -> Timeouts:
        """Upper limits of the waiting times, as requested."""
        return Timeouts(self.request_timeout or 0.0, self.first_token_timeout or 0.0, self.token_timeout or 0.0)

    @property
    def salt(self) -> bytes:
        """Prefix of the hash input of this request's blocks, so that other tenants do not share them."""
        named = (self.cache_salt or "").encode(), (self.extra_key or "").encode()
        salt = joined(*named) if any(named) else b""
        return salt if self._key is None else self._key.salted(salt)


class OpenAIBody(RoutedBody, SamplingFields):
    """The fields shared by chat and text completions."""

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: NumTokens | None = None
    """Default: up to the end of the context."""
    response_format: ResponseFormat | None = None
    guided_json: JsonText | None = None
    """A JSON schema, as an object or as text."""
    guided_regex: GrammarText | None = None
    """As regex."""
    guided_choice: ChoiceTexts | None = None
    """The answer is one of these texts."""
    structured_outputs: StructuredOutputs | None = None
    """Exactly one of json, regex, choice, json_object."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=_UINT32)] | None = None
    """Keep only the last N tokens of the prompt; -1 keeps as many as fit."""
    best_of: int | None = None
    """Must equal n."""
    request_id: CallId | None = None
    """Id of the answer, without its prefix."""
    rid: CallId | None = None
    """As request_id (SGLang)."""
    prompt_logprobs: NumLogprobs | None = None
    """Number of likely tokens listed for each prompt token; not in streams."""

    @model_validator(mode="after")
    def _no_prompt_in_a_stream(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs are not available in a stream; leave stream out")
        return self

    @model_validator(mode="after")
    def _no_search(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of must equal n; request n answers and choose among them")
        return self

    @property
    def call_id(self) -> str | None:
        """The id given by the client, under vLLM's name or SGLang's."""
        return self.request_id or self.rid

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream has the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def grammars(self) -> dict[str, tuple[str, str]]:
        """Return the grammars of all bodies, plus those under vLLM's names, old and new."""
        found: dict[str, tuple[str, str]] = {}
        format_text = self.response_format.schema_text if self.response_format is not None else None
        structured = self.structured_outputs or StructuredOutputs()
        if format_text is not None:
            found["response_format"] = ("json_schema", format_text)
        if self.guided_json is not None:
            found["guided_json"] = ("json_schema", json_text("guided_json", self.guided_json))
        for name, choice in (("guided_choice", self.guided_choice), ("structured_outputs.choice", structured.choice)):
            if choice is not None:
                found[name] = ("regex", one_of(choice))
        for name, regex in (("guided_regex", self.guided_regex), ("structured_outputs.regex", structured.regex)):
            if regex is not None:
                found[name] = ("regex", regex)
        if structured.json_ is not None:
            found["structured_outputs.json"] = ("json_schema", json_text("structured_outputs.json", structured.json_))
        if structured.json_object:
            found["structured_outputs.json_object"] = ("json_schema", ANY_OBJECT)
        return found | super().grammars()


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    max_marks: ClassVar[int] = MAX_MARKS
    prompt_fields: ClassVar[tuple[str, ...]] = ("prompt",)
    prompt: Prompts
    """A text, token ids, or a list of either."""
    echo: bool | None = False
    """Repeat the prompt before the text, with its log probabilities if logprobs is set."""
    max_tokens: NumTokensOrNone | None = None
    """Default: 16; 0 generates nothing, and with echo and logprobs scores the prompt."""
    logprobs: NumLogprobs | None = None
    """Log probabilities of the generated tokens, and of the prompt with echo."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens (bos) to a text."""


class ChatPrompt(Body):
    """The fields that make a chat's prompt, for completions and for counting tokens."""

    prompt_fields: ClassVar[tuple[str, ...]] = ("messages", "prompt")
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """Functions the model may call (docs/tools.md)."""
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    """Open the assistant's turn in the template."""
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    """A variable for the template."""
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    """A variable for the template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the template, except messages, tools and self."""


class ChatBody(ChatPrompt, OpenAIBody):
    """POST /v1/chat/completions."""

    messages: Messages
    """Content is a text or a list of text parts."""
    max_completion_tokens: NumTokens | None = None
    """Takes precedence over max_tokens."""
    logprobs: bool | None = False
    """Log probabilities of the generated tokens."""
    top_logprobs: NumLogprobs | None = None
    """Number of likely tokens listed for each token; requires logprobs."""
    add_special_tokens: bool = False
    """Add the tokenizer's special tokens (bos) to the text."""

    @model_validator(mode="after")
    def _logprobs_for_top(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs requires logprobs: true")
        return self


class SGLangSampling(SamplingFields):
    """``sampling_params`` of /generate."""

    nullable: ClassVar[frozenset[str]] = frozenset(("max_new_tokens",))
    stop: GenerateStop | None = None
    """Up to 64 texts."""
    max_new_tokens: NumTokensOrNone | None = 128
    """null means up to the end of the context; 0 generates nothing."""
    min_new_tokens: Annotated[int, Field(ge=0, le=_UINT32)] = 0
    """As min_tokens."""
    sampling_seed: int | None = None
    """Takes precedence over seed."""


SamplingParams = SGLangSampling | Annotated[list[SGLangSampling], Field(max_length=MAX_SEQUENCES, fail_fast=True)]
CallIds = CallId | Annotated[list[CallId], Field(max_length=MAX_SEQUENCES, fail_fast=True)]
Flags = bool | Annotated[list[bool], Field(max_length=MAX_SEQUENCES, fail_fast=True)]
Counts = int | Annotated[list[int], Field(max_length=MAX_SEQUENCES, fail_fast=True)]
LogprobTokenIds = Annotated[list[TokenId], Field(max_length=MAX_LOGPROB_TOKEN_IDS, fail_fast=True)]
LogprobTokenIdLists = Annotated[list[LogprobTokenIds], Field(max_length=MAX_SEQUENCES, fail_fast=True)]


class GenerateBody(RoutedBody):
    """POST /generate. A list in place of a single value has an item for each prompt."""

    max_marks: ClassVar[int] = MAX_MARKS
    prompt_fields: ClassVar[tuple[str, ...]] = ("text", "input_ids")
    text: Annotated[str | Texts | None, BeforeValidator(_few_prompts)] = None
    """A text, or a list of them; give either this or input_ids."""
    input_ids: Annotated[TokenIds | TokenIdLists | None, BeforeValidator(_few_prompts)] = None
    """Token ids, or a list of them; give either this or text."""
    sampling_params: SamplingParams = Field(default_factory=SGLangSampling)
    """One object for all prompts, or one per prompt."""
    stream: bool = False
    stream_output: bool = False
    """Stream only new text and ids instead of everything so far."""
    rid: CallIds | None = None
    """Request id, or one per prompt; /abort_request accepts it."""
    session_id: Annotated[str, Field(max_length=256)] | None = None
    """As prompt_cache_key."""
    return_logprob: Flags = False
    """Return log probabilities of the generated tokens; one value, or one per prompt."""
    logprob_start_len: Counts = -1
    """First prompt token with log probabilities (its own is null); -1 disables them."""
    top_logprobs_num: Counts = 0
    token_ids_logprob: LogprobTokenIds | LogprobTokenIdLists | None = None
    """Token ids whose log probabilities are returned, or a list per prompt."""
    return_text_in_logprobs: bool = False

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give either text or input_ids")
        if self.is_batch:
            for name in _A_PROMPT_EACH:
                value = getattr(self, name)
                if isinstance(value, list) and len(value) != len(self.prompts):
                    raise ValueError(f"{name} has {len(value)} items for {len(self.prompts)} prompts; give one each")
        elif listed := [name for name in _A_PROMPT_EACH if isinstance(getattr(self, name), list)]:
            raise ValueError(f"{listed[0]} is a list, but there is a single prompt; give a single value")
        asked = self.token_ids_logprob
        if asked and isinstance(asked[0], list) and not (self.is_batch and len(asked) == len(self.prompts)):
            raise ValueError("token_ids_logprob must be a list of token ids, or one list per prompt")
        if isinstance(self.rid, list) and len(set(self.rid)) < len(self.rid):
            raise ValueError("rid has duplicates; give each prompt its own")
        return self

    @property
    def prompts(self) -> Prompts:
        """The text or the token ids, as given."""
        prompts = self.text if self.text is not None else self.input_ids
        assert prompts is not None
        return prompts

    @property
    def is_batch(self) -> bool:
        prompts = self.prompts
        return isinstance(prompts, list) and not (prompts and isinstance(prompts[0], int))

    def sampling_of(self, prompt: int) -> SGLangSampling:
        """Return the sampling parameters of a prompt."""
        given = self.sampling_params
        return given[prompt] if isinstance(given, list) else given

    def num_logprobs_of(self, prompt: int) -> int | None:
        """Return the number of most likely tokens shown for each generated one; None for no log probabilities."""
        given = (self.return_logprob, self.top_logprobs_num)
        wanted, count = (value[prompt] if isinstance(value, list) else value for value in given)
        return count if wanted else None

    def logprob_start_len_of(self, prompt: int) -> int:
        """Return the first token of a prompt shown with its log probability; -1 for none."""
        given = self.logprob_start_len
        return given[prompt] if isinstance(given, list) else given

    def logprob_token_ids_of(self, prompt: int) -> tuple[int, ...]:
        """Return the tokens whose log probabilities are shown at every position, if any."""
        given = self.token_ids_logprob or []
        own = given[prompt] if given and isinstance(given[0], list) else given
        return tuple(own) if self.num_logprobs_of(prompt) is not None else ()


C = TypeVar("C", bound=ChatPrompt)


def translated(to: type[C], body: Body, fields: Mapping[str, Any], names: Mapping[str, str]) -> C:
    """Return the chat requested by ``body``, of another API: ``fields`` that are not None, and those both APIs share.

    ``names`` are the names of a chat's fields in ``body``, for errors. Raises BadField for anything a chat refuses.
    """
    shared = body.model_dump(include=set(RoutedBody.model_fields), exclude_none=True)
    try:
        chat = to.model_validate(shared | {name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        fault = from_validation(error)
        raise BadField(fault.message, names.get(fault.param or "", fault.param)) from None
    if body.is_large:
        chat.set_large()
    return chat


_A_PROMPT_EACH = ("sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num")


class AbortBody(Body):
    """POST /abort_request."""

    rid: Name = ""
    abort_all: bool = False


class TokenizeBody(ChatPrompt):
    """POST /tokenize: a text, texts or a chat."""

    model: ModelName | None = None
    prompt: Annotated[str | Texts | None, BeforeValidator(_few_prompts)] = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    max_marks: ClassVar[int] = MAX_MARKS
    prompt_fields: ClassVar[tuple[str, ...]] = ("tokens",)
    model: ModelName | None = None
    tokens: TokenIds
    skip_special_tokens: bool = False
