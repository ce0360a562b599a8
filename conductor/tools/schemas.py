"""Grammars for answers that are tool calls, or that are free except for the arguments of their calls.

A tool's parameters are a schema with references of its own (``#/$defs/City``). Several are combined in one schema, so
each is put under ``$defs`` with a unique name, and its references are adjusted. An object that lists its properties is
closed: it has no others, unless its schema mentions them. JSON Schema would allow any, and small models keep inventing
arguments, which no function accepts, until their tokens run out.

A strict grammar is written in llguidance's dialect of Lark. A marker that is a special token of the model is written by
its id; free text contains no special tokens, so only calls allowed by the grammar are possible. Example, Hermes: any
text, then ``<tool_call>``; from there on only a call of one of the functions, with arguments accepted by its schema,
and ``</tool_call>``; and so on, until the text ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from tanghulu.conductor.tools import json_calls

#: Most calls of one answer allowed by a grammar: a confused model would continue for ever.
MAX_FORCED_CALLS: Final = 16
MAX_SCHEMA_DEPTH: Final = 64
#: Arguments of a function without parameters.
_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
#: As models write JSON: a space after a colon and a comma, and none where blanks could continue for ever.
_GUIDANCE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
#: As people write JSON, with blank lines and indentation; bounded, as a confused model writes blanks to the end of its
#: tokens.
_BLANKS: Final = {"whitespace_pattern": r"[ \t]{0,2}(\r?\n){0,2}[ \t]{0,64}"}
#: Keys of number bounds, and the side of each.
_BOUNDS: Final = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
#: Largest magnitude of a bound supported by a grammar: the last double below 2^63.
_MOST: Final = 2**63 - 1024
#: Parts of patterns that no grammar supports.
_LOOKS_AROUND: Final = re.compile(r"\(\?<?[=!]|\\[1-9]|\\k<")
#: Values of these keys are data, not schemas.
_DATA: Final = frozenset(("enum", "const", "default", "examples", "example"))
#: The values of these keys are schemas under names chosen by the client.
_NAMED: Final = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
#: An object with one of these defines its other properties itself.
_OPEN: Final = frozenset(("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"))
#: A schema with one of these refers to properties listed by other schemas, too.
_COMBINING: Final = frozenset(("allOf", "if", "not", "dependentSchemas", "$dynamicRef"))
#: So does one that lists properties next to one of these.
_BESIDE_PROPERTIES: Final = frozenset(("$ref", "anyOf", "oneOf"))


def grammar_of(schema: Mapping[str, Any] | bool, strict: bool, writing: Mapping[str, Any] = _BLANKS) -> str:
    """Return ``schema`` as the text of a grammar, with ``writing``, llguidance's options for blanks.

    Rules that a grammar cannot enforce (sets, ``not``, ``if``, unknown formats, patterns that look around, bounds of
    2^63 and more) are left out, unless ``strict``: then workers refuse them. ``oneOf`` is treated as ``anyOf`` either
    way.
    """
    if schema is False:
        return "false"
    own = {} if schema is True else _copy(schema)
    for part in list(_parts(own)):
        _bound(part, strict)
        if not strict:
            _leave_out_patterns(part)
    own["x-guidance"] = {**writing, "coerce_one_of": True, "lenient": not strict}
    return msgspec.json.encode(own).decode()


def arguments_schema(parameters: Mapping[str, Any] | None, strict: bool = False) -> str:
    """Return the schema of one function's arguments, none without ``parameters``, as the entire answer."""
    return grammar_of(_object_schema(parameters), strict, _GUIDANCE)


def calls_schema(
    tools: Sequence[tuple[str, Mapping[str, Any] | None]], most: int = MAX_FORCED_CALLS, strict: bool = False
) -> str:
    """Return the schema of a list of one to ``most`` calls of ``tools``, each a name and optional parameters."""
    definitions, calls = {}, []
    for number, (name, parameters) in enumerate(tools):
        place = f"t{number}"
        definitions[place] = _moved(_object_schema(parameters), f"#/$defs/{place}", 0)
        properties = {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{place}"}}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        )
    items = {"anyOf": calls} if len(calls) > 1 else calls[0]
    listed = {"type": "array", "minItems": 1, "maxItems": most, "items": items, "$defs": definitions}
    return grammar_of(listed, strict, _GUIDANCE)


def check_depth(schema: Any, depth: int = 0) -> bool:
    """Return whether ``schema`` is nested at most MAX_SCHEMA_DEPTH deep."""
    if depth > MAX_SCHEMA_DEPTH:
        return False
    inner = schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list) else ()
    return all(check_depth(each, depth + 1) for each in inner)


def _object_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return ``parameters`` as a schema of an object; a function without any takes no arguments, as with OpenAI."""
    if not parameters:
        return dict(_NO_ARGUMENTS)
    parameters = _closed(parameters)
    return dict(parameters) if "type" in parameters or "$ref" in parameters else {"type": "object", **parameters}


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``schema`` with its objects closed; unchanged if several schemas describe one object."""
    own = _copy(schema)
    parts = list(_parts(own))
    if any(_combines(part) for part in parts):
        return schema
    for part in parts:
        if "properties" in part and not _OPEN & part.keys():
            part["additionalProperties"] = False
    return own


def _leave_out_patterns(part: dict[str, Any]) -> None:
    """Remove from one schema the patterns that llguidance rejects even in lenient mode."""
    if isinstance(pattern := part.get("pattern"), str) and _LOOKS_AROUND.search(pattern):
        del part["pattern"]
    named = part.get("patternProperties")
    if isinstance(named, dict) and any(map(_LOOKS_AROUND.search, named)):
        part["patternProperties"] = {name: inner for name, inner in named.items() if not _LOOKS_AROUND.search(name)}
        part.pop("additionalProperties", None)  # properties matched by a removed pattern are now additional ones


def _bound(part: dict[str, Any], strict: bool) -> None:
    """Adjust the bounds of one schema to grammars: slightly tighter for 64-bit integers, removed for others."""
    for name, side in _BOUNDS.items():
        if not isinstance(bound := part.get(name), int | float) or abs(bound) <= _MOST:
            continue
        if part.get("type") == "integer" and bound * side > 0:
            part[name] = side * _MOST
        elif not strict:
            del part[name]


def _copy(schema: Mapping[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(schema))
    return own


def _combines(part: Mapping[str, Any]) -> bool:
    return bool(_COMBINING & part.keys()) or ("properties" in part and bool(_BESIDE_PROPERTIES & part.keys()))


def _parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield ``schema`` and all schemas inside it."""
    yield schema
    for key, value in schema.items():
        if key in _DATA:
            continue
        named = key in _NAMED and isinstance(value, dict)
        inner = value.values() if named else value if isinstance(value, list) else (value,)
        for each in inner:
            if isinstance(each, dict):
                yield from _parts(each)


def _moved(schema: Any, root: str, depth: int) -> Any:
    """Return ``schema`` with references to its own root redirected to ``root``."""
    assert depth <= 2 * MAX_SCHEMA_DEPTH
    if isinstance(schema, list):
        return [_moved(each, root, depth + 1) for each in schema]
    if not isinstance(schema, dict):
        return schema
    out = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            out[key] = root + value[1:]
        else:
            out[key] = value if key in _DATA else _moved(value, root, depth + 1)
    return out


#: Returns the id of a special token by its text; None for other text.
SpecialToken = Callable[[str], int | None]
_HEAD = "%llguidance {}\n"
_ANY_TEXT = r"TEXT: /(.|\n)*/"
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class StrictTool:
    """A function, and the schema of its arguments: empty if it takes none, None if they are unrestricted."""

    name: str
    parameters: Mapping[str, Any] | None


def strict_grammar(form: str, tools: Sequence[StrictTool], special: SpecialToken, prefixed: bool) -> str | None:
    """Return the grammar of answers in ``form`` with calls of ``tools``; None if that form has no grammar.

    ``prefixed``: Mistral's newer form, with names before arguments.
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
    # Free text begins neither with a bracket, nor with a possible marker if the form contains no token of its own.
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
    """Return the rule of free text up to and including ``opening``."""
    if special(opening) is not None:
        return f"before: TEXT {_marker(opening, special)}"
    return f"before[suffix={json.dumps(opening)}]: /(.|\\n)*/"


def _marker(text: str, special: SpecialToken) -> str:
    token = special(text)
    return json.dumps(text) if token is None else f"<[{token}]>"


def _objects(tools: Sequence[StrictTool], key: str) -> list[str]:
    """Return the rule ``call``: a JSON object of a name and the arguments under ``key``."""
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
