"""The bodies of POST /v1/messages and /v1/messages/count_tokens, and their conversion to a chat.

A message of blocks becomes messages of a chat: first the results of calls, each with the role tool, then the rest, with
its texts joined, its thinking as reasoning, and its calls. Neighbouring messages of one role become one, since most
templates want the roles to alternate.

``cache_control`` is checked as Anthropic's service checks it, and has no effect: every prefix is cached, and none is
pinned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tanghulu.conductor.inference.body import Body, Name
from tanghulu.conductor.inference.messages import MAX_MESSAGES, MAX_PARTS
from tanghulu.conductor.inference.schema import (
    MAX_CLIENT_CHARS,
    MAX_TOOLS,
    ChatBody,
    ModelName,
    NumTokens,
    RoutedBody,
    Stop,
    Temperature,
    TokenizeBody,
    TopK,
    TopP,
    translated,
)

MAX_BREAKPOINTS: Final = 4
MIN_THINKING_TOKENS: Final = 1024
#: Beginning of the system block in which Claude's clients send a number that differs in every request: kept, it would
#: leave no two requests a common prefix.
BILLING_HEADER: Final = "x-anthropic-billing-header:"
#: Required fields of each type of block.
_REQUIRED: Final[dict[str, tuple[str, ...]]] = {
    "text": ("text",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
}
#: The only role that may have blocks of a type; messages of any role have text.
_ROLES: Final = {"tool_result": "user"} | dict.fromkeys(("tool_use", "thinking", "redacted_thinking"), "assistant")
#: Template variables of a type of thinking; others leave the choice to the template.
_ENABLE_THINKING: Final = {"enabled": {"enable_thinking": True}, "disabled": {"enable_thinking": False}}
#: Names in these bodies of a chat's fields that have another name.
_NAMES: Final = {"stop": "stop_sequences", "response_format": "output_config", "reasoning_effort": "output_config"}


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class CacheControl(Body):
    """``cache_control``: the end of a prefix to cache."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class _Cacheable(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    cache_control: CacheControl | None = None


class TextBlock(_Cacheable):
    """A block of the system prompt or of a tool's result: text alone."""

    kinds: ClassVar[tuple[str, ...]] = ("text",)
    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.type not in self.kinds:
            raise ValueError(f"blocks of type {self.type[:64]!r} are not supported here; send {', '.join(self.kinds)}")
        if any(getattr(self, name) is None for name in _REQUIRED[self.type]):
            raise ValueError(f"a block of type {self.type} requires the fields {', '.join(_REQUIRED[self.type])}")
        if self.cache_control is not None and ("thinking" in self.type or self.text == ""):
            raise ValueError("cache_control is not allowed on thinking and on empty text; set it on another block")
        return self


TextBlocks = Annotated[
    list[TextBlock],
    Field(max_length=MAX_PARTS, fail_fast=True),
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock]),
]


class ContentBlock(TextBlock):
    """A block of a message: text, thinking, a call of a tool, or its result."""

    kinds: ClassVar[tuple[str, ...]] = tuple(_REQUIRED)
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: TextBlocks | None = None

    def for_chat(self) -> dict[str, Any]:
        """Return a call of a tool in a chat's format."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.input}}


class MessageParam(BaseModel):
    """One turn of the conversation."""

    model_config = ConfigDict(strict=True, extra="ignore")
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[ContentBlock],
        Field(max_length=MAX_PARTS, fail_fast=True),
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[ContentBlock]),
    ]

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        kinds = [block.type for block in self.content]
        for kind in kinds:
            if (role := _ROLES.get(kind, self.role)) != self.role:
                raise ValueError(f"a block of type {kind} belongs in a message of the role {role}")
        if "tool_result" in kinds[kinds.count("tool_result") :]:
            raise ValueError("blocks of type tool_result must precede all others of their message")
        return self


def _custom(kind: Any) -> Any:
    if kind is not None and kind != "custom":
        raise ValueError(f"tools of type {str(kind)[:64]!r} are not run here; describe a function by its input_schema")
    return kind


class ToolParam(_Cacheable):
    """One of ``tools``: a function that the model may call."""

    type: Annotated[str | None, BeforeValidator(_custom, json_schema_input_type=Literal["custom"])] = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        """Return the tool in a chat's format."""
        given = {"description": self.description, "parameters": self.input_schema, "strict": self.strict}
        more = {name: value for name, value in given.items() if value is not None}
        return {"type": "function", "function": {"name": self.name, **more}}


class ToolChoice(Body):
    """``tool_choice``."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    """The tool to call, with type tool."""
    disable_parallel_tool_use: bool = False
    """At most one call."""

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.type == "tool" and self.name is None:
            raise ValueError("type tool requires the field name with the tool to call")
        return self

    def for_chat(self) -> str | dict[str, Any]:
        """Return the choice in a chat's format."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class ThinkingConfig(Body):
    """``thinking``."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    """enabled and disabled set the template's enable_thinking; others leave it to the template."""
    budget_tokens: Annotated[int, Field(ge=MIN_THINKING_TOKENS)] | None = None
    """Without effect: max_tokens bounds thinking and text together."""
    display: Literal["summarized", "omitted"] | None = None
    """omitted leaves blocks of thinking empty."""


class JsonFormat(Body):
    """``output_config.format``."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """``output_config``."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """The template's variable reasoning_effort."""
    format: JsonFormat | None = None
    """A JSON schema of the answer's text, with type json_schema."""


class Metadata(Body):
    """``metadata``."""

    user_id: Annotated[str, Field(max_length=MAX_CLIENT_CHARS)] | None = None
    """As user."""


class CountTokensBody(Body):
    """POST /v1/messages/count_tokens: the fields that make the prompt of a message."""

    prompt_fields: ClassVar[tuple[str, ...]] = ("messages",)
    model: ModelName | None = None
    """Default: the first served model."""
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    """Content is a text or a list of blocks: text, thinking, tool_use, tool_result."""
    system: TextBlocks | None = None
    """A text or a list of text blocks."""
    tools: Annotated[list[ToolParam], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """Functions the model may call (docs/tools.md)."""
    tool_choice: ToolChoice | None = None
    """type auto, any, tool or none."""
    thinking: ThinkingConfig | None = None
    """type enabled, disabled, adaptive or between_tools."""
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    """effort and format."""
    cache_control: CacheControl | None = None
    """Checked, without effect, as on blocks and tools: prefixes are cached without it."""

    @model_validator(mode="after")
    def _few_breakpoints(self) -> Self:
        blocks = [each for turn in self.messages for block in turn.content for each in (*(block.content or ()), block)]
        places: list[_Cacheable | CountTokensBody] = [*(self.tools or ()), *(self.system or ()), *blocks, self]
        ttls = [place.cache_control.ttl for place in places if place.cache_control is not None]
        if len(ttls) > MAX_BREAKPOINTS:
            raise ValueError(f"cache_control is set at {len(ttls)} places; the limit is {MAX_BREAKPOINTS}")
        if "5m" in ttls and "1h" in ttls[ttls.index("5m") :]:
            raise ValueError("cache_control of ttl 1h must precede that of 5m, in tools, then system, then messages")
        return self

    def for_tokens(self) -> TokenizeBody:
        """Return the body of /tokenize with the same prompt. Raises BadField."""
        return translated(TokenizeBody, self, self._prompt(), _NAMES)

    def _prompt(self) -> dict[str, Any]:
        choice, thinking = self.tool_choice, self.thinking.type if self.thinking is not None else ""
        return {
            "messages": messages_of(self.system or (), self.messages),
            "tools": [tool.for_chat() for tool in self.tools or ()] or None,
            "tool_choice": choice.for_chat() if choice is not None else None,
            "parallel_tool_calls": choice is None or not choice.disable_parallel_tool_use,
            "chat_template_kwargs": _ENABLE_THINKING.get(thinking),
            "reasoning_effort": self.output_config.effort,
        }


class MessagesBody(CountTokensBody, RoutedBody):
    """POST /v1/messages."""

    max_tokens: NumTokens
    """The text ends earlier at the end of the context."""
    stop_sequences: Stop | None = None
    """Up to 4 texts."""
    temperature: Temperature | None = None
    """Default: the model's own, else 1."""
    top_p: TopP | None = None
    """Default: the model's own, else 1."""
    top_k: TopK | None = None
    """Default: the model's own, else off; -1 and 0 disable it."""
    metadata: Metadata = Field(default_factory=Metadata)
    """Holds the user_id."""
    stream: bool | None = False

    @model_validator(mode="after")
    def _user_last(self) -> Self:
        if self.messages[-1].role == "assistant":
            raise ValueError("the last message is the assistant's, which cannot be continued; end with one of the user")
        return self

    @property
    def hides_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"

    def chat(self) -> ChatBody:
        """Return the chat requested by this body. Raises BadField for anything a chat refuses."""
        form = self.output_config.format
        fields = {
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "user": self.user or self.metadata.user_id,
            "response_format": {"type": "json_schema", "json_schema": {"schema": form.schema_}} if form else None,
        }
        return translated(ChatBody, self, self._prompt() | fields, _NAMES)


def messages_of(system: Sequence[TextBlock], turns: Sequence[MessageParam]) -> list[dict[str, Any]]:
    """Return the messages of the chat."""
    if system and (system[0].text or "").startswith(BILLING_HEADER):
        system = system[1:]
    parts: list[tuple[str, Sequence[TextBlock]]] = [("system", [block]) for block in system]
    parts += [(turn.role, turn.content) for turn in turns]
    return [
        message for role, group in groupby(parts, itemgetter(0)) for message in _joined(role, [b for _, b in group])
    ]


def _joined(role: str, turns: Sequence[Sequence[TextBlock]]) -> Iterator[dict[str, Any]]:
    """Yield the messages of neighbouring turns of one role."""
    blocks = [block for turn in turns for block in turn if isinstance(block, ContentBlock)]
    results = [block for block in blocks if block.type == "tool_result"]
    for block in results:
        text = "".join(part.text or "" for part in block.content or ())
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
    if results and len(results) == len(blocks):
        return
    texts = ["".join(block.text or "" for block in turn if block.type == "text") for turn in turns]
    message: dict[str, Any] = {"role": role, "content": "\n\n".join(filter(None, texts))}
    if reasoning := "".join(block.thinking or "" for block in blocks):
        message["reasoning_content"] = reasoning
    if calls := [block.for_chat() for block in blocks if block.type == "tool_use"]:
        message["tool_calls"] = calls
    yield message
