"""The bodies that clients send, checked: types strictly, ranges here, unknown fields ignored.

Owns the names of OpenAI's and SGLang's fields and their bounds. Knows nothing of models or tokens.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from tanghulu.conductor.routing.overrides import WEIGHTS, RoutingOverrides
from tanghulu.conductor.routing.policies.registry import POLICY_NAMES
from tanghulu.conductor.routing.requests import Timeouts
from tanghulu.conductor.text.stop_strings import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from tanghulu.types import InstanceId

MAX_CHOICES = 16
MAX_SEQUENCES = 128
MAX_MESSAGES = 4096
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKENS = 256
MAX_GRAMMAR_CHARS = 65_536
#: A longer name of a user travels as its hash.
MAX_USER_CHARS = 64
_UINT32 = (1 << 32) - 1

TokenId = Annotated[int, Field(ge=0, le=_UINT32)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
Stop = StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)]
NumTokens = Annotated[int, Field(ge=1, le=_UINT32)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIdLists = Annotated[list[TokenIds], Field(fail_fast=True)]
#: Fail fast: else a prompt of 100 000 ids would first be collected as 100 000 errors of a list of strings.
Prompts = str | Texts | TokenIds | TokenIdLists


class Body(BaseModel):
    """The base of all bodies."""

    model_config = ConfigDict(strict=True, extra="ignore")


class SamplingFields(Body):
    """Sampling and stopping under the names that OpenAI, vLLM and SGLang share."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_UINT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    seed: int | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, le=_UINT32)] = 0
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    regex: GrammarText | None = None
    json_schema: GrammarText | None = None


class StreamOptions(Body):
    """``stream_options``."""

    include_usage: bool = False


class JsonSchema(Body):
    """``json_schema`` of a response format."""

    name: str = ""
    schema_: dict[str, Any] | bool = Field(default_factory=dict, alias="schema")


class ResponseFormat(Body):
    """The format of the text: free, JSON, or JSON that a schema accepts."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type json_schema needs json_schema, with the schema inside")
        return self

    @property
    def schema_text(self) -> str | None:
        """The JSON schema that the text must keep to; None for free text."""
        if self.type == "json_schema" and self.json_schema is not None:
            return json.dumps(self.json_schema.schema_)
        return '{"type": "object"}' if self.type == "json_object" else None


TimeoutSeconds = Annotated[float, Field(gt=0, le=1e6)]
Weight = Annotated[float, Field(ge=0, le=1e6)]


class RoutingFields(Body):
    """``routing``: what this request asks of routing for itself; unknown names are refused, since they do nothing."""

    model_config = ConfigDict(strict=True, extra="forbid")
    policy: str | None = None
    worker: Annotated[str, Field(max_length=256)] | None = None
    prefill_worker: Annotated[str, Field(max_length=256)] | None = None
    decode_worker: Annotated[str, Field(max_length=256)] | None = None
    weights: dict[str, Weight] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.policy is not None and self.policy not in POLICY_NAMES:
            raise ValueError(f"policy {self.policy!r} is unknown; there is {', '.join(POLICY_NAMES)}")
        for name in self.weights:
            if name not in WEIGHTS:
                raise ValueError(f"weight {name!r} is unknown; there is {', '.join(WEIGHTS)}")
        return self

    def overrides(self) -> RoutingOverrides:
        """The overrides as routing takes them. ``worker`` stands for each phase for which none is named."""
        prefill, decode = self.prefill_worker or self.worker or "", self.decode_worker or self.worker or ""
        weights = tuple(sorted(self.weights.items()))
        return RoutingOverrides(self.policy or "", InstanceId(prefill), InstanceId(decode), weights)


class RoutedBody(Body):
    """The fields that say which model serves a request, and how it is queued and routed."""

    model: str | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] = 0
    routing: RoutingFields | None = None
    user: str | None = None
    request_timeout: TimeoutSeconds | None = None
    first_token_timeout: TimeoutSeconds | None = None
    token_timeout: TimeoutSeconds | None = None

    _sender: str = PrivateAttr("")

    def came_from(self, sender: str) -> None:
        """Note who sent the body, for those that name no ``user``."""
        self._sender = sender

    @property
    def client(self) -> str:
        """Who takes turns with others where many wait."""
        name = self.user or ""
        if len(name) > MAX_USER_CHARS:
            name = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        return f"user {name}" if name else self._sender

    @property
    def timeouts(self) -> Timeouts:
        """The longest waits that the request asks for."""
        return Timeouts(self.request_timeout or 0.0, self.first_token_timeout or 0.0, self.token_timeout or 0.0)


class OpenAIBody(RoutedBody, SamplingFields):
    """The fields that chat and text completions share."""

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: NumTokens | None = None
    response_format: ResponseFormat | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None
    suffix: None = None

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo together with logprobs is not supported")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of other than n is not supported")
        return self


class TextPart(Body):
    """A part of a message's content; only text can be understood."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message. Further fields (name, tool_calls…) go to the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: str
    content: str | list[TextPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message with its parts joined to one text."""
        content = self.content
        text = content if isinstance(content, str) or content is None else "".join(part.text for part in content)
        return {"role": self.role, "content": text, **(self.model_extra or {})}


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: NumTokens | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class SGLangSampling(SamplingFields):
    """``sampling_params`` of /generate."""

    max_new_tokens: NumTokens | None = 128
    min_new_tokens: Annotated[int, Field(ge=0, le=_UINT32)] = 0
    sampling_seed: int | None = None


class GenerateBody(RoutedBody):
    """POST /generate."""

    text: str | Texts | None = None
    input_ids: TokenIds | TokenIdLists | None = None
    sampling_params: SGLangSampling = Field(default_factory=SGLangSampling)
    stream: bool = False
    rid: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give either text or input_ids")
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


class AbortBody(Body):
    """POST /abort_request."""

    rid: str = ""
    abort_all: bool = False


class TokenizeBody(Body):
    """POST /tokenize: a text or a chat."""

    model: str | None = None
    prompt: str | Texts | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool = False
