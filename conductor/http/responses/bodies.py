"""The body of POST /v1/responses, and its conversion to a chat.

A response is a chat under other names: items become messages, and the chat's own body validates and prepares the rest.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tanghulu.conductor.inference.body import Body, Name
from tanghulu.conductor.inference.messages import MAX_MESSAGES, MAX_PARTS
from tanghulu.conductor.inference.schema import (
    MAX_LABELS,
    MAX_TOOLS,
    ChatBody,
    NumTokens,
    RoutedBody,
    Temperature,
    TopP,
    at_most,
    translated,
)
from tanghulu.session.sampling import MAX_LOGPROBS
from tanghulu.web.errors import BadField

LOGPROBS = "message.output_text.logprobs"
#: Part types of an earlier item that contain text.
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class InputPart(BaseModel):
    """A part of an item's content; only text is supported."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: str
    text: str | None = None
    refusal: str | None = None

    def shown(self) -> str:
        if self.type in _TEXT_PARTS and self.text is not None:
            return self.text
        if self.type == "refusal" and self.refusal is not None:
            return self.refusal
        raise BadField(f"parts of type {self.type[:64]!r} are not supported; send text", "input")


InputParts = Annotated[list[InputPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class InputItem(BaseModel):
    """One item of ``input``: a message, a call of a function, its output, or a chain of thought."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: str | None = None
    role: str | None = None
    content: str | InputParts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | InputParts | None = None
    summary: InputParts | None = None


class FunctionTool(BaseModel):
    """One of ``tools``: a function that the model may call."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        """Return the tool in a chat's format."""
        if self.type != "function":
            raise BadField(f"tools of type {self.type[:64]!r} are not supported; use functions", "tools")
        given = self.model_dump(exclude_none=True, exclude={"type"})
        return {"type": "function", "function": given}


class FormatOfText(Body):
    """``text.format``."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    """Not shown to the model."""
    strict: bool | None = None
    """Reject a schema that cannot be enforced completely."""
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """Default: any JSON."""


class TextOptions(Body):
    """``text``: the format of the answer's text."""

    format: FormatOfText | None = None


class ReasoningOptions(Body):
    """``reasoning``."""

    effort: str | None = None
    """A variable for the template."""


class ResponsesBody(RoutedBody):
    """POST /v1/responses."""

    prompt_fields: ClassVar[tuple[str, ...]] = ("input",)
    input: str | Annotated[list[InputItem], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    """A text, or items: messages, calls, their outputs, reasoning."""
    instructions: str | None = None
    """A system message placed first; not kept for the next turn."""
    max_output_tokens: NumTokens | None = None
    """Default: up to the end of the context."""
    temperature: Temperature | None = None
    """Default: the model's own, else 1."""
    top_p: TopP | None = None
    """Default: the model's own, else 1."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Number of likely tokens listed for each token."""
    include: Annotated[list[Name], Field(max_length=MAX_LABELS, fail_fast=True)] | None = None
    """Only message.output_text.logprobs is supported."""
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """Functions the model may call (docs/tools.md)."""
    tool_choice: str | dict[str, Any] | None = None
    """none, auto, required, or the name of a function."""
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    """Format of the text, in its field format."""
    reasoning: ReasoningOptions | None = None
    """Holds the effort."""
    store: bool = True
    """Keep the response in this process while there is room."""
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    """Continue this response; 400 if it is no longer kept."""
    metadata: Annotated[dict[Name, Name], Field(max_length=MAX_LABELS), at_most(MAX_LABELS)] | None = None
    """Returned in the response."""
    stream: bool | None = False

    @field_validator("input")
    @classmethod
    def _something(cls, given: str | list[InputItem]) -> str | list[InputItem]:
        if not given:
            raise ValueError("must not be empty; give a text or items")
        return given

    @property
    def unknown(self) -> tuple[str, ...]:
        """Unknown fields of every body, and unsupported values of ``include``."""
        return (*self._unknown, *(f"include.{name}" for name in self.include or () if name != LOGPROBS))

    @property
    def shows_logprobs(self) -> bool:
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())

    def chat(self, messages: list[dict[str, Any]]) -> ChatBody:
        """Build the chat of ``messages`` requested by this body. Raises BadField for anything a chat refuses."""
        given: dict[str, Any] = {
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": self.shows_logprobs,
            "top_logprobs": self.top_logprobs,
            "tools": [tool.for_chat() for tool in self.tools or ()] or None,
            "tool_choice": _choice_for_chat(self.tool_choice) if self.tools or self.tool_choice != "auto" else None,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._format_for_chat(),
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
        }
        chat = translated(ChatBody, self, given, _NAMES)
        if self.previous_response_id is not None:
            chat.set_large()
        return chat

    def _format_for_chat(self) -> dict[str, Any] | None:
        form = self.text.format if self.text is not None else None
        if form is None or form.type != "json_schema":
            return {"type": form.type} if form is not None else None
        schema = {"name": form.name, "strict": form.strict, "schema": form.schema_ or {}}
        return {"type": "json_schema", "json_schema": schema}


#: A chat's names for fields that have another name in a response.
_NAMES = {"messages": "input", "response_format": "text", "reasoning_effort": "reasoning"}


def _choice_for_chat(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise BadField("tool_choice must be none, auto, required, or a function with type and name", "tool_choice")
    return {"type": "function", "function": {"name": choice["name"]}}


def messages_of(given: str | list[InputItem]) -> list[dict[str, Any]]:
    """Convert ``input`` to messages: calls join the assistant's message before them."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for item in given:
        match item.type or "message":
            case "message":
                _add_message(messages, item)
            case "function_call":
                _add_call(messages, item)
            case "function_call_output":
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            case "reasoning":
                reasoning += _text(item.content) or _text(item.summary)
                continue
            case other:
                raise BadField(
                    f"items of type {other[:64]!r} are not supported; send message, function_call, "
                    "function_call_output or reasoning",
                    "input",
                )
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = messages[-1].get("reasoning_content", "") + reasoning
        reasoning = ""
    return messages


def _add_message(messages: list[dict[str, Any]], item: InputItem) -> None:
    """Append a message; an assistant's text after its calls joins the message containing the calls."""
    role, text = "user" if item.role is None else item.role, _text(item.content)
    if role == "assistant" and messages and "tool_calls" in messages[-1]:
        messages[-1]["content"] = (messages[-1]["content"] or "") + text
    else:
        messages.append({"role": role, "content": text})


def _add_call(messages: list[dict[str, Any]], item: InputItem) -> None:
    if item.name is None or item.call_id is None:
        raise BadField("a function_call requires name, call_id and arguments", "input")
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    function = {"name": item.name, "arguments": item.arguments or "{}"}
    call = {"id": item.call_id, "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def _text(content: str | list[InputPart] | None) -> str:
    return content if isinstance(content, str) else "".join(part.shown() for part in content or ())


def with_instructions(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ``messages`` after the instructions, which are merged with an existing system message."""
    if not instructions:
        return messages
    if messages and messages[0]["role"] in ("system", "developer"):
        return [{"role": "system", "content": f"{instructions}\n\n{messages[0]['content']}"}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]
