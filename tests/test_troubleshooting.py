"""docs/guides/troubleshooting.md quotes what the program says: each message stands in the source, in these words."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/guides/troubleshooting.md"
ROOMS = ("src/tanghulu", "store", "conductor", "workers", "transfer_engine")
#: Of a part that varies, and of what stands between two quoted parts of one message.
GAP = r"[^\n]{0,120}?"
#: A table's first cells are messages below a head that says so.
HEAD = re.compile(r"^\| message \|", re.MULTILINE)


@cache
def messages() -> tuple[str, ...]:
    """The quoted messages, ``…`` where something varies."""
    found = []
    for table in HEAD.split(PAGE.read_text())[1:]:
        for row in table.splitlines()[2:]:
            if not row.startswith("| `"):
                break
            found.append(row.partition(" | ")[0].removeprefix("| `").removesuffix("`"))
    return tuple(found)


@cache
def source() -> str:
    """All texts of the program, those of several literals joined; a line is no longer what it was."""
    files = (path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    text = "\n".join(path.read_text() for path in files)
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_there_are_messages_in_every_table() -> None:
    assert len(messages()) > 40
    assert all(len(re.sub(r"\W", "", each)) > 12 for each in messages())


@pytest.mark.parametrize("message", messages())
def test_a_quoted_message_is_what_the_program_says(message: str) -> None:
    parts = [part for part in message.split("…") if part.strip()]
    assert re.search(GAP.join(map(re.escape, parts)), source()), "no such message in the source"
