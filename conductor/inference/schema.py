"""The bodies that clients send, checked: types strictly, ranges here.

Owns the types and bounds of the fields that work; `http.fields` has all names, and what becomes of the others.
Knows nothing of models or tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, ClassVar, Final, Literal, Self

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from tanghulu.auth.api_keys import ApiKey
from tanghulu.conductor.inference.json_marks import MAX_CHAT_MARKS, MAX_MARKS, marks_of
from tanghulu.conductor.routing.overrides import WEIGHTS, RoutingOverrides
from tanghulu.conductor.routing.policies.registry import POLICY_NAMES
from tanghulu.conductor.routing.requests import Timeouts
from tanghulu.conductor.stories.origin import Origin
from tanghulu.conductor.text.stop_regex import MAX_PATTERN_CHARACTERS
from tanghulu.conductor.text.stop_strings import MAX_GENERATE_STOP_STRINGS, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from tanghulu.conductor.tools.schemas import check_depth, grammar_of
from tanghulu.hashing import joined
from tanghulu.session.sampling import MAX_LOGIT_BIAS, MAX_LOGPROB_TOKEN_IDS, MAX_LOGPROBS
from tanghulu.types import InstanceId
from tanghulu.web.errors import BadField

MAX_CHOICES = 16
MAX_SEQUENCES = 128
MAX_MESSAGES = 4096
MAX_STOP_TOKENS = 256
MAX_GRAMMAR_CHARS = 65_536
MAX_STOP_PATTERNS = 4
MAX_CHOICE_TEXTS = 256
MAX_TOOLS = 128
#: Calls, or parts of the content, of one message.
MAX_PARTS = 16_384
#: Who speaks in a message.
ROLES = ("system", "developer", "user", "assistant", "tool")
#: Values of bodies that clients send with a request for themselves, as ``metadata``.
MAX_LABELS = 16
MAX_NAME_CHARS = 1024
MAX_CLIENT_CHARS = 65_536
#: A longer name of a user travels as its hash.
MAX_USER_CHARS = 64
_UINT32 = (1 << 32) - 1

_ESCAPES = {ord(character): f"\\{character}" for character in r"\.+*?()|[]{}^$"}


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def at_most(count: int) -> BeforeValidator:
    """Refuses a list or an object of more than ``count`` values before any of them is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > count:
            raise ValueError(f"{len(value)} values; at most {count} are taken")
        return value

    return BeforeValidator(check)


def _fit_in_a_grammar(texts: list[str]) -> list[str]:
    if (length := sum(map(len, texts)) + len(texts)) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"the texts have {length} characters together; at most {MAX_GRAMMAR_CHARS}")
    return texts


def _few_prompts(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_SEQUENCES and not isinstance(value[0], int):
        raise ValueError(f"{len(value)} prompts in one request; at most {MAX_SEQUENCES}")
    return value


#: One text stands for a list of it.
_ONE_OR_MORE = BeforeValidator(_as_list, json_schema_input_type=str | list[str])

TokenId = Annotated[int, Field(ge=0, le=_UINT32)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
Stop = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True), _ONE_OR_MORE]
GenerateStop = Annotated[list[StopString], Field(max_length=MAX_GENERATE_STOP_STRINGS, fail_fast=True), _ONE_OR_MORE]
StopExpression = Annotated[str, Field(min_length=1, max_length=MAX_PATTERN_CHARACTERS)]
StopExpressions = Annotated[list[StopExpression], Field(max_length=MAX_STOP_PATTERNS, fail_fast=True), _ONE_OR_MORE]
ChoiceTexts = Annotated[
    list[GrammarText],
    Field(min_length=1, max_length=MAX_CHOICE_TEXTS, fail_fast=True),
    AfterValidator(_fit_in_a_grammar),
]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
#: A name that no model has is not found, however long it is.
ModelName = Annotated[str, Field(max_length=MAX_CLIENT_CHARS)]
CallId = Annotated[str, Field(min_length=1, max_length=256)]
NumTokens = Annotated[int, Field(ge=1, le=_UINT32)]
NumTokensOrNone = Annotated[int, Field(ge=0, le=_UINT32)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_MARKS, fail_fast=True)]
Texts = Annotated[list[str], Field(max_length=MAX_SEQUENCES, fail_fast=True)]
TokenIdLists = Annotated[list[TokenIds], Field(max_length=MAX_SEQUENCES, fail_fast=True)]
#: Fail fast: else a prompt of 100 000 ids would first be collected as 100 000 errors of a list of strings.
Prompts = Annotated[str | Texts | TokenIds | TokenIdLists, BeforeValidator(_few_prompts)]


class Api(Enum):
    """What has fields of its own: a body, or an object inside of one."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    GENERATE = "/generate"
    SAMPLING_PARAMS = "sampling_params of /generate"
    STREAM_OPTIONS = "stream_options"
    STRUCTURED_OUTPUTS = "structured_outputs"
    RESPONSE_FORMAT = "response_format"
    JSON_SCHEMA = "json_schema of response_format"
    TEXT = "text of /v1/responses"
    TEXT_FORMAT = "format of text"
    REASONING = "reasoning of /v1/responses"


class Body(BaseModel):
    """The base of all bodies. ``unknown`` are the names of the client's fields that mean nothing here.

    One that ``is_large`` is made ready in a thread, not in the event loop.
    """

    model_config = ConfigDict(strict=True, extra="ignore")
    #: The table of `http.fields` that has the names of this body; None: there are no others than those below.
    api: ClassVar[Api | None] = None
    #: Values that such a body may be made of; only lists of token ids need many.
    max_marks: ClassVar[int] = MAX_CHAT_MARKS
    _unknown: tuple[str, ...] = PrivateAttr(())
    _is_large: bool = PrivateAttr(False)

    @property
    def prompt_field(self) -> str | None:
        """The field that has the prompt, for errors about it; None of a body without one."""
        return None

    @property
    def unknown(self) -> tuple[str, ...]:
        return self._unknown

    def set_unknown(self, names: tuple[str, ...]) -> None:
        self._unknown = names

    @property
    def is_large(self) -> bool:
        return self._is_large

    def set_large(self) -> None:
        self._is_large = True


JsonText = GrammarText | dict[str, Any] | bool


class StructuredOutputs(Body):
    """``structured_outputs``, the name of a grammar in vLLM; one of them is given."""

    api: ClassVar[Api | None] = Api.STRUCTURED_OUTPUTS
    json_: Annotated[JsonText | None, Field(alias="json")] = None
    regex: GrammarText | None = None
    choice: ChoiceTexts | None = None
    json_object: bool = False


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
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS), at_most(MAX_LOGIT_BIAS)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, le=_UINT32)] = 0
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    stop_regex: StopExpressions | None = None
    regex: GrammarText | None = None
    json_schema: GrammarText | None = None

    def grammars(self) -> dict[str, tuple[str, str]]:
        """The grammars that are asked for: the name of the field -> (json_schema or regex, its text)."""
        found = {}
        if self.json_schema is not None:
            found["json_schema"] = ("json_schema", _json_text("json_schema", self.json_schema))
        if self.regex is not None:
            found["regex"] = ("regex", self.regex)
        return found


def _json_text(name: str, schema: JsonText, strict: bool = False) -> str:
    """The text of the grammar of ``schema``, which the field ``name`` has. Raises BadField."""
    try:
        given = msgspec.json.decode(schema, type=dict[str, Any] | bool) if isinstance(schema, str) else schema
        if not isinstance(schema, str) and len(msgspec.json.encode(schema)) > MAX_GRAMMAR_CHARS:
            raise BadField(f"{name} has more than {MAX_GRAMMAR_CHARS} characters", name.partition(".")[0])
        return grammar_of(given, strict)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadField(f"{name} is no JSON schema: {error}", name.partition(".")[0]) from None


def _one_of(texts: list[str]) -> str:
    """The expression that matches each of ``texts`` and nothing else."""
    return "|".join(text.translate(_ESCAPES) for text in texts)


class StreamOptions(Body):
    """``stream_options``."""

    api: ClassVar[Api | None] = Api.STREAM_OPTIONS
    include_usage: bool = False
    continuous_usage_stats: bool = False


#: The JSON schema of any object.
ANY_OBJECT: Final = grammar_of({"type": "object"}, strict=False)


class JsonSchema(Body):
    """``json_schema`` of a response format."""

    api: ClassVar[Api | None] = Api.JSON_SCHEMA
    name: Name = ""
    strict: bool | None = None
    schema_: dict[str, Any] | bool = Field(default_factory=dict, alias="schema")


class ResponseFormat(Body):
    """The format of the text: free, JSON, or JSON that a schema accepts."""

    api: ClassVar[Api | None] = Api.RESPONSE_FORMAT
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
            return _json_text("response_format", self.json_schema.schema_, bool(self.json_schema.strict))
        return ANY_OBJECT if self.type == "json_object" else None


TimeoutSeconds = Annotated[float, Field(gt=0, le=1e6)]
Weight = Annotated[float, Field(ge=0, le=1e6)]


Weights = Annotated[dict[Name, Weight], Field(max_length=MAX_LABELS), at_most(MAX_LABELS)]


class RoutingFields(Body):
    """``routing``: what this request asks of routing for itself; unknown names are refused, since they do nothing."""

    model_config = ConfigDict(strict=True, extra="forbid")
    policy: Name | None = None
    worker: Annotated[str, Field(max_length=256)] | None = None
    prefill_worker: Annotated[str, Field(max_length=256)] | None = None
    decode_worker: Annotated[str, Field(max_length=256)] | None = None
    weights: Weights = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_LABELS:  # else each name that is unknown would be a fault
            raise ValueError(f"{len(value)} fields; there are {', '.join(cls.model_fields)}")
        return value

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

    model: ModelName | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None
    extra_key: Annotated[str, Field(max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] = 0
    routing: RoutingFields | None = None
    user: Annotated[str, Field(max_length=MAX_CLIENT_CHARS)] | None = None
    request_timeout: TimeoutSeconds | None = None
    first_token_timeout: TimeoutSeconds | None = None
    token_timeout: TimeoutSeconds | None = None

    _sender: str = PrivateAttr("")
    _key: ApiKey | None = PrivateAttr(None)
    _origin: Origin | None = PrivateAttr(None)

    def came_from(self, sender: str, key: ApiKey | None = None, origin: Origin | None = None) -> None:
        """Note who sent the body, for those that name no ``user``; with a ``key`` of ours nothing else counts."""
        self._sender, self._key, self._origin = sender, key, origin

    @property
    def origin(self) -> Origin | None:
        """The HTTP request that the body came in."""
        return self._origin

    @property
    def weight(self) -> float:
        """Turns that the client has for each of another's."""
        return 1.0 if self._key is None else self._key.weight

    @property
    def client(self) -> str:
        """Who takes turns with others where many wait."""
        if self._key is not None:
            return self._key.client
        name = self.user or ""
        if len(name) > MAX_USER_CHARS:
            name = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        return f"user {name}" if name else self._sender

    @property
    def timeouts(self) -> Timeouts:
        """The longest waits that the request asks for."""
        return Timeouts(self.request_timeout or 0.0, self.first_token_timeout or 0.0, self.token_timeout or 0.0)

    @property
    def salt(self) -> bytes:
        """What the hashes of this request's blocks begin with, so that others do not share them."""
        named = (self.cache_salt or "").encode(), (self.extra_key or "").encode()
        salt = joined(*named) if any(named) else b""
        return salt if self._key is None else self._key.salted(salt)


class OpenAIBody(RoutedBody, SamplingFields):
    """The fields that chat and text completions share."""

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: NumTokens | None = None
    response_format: ResponseFormat | None = None
    guided_json: JsonText | None = None
    guided_regex: GrammarText | None = None
    guided_choice: ChoiceTexts | None = None
    structured_outputs: StructuredOutputs | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=_UINT32)] | None = None
    best_of: int | None = None
    request_id: CallId | None = None
    rid: CallId | None = None
    prompt_logprobs: NumLogprobs | None = None

    @model_validator(mode="after")
    def _no_prompt_in_a_stream(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs come with a whole answer only; leave stream out")
        return self

    @model_validator(mode="after")
    def _no_search(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of other than n is not supported; ask for n answers and choose among them")
        return self

    @property
    def call_id(self) -> str | None:
        """The id that the client gives its request, under vLLM's name or SGLang's."""
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
        """As for all bodies, and vLLM's names for them, old and new."""
        found: dict[str, tuple[str, str]] = {}
        format_text = self.response_format.schema_text if self.response_format is not None else None
        structured = self.structured_outputs or StructuredOutputs()
        if format_text is not None:
            found["response_format"] = ("json_schema", format_text)
        if self.guided_json is not None:
            found["guided_json"] = ("json_schema", _json_text("guided_json", self.guided_json))
        for name, choice in (("guided_choice", self.guided_choice), ("structured_outputs.choice", structured.choice)):
            if choice is not None:
                found[name] = ("regex", _one_of(choice))
        for name, regex in (("guided_regex", self.guided_regex), ("structured_outputs.regex", structured.regex)):
            if regex is not None:
                found[name] = ("regex", regex)
        if structured.json_ is not None:
            found["structured_outputs.json"] = ("json_schema", _json_text("structured_outputs.json", structured.json_))
        if structured.json_object:
            found["structured_outputs.json_object"] = ("json_schema", ANY_OBJECT)
        return found | super().grammars()


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    api: ClassVar[Api | None] = Api.COMPLETIONS
    max_marks: ClassVar[int] = MAX_MARKS
    prompt: Prompts
    echo: bool | None = False
    max_tokens: NumTokensOrNone | None = None
    logprobs: NumLogprobs | None = None
    add_special_tokens: bool = True

    @property
    def prompt_field(self) -> str | None:
        return "prompt"


def _only_text(kind: Any) -> Any:
    if kind not in ("text", "refusal") and isinstance(kind, str):
        raise ValueError(f"parts of type {kind[:64]!r} are not supported: models here read text alone")
    return kind


class TextPart(Body):
    """A part of a message's content; only text can be understood."""

    type: Annotated[Literal["text", "refusal"], BeforeValidator(_only_text)]
    text: str = ""
    refusal: str = ""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.type not in self.model_fields_set:
            raise ValueError(f"a part of type {self.type} needs {self.type}")
        return self


class CalledFunction(BaseModel):
    """The function that an assistant called, its arguments as text, or already as the object that the text is."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: str
    arguments: str | dict[str, Any] | None = None

    @property
    def num_marks(self) -> int:
        """The JSON values in the text of the arguments, as a body's are counted."""
        return marks_of(self.arguments.encode()) if isinstance(self.arguments, str) else 0

    def for_template(self) -> dict[str, Any]:
        """The function with its arguments as an object, as chat templates expect them.

        Text that is no JSON object, such as that of a call cut at ``max_tokens``, is shown under the name ``raw``.
        """
        given = self.arguments
        arguments = given if isinstance(given, dict) else _object_of(given or "")
        return {"name": self.name, "arguments": arguments, **(self.model_extra or {})}


def _object_of(text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text) if text.strip() else None
    except (msgspec.DecodeError, RecursionError):
        return {"raw": text}
    if value is None:
        return {}
    return value if isinstance(value, dict) and check_depth(value) else {"raw": text}


class ToolCall(BaseModel):
    """One call of an assistant's earlier turn."""

    model_config = ConfigDict(strict=True, extra="allow")
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        return {"type": "function", **(self.model_extra or {}), "function": self.function.for_template()}


def _known_role(role: Any) -> Any:
    if role not in ROLES:
        named = f"{role[:32]!r}" if isinstance(role, str) else "it"
        hint = "; a result of a call has the role tool, and tool_call_id" if role == "function" else ""
        raise ValueError(f"{named} is no role; there are {', '.join(ROLES)}{hint}")
    return role


def _no_function_call(value: Any) -> None:
    if value is not None:
        raise ValueError("the old name is not supported; use tool_calls")


class Message(BaseModel):
    """One message. Further fields that have a value (name, tool_call_id…) go to the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Annotated[str, BeforeValidator(_known_role, json_schema_input_type=Literal[ROLES])]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    function_call: Annotated[None, BeforeValidator(_no_function_call)] = None

    def for_template(self, knows_developer: bool = False) -> dict[str, Any]:
        """The message with its parts joined to one text, and the arguments of its calls as objects.

        Content is null only beside calls. Unless the template ``knows_developer``, such a message is a system message.
        """
        role = "system" if self.role == "developer" and not knows_developer else self.role
        more = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text or part.refusal for part in content)
        elif content is None:
            content = self.refusal
        if self.tool_calls:
            more["tool_calls"] = [call.for_template() for call in self.tool_calls]
        elif content is None:
            content = ""
        return {"role": role, "content": content, **more}


def _few_arguments(messages: list[Message]) -> list[Message]:
    if sum(call.function.num_marks for each in messages for call in each.tool_calls or ()) > MAX_CHAT_MARKS:
        raise ValueError(f"the arguments of calls have more than {MAX_CHAT_MARKS} values; leave out earlier turns")
    return messages


Messages = Annotated[
    list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), AfterValidator(_few_arguments)
]


class FunctionDefinition(BaseModel):
    """A function that the model may call; ``parameters`` is the JSON schema of its arguments."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: Annotated[str, Field(pattern="^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """One of ``tools``. Further fields go to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function"]
    function: FunctionDefinition
    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, value: Any, handler: Callable[[Any], Self]) -> Self:
        tool = handler(value)
        if isinstance(value, dict):
            tool._given = value
        return tool

    def for_template(self) -> dict[str, Any]:
        """The tool as it was given, word for word and in its order."""
        return self._given


class ChatPrompt(Body):
    """The fields that make a chat's prompt, for answering it and for counting its tokens."""

    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def prompt_field(self) -> str | None:
        return "messages" if self.messages is not None else "prompt"


class ChatBody(ChatPrompt, OpenAIBody):
    """POST /v1/chat/completions."""

    api: ClassVar[Api | None] = Api.CHAT
    messages: Messages
    max_completion_tokens: NumTokens | None = None
    logprobs: bool | None = False
    top_logprobs: NumLogprobs | None = None
    add_special_tokens: bool = False

    @model_validator(mode="after")
    def _logprobs_for_top(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self


class SGLangSampling(SamplingFields):
    """``sampling_params`` of /generate."""

    api: ClassVar[Api | None] = Api.SAMPLING_PARAMS
    stop: GenerateStop | None = None
    max_new_tokens: NumTokensOrNone | None = 128
    min_new_tokens: Annotated[int, Field(ge=0, le=_UINT32)] = 0
    sampling_seed: int | None = None


SamplingParams = SGLangSampling | Annotated[list[SGLangSampling], Field(max_length=MAX_SEQUENCES, fail_fast=True)]
CallIds = CallId | Annotated[list[CallId], Field(max_length=MAX_SEQUENCES, fail_fast=True)]
Flags = bool | Annotated[list[bool], Field(max_length=MAX_SEQUENCES, fail_fast=True)]
Counts = int | Annotated[list[int], Field(max_length=MAX_SEQUENCES, fail_fast=True)]
LogprobTokenIds = Annotated[list[TokenId], Field(max_length=MAX_LOGPROB_TOKEN_IDS, fail_fast=True)]
LogprobTokenIdLists = Annotated[list[LogprobTokenIds], Field(max_length=MAX_SEQUENCES, fail_fast=True)]


class GenerateBody(RoutedBody):
    """POST /generate. A list in place of one value has an item for each prompt."""

    api: ClassVar[Api | None] = Api.GENERATE
    max_marks: ClassVar[int] = MAX_MARKS
    text: Annotated[str | Texts | None, BeforeValidator(_few_prompts)] = None
    input_ids: Annotated[TokenIds | TokenIdLists | None, BeforeValidator(_few_prompts)] = None
    sampling_params: SamplingParams = Field(default_factory=SGLangSampling)
    stream: bool = False
    stream_output: bool = False
    rid: CallIds | None = None
    session_id: Annotated[str, Field(max_length=256)] | None = None
    return_logprob: Flags = False
    logprob_start_len: Counts = -1
    top_logprobs_num: Counts = 0
    token_ids_logprob: LogprobTokenIds | LogprobTokenIdLists | None = None
    return_text_in_logprobs: bool = False

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give either text or input_ids")
        if self.is_batch:
            for name in _A_PROMPT_EACH:
                value = getattr(self, name)
                if isinstance(value, list) and len(value) != len(self.prompts):
                    raise ValueError(f"{name} has {len(value)} items for {len(self.prompts)} prompts")
        elif listed := [name for name in _A_PROMPT_EACH if isinstance(getattr(self, name), list)]:
            raise ValueError(f"{listed[0]} is a list, but there is one prompt and no list of them")
        asked = self.token_ids_logprob
        if asked and isinstance(asked[0], list) and not (self.is_batch and len(asked) == len(self.prompts)):
            raise ValueError("token_ids_logprob is one list of token ids, or one for each of a list of prompts")
        if isinstance(self.rid, list) and len(set(self.rid)) < len(self.rid):
            raise ValueError("rid names two prompts alike")
        return self

    @property
    def prompts(self) -> Prompts:
        """The text or the token ids, as given."""
        prompts = self.text if self.text is not None else self.input_ids
        assert prompts is not None
        return prompts

    @property
    def prompt_field(self) -> str | None:
        return "text" if self.text is not None else "input_ids"

    @property
    def is_batch(self) -> bool:
        prompts = self.prompts
        return isinstance(prompts, list) and not (prompts and isinstance(prompts[0], int))

    def sampling_of(self, prompt: int) -> SGLangSampling:
        """The sampling parameters of a prompt."""
        given = self.sampling_params
        return given[prompt] if isinstance(given, list) else given

    def num_logprobs_of(self, prompt: int) -> int | None:
        """The number of most likely tokens that are shown beside each generated one; None: no log probabilities."""
        given = (self.return_logprob, self.top_logprobs_num)
        wanted, count = (value[prompt] if isinstance(value, list) else value for value in given)
        return count if wanted else None

    def logprob_start_len_of(self, prompt: int) -> int:
        """The first token of a prompt that is shown beside its log probability; -1: none is."""
        given = self.logprob_start_len
        return given[prompt] if isinstance(given, list) else given

    def logprob_token_ids_of(self, prompt: int) -> tuple[int, ...]:
        """The tokens whose log probabilities are shown everywhere, if any are."""
        given = self.token_ids_logprob or []
        own = given[prompt] if given and isinstance(given[0], list) else given
        return tuple(own) if self.num_logprobs_of(prompt) is not None else ()


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
    model: ModelName | None = None
    tokens: TokenIds
    skip_special_tokens: bool = False

    @property
    def prompt_field(self) -> str | None:
        return "tokens"
