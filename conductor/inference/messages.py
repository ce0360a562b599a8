"""The messages and tools of a chat, as sent by clients and as passed to templates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from tanghulu.conductor.inference.json_marks import MAX_CHAT_MARKS, marks_of
from tanghulu.conductor.tools.schemas import check_depth

MAX_MESSAGES = 4096
#: Most calls, or parts of the content, in one message.
MAX_PARTS = 16_384
#: Roles of a message.
ROLES = ("system", "developer", "user", "assistant", "tool")


def _only_text(kind: Any) -> Any:
    if kind not in ("text", "refusal") and isinstance(kind, str):
        raise ValueError(f"parts of type {kind[:64]!r} are not supported; send text")
    return kind


class TextPart(BaseModel):
    """A part of a message's content; only text is supported."""

    model_config = ConfigDict(strict=True, extra="ignore")
    type: Annotated[Literal["text", "refusal"], BeforeValidator(_only_text)]
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if getattr(self, self.type) is None:
            raise ValueError(f"a part of type {self.type} requires the field {self.type}")
        return self


class CalledFunction(BaseModel):
    """A function called by an assistant; its arguments as text, or as the object already parsed from it."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: str
    arguments: str | dict[str, Any] | None = None

    @property
    def num_marks(self) -> int:
        """JSON values in the text of the arguments, counted like those of a body."""
        return marks_of(self.arguments.encode()) if isinstance(self.arguments, str) else 0

    def for_template(self) -> dict[str, Any]:
        """Return the function with its arguments as an object, as chat templates expect them.

        Text that is not a JSON object, such as that of a call cut at ``max_tokens``, is passed under the name ``raw``.
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
        raise ValueError(f"{named} is not a role; use one of {', '.join(ROLES)}{hint}")
    return role


def _no_function_call(value: Any) -> None:
    if value is not None:
        raise ValueError("function_call is not supported; use tool_calls")


class Message(BaseModel):
    """One message. Additional non-empty fields (name, tool_call_id…) go to the chat template unchanged."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Annotated[str, BeforeValidator(_known_role, json_schema_input_type=Literal[ROLES])]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    function_call: Annotated[None, BeforeValidator(_no_function_call)] = None

    def for_template(self, has_developer: bool = False) -> dict[str, Any]:
        """Return the message with its parts joined to one text, and the arguments of its calls as objects.

        Missing content is "", as vLLM and SGLang pass it: many templates search it, or add to it. Unless the template
        ``has_developer``, a developer message becomes a system message.
        """
        role = "system" if self.role == "developer" and not has_developer else self.role
        more = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text or part.refusal or "" for part in content)
        elif content is None:
            content = self.refusal or ""
        if self.tool_calls:
            more["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return {"role": role, "content": content, **more}


def _few_arguments(messages: list[Message]) -> list[Message]:
    if sum(call.function.num_marks for each in messages for call in each.tool_calls or ()) > MAX_CHAT_MARKS:
        raise ValueError(f"the arguments of calls have more than {MAX_CHAT_MARKS} JSON values; omit earlier turns")
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
    """One of ``tools``. Additional fields go to the chat template."""

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
        """Return the tool exactly as given, in the original order."""
        return self._given
