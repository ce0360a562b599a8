"""The page of what crosses a wire as protobuf: services, messages and fields with the comments of protos/*.proto."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_HEAD = """\
Over gRPC, at the same port as everything else of a process. Comments are those of the files. The messages of the fast
lane, which clients and nodes of this program speak among themselves, are in `store/protocol/messages.py`;
`etcd.proto` is the part of etcd's interface that discovery uses, and is etcd's to explain.
"""
#: Of other programs.
_LEFT_OUT = ("etcd.proto",)
_BEGIN = re.compile(r"^(service|message|enum)\s+(\w+)\s*\{\s*(\})?")
_INNER = re.compile(r"^\s+(message|enum|oneof)\s+(\w+)\s*\{\s*(\})?")
_CALL = re.compile(r"^\s+rpc\s+(\w+)\((.*?)\)\s+returns\s+\((.*?)\)")
_FIELD = re.compile(
    r"^\s+(?:(repeated|optional)\s+)?([\w.]+|map<[^>]*>)\s+(\w+)\s*=\s*(\d+)\s*(?:\[[^\]]*\])?;\s*(?://\s*(.*))?$"
)
_VALUE = re.compile(r"^\s+(\w+)\s*=\s*(\d+)\s*;\s*(?://\s*(.*))?$")


class Unread(Exception):
    """A line of a file that this reader does not know."""


def page(folder: Path) -> str:
    """The whole page. Raises Unread, so that nothing is left out in silence."""
    lines = [_HEAD]
    for file in sorted(folder.glob("*.proto")):
        if file.name not in _LEFT_OUT:
            lines += [f"## {file.name}", "", *_file(file)]
    return "\n".join(lines).rstrip() + "\n"


def _file(file: Path) -> Iterator[str]:
    said: list[str] = []  # the comment that stands above what comes
    path: list[str] = []
    kind = ""
    rows: list[str] = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        bare = line.strip()
        if bare.startswith("//"):
            said.append(bare.removeprefix("//").strip())
        elif not bare or bare.startswith(("syntax ", "package ", "import ", "reserved ")):
            yield from _paragraph(said)
            said = []
        elif begin := _BEGIN.match(line):
            kind, name, ends = begin.groups()
            yield from (f"### {kind} {name}", "", *_paragraph(said))
            said, path, rows = [], [] if ends else [name], []
            if ends:
                yield from ("No fields.", "")
        elif inner := _INNER.match(line):
            rows.append(_row(f"{inner[1]} `{inner[2]}`", "", [*said, _trailing(line)]))
            path, said = path if inner[3] else [*path, inner[2]], []
        elif bare.startswith("}"):
            path, said = path[:-1], []
            if not path:
                yield from _table(kind, rows)
        elif path and (row := _read(line, path[1:], said)):
            rows.append(row)
            said = []
        else:
            raise Unread(f"{file.name}:{number}: {line}")


def _read(line: str, outer: list[str], said: list[str]) -> str:
    """The row of one call, field or value; nothing if the line is none."""
    within = "".join(f"{name}." for name in outer)
    if call := _CALL.match(line):
        return _row(f"`{call[1]}`", f"{call[2]} → {call[3]}", [*said, _trailing(line)])
    if field := _FIELD.match(line):
        kind = " ".join(word for word in (field[1], field[2]) if word)
        return _row(f"`{within}{field[3]}`", f"{kind} = {field[4]}", [*said, field[5] or ""])
    if value := _VALUE.match(line):
        return _row(f"`{within}{value[1]}`", f"= {value[2]}", [*said, value[3] or ""])
    return ""


def _trailing(line: str) -> str:
    return line.partition("//")[2].strip()


def _row(*cells: str | list[str]) -> str:
    told = [each if isinstance(each, str) else " ".join(part for part in each if part) for each in cells]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in told) + " |"


def _paragraph(said: list[str]) -> list[str]:
    return [" ".join(said).replace("<", "&lt;"), ""] if said else []


def _table(kind: str, rows: list[str]) -> list[str]:
    head = {"service": "| call | asks → answers | |", "enum": "| value | number | |"}.get(kind, "| field | type | |")
    return [head, "|---|---|---|", *rows, ""] if rows else ["No fields.", ""]
