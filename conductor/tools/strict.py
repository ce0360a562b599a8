"""The grammar under which an answer is free, but for the arguments of its calls, which keep to their schemas.

Written in llguidance's dialect of Lark. A marker that is a special token of the model stands there by its id; the free
text has no special tokens in it, so what is not written here cannot be called.

Example, Hermes: any text, then ``<tool_call>``; from there on only a call of one of the functions, with arguments that
its schema takes, and ``</tool_call>``; and so on, until the text ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tanghulu.conductor.tools import json_calls
from tanghulu.conductor.tools.schemas import arguments_schema

#: The id of a special token by its text; None for a text that is none.
SpecialToken = Callable[[str], int | None]
_HEAD = "%llguidance {}\n"
_ANY_TEXT = r"TEXT: /(.|\n)*/"
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class StrictTool:
    """A function, and the schema of its arguments, empty where it takes none; None where they may be any."""

    name: str
    parameters: Mapping[str, Any] | None


def strict_grammar(form: str, tools: Sequence[StrictTool], special: SpecialToken, prefixed: bool) -> str | None:
    """The grammar of answers in ``form`` with calls of ``tools``; None where that form cannot be written as one.

    ``prefixed``: Mistral's newer form, names in front of arguments.
    """
    match form:
        case "hermes":
            return _hermes(tools, special)
        case "llama3_json":
            return _llama3(tools, special)
        case "mistral":
            return _mistral(tools, special, prefixed)
    return None


def _hermes(tools: Sequence[StrictTool], special: SpecialToken) -> str:
    opening, closing = json_calls.HERMES.opening, json_calls.HERMES.closing
    rules = [
        f'start: (before "\\n"? call "\\n"? {_marker(closing, special)})* TEXT',
        _before(opening, special),
        *_objects(tools, "arguments"),
    ]
    return _HEAD + "\n".join([*rules, _ANY_TEXT, ""])


def _llama3(tools: Sequence[StrictTool], special: SpecialToken) -> str:
    opening = json_calls.LLAMA3.opening
    first = "" if special(opening) is None else f"{_marker(opening, special)}? "
    # Free text begins with neither a bracket, nor with what may be a marker that is no token of its own.
    excluded = "{" if first else "{<"
    rules = [
        f'start: {first}call ("; " call)* | FREE',
        *_objects(tools, "parameters"),
        rf"FREE: /\s*([^\s{excluded}](.|\n)*)?/",
    ]
    return _HEAD + "\n".join([*rules, ""])


def _mistral(tools: Sequence[StrictTool], special: SpecialToken, prefixed: bool) -> str:
    before = _before(json_calls.MISTRAL.opening, special)
    if prefixed:
        mark = _marker("[ARGS]", special)
        calls = [f"call: {_either(tools)}"]
        calls += [f"call_{i}: {json.dumps(t.name)} {mark} {_schema(t)}" for i, t in enumerate(tools)]
        rules = ["start: (before call)* TEXT", before, *calls]
    else:
        rules = ['start: (before " "? "[" call (", " call)* "]")? TEXT', before, *_objects(tools, "arguments")]
    return _HEAD + "\n".join([*rules, _ANY_TEXT, ""])


def _before(opening: str, special: SpecialToken) -> str:
    """The rule of free text up to ``opening``, and that."""
    if special(opening) is not None:
        return f"before: TEXT {_marker(opening, special)}"
    return f"before[suffix={json.dumps(opening)}]: /(.|\\n)*/"


def _marker(text: str, special: SpecialToken) -> str:
    token = special(text)
    return json.dumps(text) if token is None else f"<[{token}]>"


def _objects(tools: Sequence[StrictTool], key: str) -> list[str]:
    """The rule ``call``: a JSON object of a name and the arguments under ``key``."""
    rules = [f"call: {_either(tools)}"]
    for number, tool in enumerate(tools):
        head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{key}": ')
        rules.append(f'call_{number}: {head} {_schema(tool)} "}}"')
    return rules


def _either(tools: Sequence[StrictTool]) -> str:
    return " | ".join(f"call_{number}" for number in range(len(tools)))


def _schema(tool: StrictTool) -> str:
    parameters = _ANY_OBJECT if tool.parameters is None else tool.parameters
    return f"%json {arguments_schema(parameters, strict=True)}"
