"""The tables of fields in docs/http.md, written from the one that bodies are checked by.

    python tools/field_tables.py            # write them anew
    python tools/field_tables.py --check    # fail if they differ

A table stands between ``<!-- fields NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from tanghulu.conductor.http.fields import ROWS, Effect, FieldRow
from tanghulu.conductor.inference.schema import Api

PAGE = Path(__file__).parents[1] / "docs" / "http.md"
_TABLE = re.compile(r"(<!-- fields ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_APIS = {
    Api.CHAT: "chat",
    Api.COMPLETIONS: "completions",
    Api.RESPONSES: "responses",
    Api.GENERATE: "/generate",
    Api.SAMPLING_PARAMS: "sampling_params",
    Api.STREAM_OPTIONS: "stream_options",
    Api.STRUCTURED_OUTPUTS: "structured_outputs",
    Api.RESPONSE_FORMAT: "response_format",
    Api.JSON_SCHEMA: "response_format.json_schema",
    Api.TEXT: "responses' text",
    Api.TEXT_FORMAT: "responses' text.format",
    Api.REASONING: "responses' reasoning",
}
_EFFECTS = {"works": Effect.WORKS, "refused": Effect.REFUSED, "no-effect": Effect.NONE}


def _table(rows: Iterable[FieldRow]) -> str:
    lines = ["| field | of | |", "|---|---|---|"]
    merged: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        merged.setdefault((", ".join(_APIS[api] for api in row.apis), row.note), []).append(f"`{row.name}`")
    lines += [f"| {', '.join(names)} | {apis} | {note} |" for (apis, note), names in merged.items()]
    return "\n".join(lines) + "\n"


def filled(page: str) -> str:
    """``page`` with its tables as the code has them."""

    def table(match: re.Match[str]) -> str:
        effect = _EFFECTS[match[2]]
        return match[1] + _table(row for row in ROWS if row.effect is effect) + match[3]

    return _TABLE.sub(table, page)


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
