"""Tool calls requested by a chat: its tools validated, shown to the model, and the answer's grammar and parser.

A tool choice of "required" or of one function is enforced by a grammar: the answer is then JSON as described by
`schemas`, whatever the model's own format of calls, and is parsed as such.

A model whose chat template does not support tools gets them in the system message, in the format of Hermes and Qwen.
Calls and results of earlier turns become plain text in the same format, so that any template for system, user and
assistant messages works.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from tanghulu.conductor.inference.grammars import MAX_GRAMMAR_CHARS
from tanghulu.conductor.inference.messages import FunctionDefinition, Tool
from tanghulu.conductor.inference.schema import ChatPrompt
from tanghulu.conductor.text.served_model import ServedModel
from tanghulu.conductor.tools import schemas
from tanghulu.conductor.tools.call_reader import ARGUMENTS_MARK
from tanghulu.conductor.tools.choosing import NONE, AnswerForm, call_parser, forced_parser
from tanghulu.conductor.tools.events import AnswerParser
from tanghulu.conductor.tools.reasoning import PlainAnswer, ReasoningParser
from tanghulu.conductor.tools.schemas import StrictTool, strict_grammar
from tanghulu.web.errors import BadField

_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True)
class WantedCalls:
    """``tools`` that may be called, none where calls are not allowed; ``forced``: at least one must be.

    ``only``: the one function that must be called. ``most``: limit of calls in one answer; None for no limit.
    """

    tools: tuple[Tool, ...] = ()
    forced: bool = False
    only: str | None = None
    most: int | None = None

    @classmethod
    def of(cls, body: ChatPrompt) -> WantedCalls:
        """Parse the fields of ``body`` that concern tools. Raises BadField."""
        tools = tuple(body.tools or ())
        choice, only = _choice_of(body.tool_choice, [tool.function.name for tool in tools])
        if choice == "none":
            return cls()
        _check_tools(tools)
        most = 1 if body.parallel_tool_calls is False else None
        return cls(tools, choice == "required", only, most)

    @property
    def names(self) -> list[str]:
        return [tool.function.name for tool in self.tools]

    def shown(
        self, messages: list[dict[str, Any]], form: AnswerForm
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Return messages and tools for the template of a model of ``form``, in a message if it has no tools."""
        tools = [tool.for_template() for tool in self.tools]
        if form.shows_tools or (form.shows_calls and not tools):
            return messages, tools or None
        return with_tools(messages, tools), None

    def schema(self) -> str | None:
        """Return the JSON schema required of the answer; None if it is free. Raises BadField if too long."""
        if not self.forced:
            return None
        tools = [tool.function for tool in self.tools if self.only in (None, tool.function.name)]
        _check_length(sum(len(msgspec.json.encode(tool.parameters)) for tool in tools))
        strict = any(tool.strict for tool in tools)
        if self.only is not None:
            text = schemas.arguments_schema(tools[0].parameters, strict)
        else:
            most = self.most or schemas.MAX_FORCED_CALLS
            text = schemas.calls_schema([(tool.name, tool.parameters) for tool in tools], most, strict)
        _check_length(len(text))
        return text

    def strict_grammar(self, model: ServedModel, form: AnswerForm) -> str | None:
        """Return the grammar that binds calls of strict tools to their schemas; None without any. Raises BadField."""
        if self.forced or form.tool_calls == NONE or not any(tool.function.strict for tool in self.tools):
            return None
        bound = [tool.function.parameters for tool in self.tools if tool.function.strict]
        _check_length(sum(len(msgspec.json.encode(parameters)) for parameters in bound))
        tools = [
            StrictTool(tool.function.name, (tool.function.parameters or {}) if tool.function.strict else None)
            for tool in self.tools
        ]
        prefixed = ARGUMENTS_MARK in model.card.chat_template
        text = strict_grammar(form.tool_calls, tools, model.special_token, prefixed)
        if text is None:
            raise BadField(
                f"strict requires tool_choice required or a function: this model's format of calls, {form.tool_calls}, "
                "cannot be bound to a schema",
                "tools",
            )
        _check_length(len(text))
        return text

    def new_parser(self, form: AnswerForm, free: bool, opened: bool) -> Callable[[], AnswerParser]:
        """Return a factory for the parser of each choice.

        ``free``: no grammar of the client constrains the text, which otherwise begins with its match; ``opened``: the
        prompt ends inside reasoning.
        """
        names, only = self.names, self.only
        if self.forced:
            return lambda: forced_parser(form.tool_calls, names, only)
        reads_calls = bool(names) and form.tool_calls != NONE
        if form.reasoning == NONE or not free:
            return (lambda: call_parser(form.tool_calls, names)) if reads_calls else PlainAnswer

        def behind_reasoning() -> AnswerParser:
            answer = call_parser(form.tool_calls, names) if reads_calls else PlainAnswer()
            return ReasoningParser(answer, opened)

        return behind_reasoning


def _check_length(num_characters: int) -> None:
    if num_characters > MAX_GRAMMAR_CHARS:
        raise BadField(
            f"the schemas of strict or required tools have {num_characters} characters; the limit is "
            f"{MAX_GRAMMAR_CHARS}",
            "tools",
        )


def _choice_of(given: str | dict[str, Any] | None, names: Sequence[str]) -> tuple[str, str | None]:
    """Return the choice by name, and the function it names, if any."""
    if not names:
        if given not in (None, "none"):
            raise BadField("tool_choice requires tools", "tool_choice")
        return "none", None
    if given is None:
        return "auto", None
    if isinstance(given, str):
        if given not in _CHOICES:
            raise BadField(f"tool_choice {given[:64]!r} is unknown; use one of {', '.join(_CHOICES)}", "tool_choice")
        return given, None
    function = given.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if given.get("type") != "function" or not isinstance(name, str):
        raise BadField(
            'tool_choice must be one of none, auto and required, or {"type": "function", "function": {"name": ...}}',
            "tool_choice",
        )
    if name not in names:
        raise BadField(f"tool_choice names the function {name[:128]!r}, which is not among tools", "tool_choice")
    return "required", name


def _check_tools(tools: Sequence[Tool]) -> None:
    seen = set()
    for tool in tools:
        function = tool.function
        if function.name in seen:
            raise BadField(f"tools contains the function {function.name!r} twice", "tools")
        seen.add(function.name)
        _check_parameters(function)


def _check_parameters(function: FunctionDefinition) -> None:
    parameters = function.parameters or {}
    if parameters.get("type", "object") != "object":
        raise BadField(f"the parameters of {function.name!r} must be a schema of type object", "tools")
    if not isinstance(parameters.get("properties", {}), dict):
        raise BadField(f"the properties of {function.name!r}'s parameters must be an object", "tools")
    if not schemas.check_depth(parameters):
        raise BadField(
            f"the parameters of {function.name!r} are nested more than {schemas.MAX_SCHEMA_DEPTH} deep", "tools"
        )


_INSTRUCTIONS: Final = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return ``messages`` with ``tools`` in the system message, and earlier calls as text."""
    out = [dict(message) for message in plain_messages(messages)]
    if tools:
        text = _INSTRUCTIONS.format(tools="\n".join(_dumps(tool) for tool in tools))
        if out and out[0]["role"] == "system":
            out[0]["content"] = f"{out[0].get('content') or ''}\n\n{text}".lstrip()
        else:
            out.insert(0, {"role": "system", "content": text})
    return out


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return ``messages`` with calls and results as text. Consecutive results share one user message."""
    out: list[dict[str, Any]] = []
    previous = ""
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            if previous == "tool":
                out[-1]["content"] += f"\n{text}"
            else:
                out.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            calls = [_call_text(call["function"]) for call in message["tool_calls"]]
            parts = [message["content"]] if message.get("content") else []
            out.append({"role": message["role"], "content": "\n".join([*parts, *calls])})
        else:
            out.append(dict(message))
        previous = message["role"]
    return out


def _call_text(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{_dumps(call)}\n</tool_call>"


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
