"""The tables of docs/reference/fields.md, written from the classes that bodies are checked by.

    python tools/field_tables.py            # write them anew
    python tools/field_tables.py --check    # fail if they differ

A table stands between ``<!-- fields NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Final

from tanghulu.conductor.http.anthropic.bodies import (
    JsonFormat,
    MessagesBody,
    Metadata,
    OutputConfig,
    ThinkingConfig,
    ToolChoice,
)
from tanghulu.conductor.http.responses.bodies import FormatOfText, ReasoningOptions, ResponsesBody, TextOptions
from tanghulu.conductor.inference import grammars, schema
from tanghulu.conductor.inference.body import IGNORED, UNSUPPORTED, Body

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "fields.md"
_TABLE = re.compile(r"(<!-- fields ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
BODIES: Final[dict[type[Body], str]] = {
    schema.ChatBody: "chat",
    schema.CompletionBody: "completions",
    ResponsesBody: "responses",
    MessagesBody: "messages",
    schema.GenerateBody: "/generate",
    schema.SGLangSampling: "sampling_params",
    schema.StreamOptions: "stream_options",
    grammars.StructuredOutputs: "structured_outputs",
    grammars.ResponseFormat: "response_format",
    grammars.JsonSchema: "response_format.json_schema",
    TextOptions: "responses' text",
    FormatOfText: "responses' text.format",
    ReasoningOptions: "responses' reasoning",
    ToolChoice: "messages' tool_choice",
    ThinkingConfig: "messages' thinking",
    OutputConfig: "messages' output_config",
    JsonFormat: "messages' output_config.format",
    Metadata: "messages' metadata",
}

#: A higher bound is that of the number's own type.
_MANY: Final = 1e5


def _kind(schema: dict[str, Any]) -> str:
    """The type of a field, by its JSON schema."""
    if "anyOf" in schema:
        kinds = [_kind(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema or "const" in schema:
        return ", ".join(schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "object")
    if kind == "array":
        of = _kind(schema.get("items", {}))
        of = of.replace("list of ", "lists of ") if of.startswith("list of ") else f"{of}s"
        return f"list of {of}" + (f" (up to {schema['maxItems']:,})" if "maxItems" in schema else "")
    return "text" if kind == "string" else kind


def _bounds(schema: dict[str, Any]) -> str:
    """The bounds of a number or a text; "" without any."""
    numbers = next((each for each in schema.get("anyOf", [schema]) if each.get("type") in ("number", "integer")), {})
    low, high = numbers.get("minimum", numbers.get("exclusiveMinimum")), numbers.get("maximum")
    if "exclusiveMaximum" in numbers:
        high = numbers["exclusiveMaximum"] - 1
    above = "above " if "exclusiveMinimum" in numbers else ""
    if low is None or high is None:
        return ""
    return f", {above}{low:,g} to {high:,g}" if high < _MANY else f", {above or 'from '}{low:,}"


def _works() -> str:
    rows: dict[tuple[str, str, str], list[str]] = {}
    for body, of in BODIES.items():
        shown = body.model_json_schema()
        for name, field in shown["properties"].items():
            note = ("Required. " if name in shown.get("required", ()) else "") + field.get("description", "")
            rows.setdefault((name, _kind(field) + _bounds(field), note.strip()), []).append(of)
    lines = [f"| `{name}` | {', '.join(of)} | {kind} | {note} |" for (name, kind, note), of in rows.items()]
    return "\n".join(["| field | of | type | |", "|---|---|---|---|", *lines, ""])


def _unsupported() -> str:
    merged: dict[str, list[str]] = {}
    for name, why in UNSUPPORTED.items():
        merged.setdefault(why, []).append(f"`{name}`")
    return "\n".join(
        ["| field | |", "|---|---|", *(f"| {', '.join(names)} | {why} |" for why, names in merged.items()), ""]
    )


def _ignored() -> str:
    return ", ".join(f"`{name}`" for name in sorted(IGNORED)) + ".\n"


_TABLES: Final = {"works": _works, "unsupported": _unsupported, "ignored": _ignored}


def filled(page: str) -> str:
    """``page`` with its tables as the code has them."""
    return _TABLE.sub(lambda match: match[1] + _TABLES[match[2]]() + match[3], page)


def main() -> int:
    """Write the page anew; with --check only compare."""
    page = PAGE.read_text()
    if "--check" in sys.argv[1:]:
        if filled(page) != page:
            print(f"{PAGE} is stale: python tools/field_tables.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(filled(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
