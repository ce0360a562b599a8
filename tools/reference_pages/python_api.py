"""The page of the Python API: public names with their signatures and docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

import msgspec

import tanghulu
from tanghulu import aio
from tanghulu.store.client import ChunkInfo, KeyInfo, NodeView
from tanghulu.transfer_engine.client.handle import TransferHandle
from tanghulu.transfer_engine.client.requests import TransferBatch, TransferRequest
from tanghulu.transfer_engine.core.buffers import Buffer
from tanghulu.transfer_engine.engine import TransferEngine

_HEAD = """\
The public names; what else the modules have is the program's own. Examples and advice are in [Python](../python.md),
what is raised in [Errors](errors.md).
"""
_SECTIONS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "tanghulu": (
        "",
        (
            tanghulu.connect,
            tanghulu.Client,
            tanghulu.Chunk,
            tanghulu.Status,
            tanghulu.PutItem,
            ChunkInfo,
            KeyInfo,
            NodeView,
        ),
    ),
    "tanghulu.aio": (
        "`AsyncClient` has the methods of `Client`, as coroutines: `await client.put(...)`.",
        (aio.connect, aio.AsyncClient),
    ),
    "tanghulu.transfer_engine": (
        "Bytes between the buffers of processes, without the store.",
        (TransferEngine, TransferRequest, TransferBatch, TransferHandle, Buffer),
    ),
}
_HIDDEN = ("forget_in_child", "check")
_LINE = 90


def page() -> str:
    """The whole page."""
    lines = [_HEAD]
    for title, (said, names) in _SECTIONS.items():
        lines += [f"## {title}", "", *([said, ""] if said else [])]
        for each in names:
            lines += _class(each) if inspect.isclass(each) else _callable(each, each.__name__, "###")
    return "\n".join(lines).rstrip() + "\n"


def _class(kind: type[Any]) -> Iterator[str]:
    yield from (f"### {kind.__name__}", "", f"`from {_home(kind)} import {kind.__name__}`", "")
    yield from _text(kind)
    if dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct):
        yield from ("| field | type | default |", "|---|---|---|")
        for field in inspect.signature(kind).parameters.values():
            is_plain = field.default is not field.empty and repr(field.default) != "<factory>"
            default = f"`{field.default!r}`" if is_plain else ""
            of = re.sub(r"\bU(32|64)\b", "int", kind.__annotations__[field.name])
            yield f"| `{field.name}` | `{_cell(of)}` | {default} |"
        yield ""
    elif "__init__" in vars(kind) and kind is TransferEngine:
        yield from ("```python", f"{kind.__name__}{_signature(kind.__init__).removesuffix(' -> None')}", "```", "")
    if kind is aio.AsyncClient:
        return
    for name, member in vars(kind).items():
        if name.startswith("_") or name in _HIDDEN:
            continue
        if isinstance(member, property):
            yield from (f"#### {kind.__name__}.{name}", "", *_text(member))
        elif inspect.isfunction(member):
            yield from _callable(member, f"{kind.__name__}.{name}", "####")


def _callable(function: Any, name: str, level: str) -> Iterator[str]:
    short = name.rpartition(".")[2]
    word = "async def" if inspect.iscoroutinefunction(function) else "def"
    yield from (f"{level} {name}", "", "```python", f"{word} {short}{_signature(function)}", "```", "")
    yield from _text(function)


def _signature(function: Any) -> str:
    """As it is written in the code, without ``self``; an argument a line where one line is too short."""
    words, kinds, star = [], inspect.signature(function), False
    for name, each in kinds.parameters.items():
        if name == "self":
            continue
        if each.kind is each.KEYWORD_ONLY and not star:
            words.append("*")
            star = True
        said = "" if each.annotation is each.empty else f": {each.annotation}"
        default = "" if each.default is each.empty else f" = {each.default!r}"
        words.append(name + said + default)
    answer = "" if kinds.return_annotation is kinds.empty else f" -> {kinds.return_annotation}"
    line = f"({', '.join(words)}){answer}"
    return line if len(line) < _LINE else "(\n" + "".join(f"    {word},\n" for word in words) + f"){answer}"


def _text(of: Any) -> Iterator[str]:
    """A docstring as paragraphs; its indented blocks stay as they are."""
    said = inspect.getdoc(of) if not inspect.isclass(of) or of.__doc__ else ""
    if said and not said.startswith(f"{getattr(of, '__name__', '')}("):
        yield from (re.sub(r"``(.+?)``", r"`\1`", said).replace("<", "&lt;"), "")


def _home(kind: type[Any]) -> str:
    if getattr(tanghulu, kind.__name__, None) is kind:
        return "tanghulu"
    if getattr(aio, kind.__name__, None) is kind:
        return "tanghulu.aio"
    if kind in (ChunkInfo, KeyInfo, NodeView):
        return "tanghulu.store.client"
    return kind.__module__


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
