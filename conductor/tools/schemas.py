"""The JSON schemas under which an answer has to be tool calls.

A tool's parameters are a schema with references of its own (``#/$defs/City``). Several stand in one schema, so each is
put under ``$defs`` by a name of its own, and its references follow it there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

#: The most calls of one answer that a grammar lets through: a model at a loss would go on for ever.
MAX_FORCED_CALLS: Final = 16
MAX_SCHEMA_DEPTH: Final = 64
_ANY_OBJECT: Final = {"type": "object"}
#: As models write JSON: a space behind a colon and a comma, and none where one might go on and on.
_GUIDANCE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
#: Values of these keys are data, not schemas.
_DATA: Final = frozenset(("enum", "const", "default", "examples", "example"))


def arguments_schema(parameters: Mapping[str, Any] | None) -> str:
    """The schema of one function's arguments, for an answer that is nothing else."""
    return json.dumps({**_object_schema(parameters), "x-guidance": _GUIDANCE})


def calls_schema(tools: Sequence[tuple[str, Mapping[str, Any] | None]], most: int = MAX_FORCED_CALLS) -> str:
    """The schema of a list of one to ``most`` calls of ``tools``, each a name and its parameters."""
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
    return json.dumps(
        {
            "type": "array",
            "minItems": 1,
            "maxItems": most,
            "items": {"anyOf": calls} if len(calls) > 1 else calls[0],
            "$defs": definitions,
            "x-guidance": _GUIDANCE,
        }
    )


def check_depth(schema: Any, depth: int = 0) -> bool:
    """Whether ``schema`` is nested at most MAX_SCHEMA_DEPTH deep."""
    if depth > MAX_SCHEMA_DEPTH:
        return False
    inner = schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list) else ()
    return all(check_depth(each, depth + 1) for each in inner)


def _object_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """``parameters`` as a schema of an object; a function without any takes whatever the model gives it."""
    if not parameters:
        return dict(_ANY_OBJECT)
    return dict(parameters) if "type" in parameters or "$ref" in parameters else {"type": "object", **parameters}


def _moved(schema: Any, root: str, depth: int) -> Any:
    """``schema`` with its references to its own root led to ``root``."""
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
