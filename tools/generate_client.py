"""Generate the blocking client's methods from the asyncio client's, or check that they are up to date (``--check``).

    store/client/aio.py     AsyncClient: every method by hand
    store/client/client.py  Client: what differs by hand (connect, constructor, close, ``with``), and between two marks
                            the methods of AsyncClient without ``async`` and ``await``

Both clients run the same logic (``store.client.logic``), so their methods differ in nothing else.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CLIENT = Path(__file__).parent.parent / "store" / "client"
SOURCE, TARGET = CLIENT / "aio.py", CLIENT / "client.py"
#: In the source, the first line of what is the same in both clients, and the first line behind it.
FIRST, BEHIND = "    # --- puts\n", "    # --- life\n"
#: In the target, the lines around it.
BEGIN = "    # --- generated from aio.py by tools/generate_client.py; do not edit\n\n"
END = "    # --- end of what is generated\n"
LINE_LENGTH = 120

_SIGNATURE = re.compile(r"^(    def \w+\()\n +(.+[^,])\n    (\) -> .+:)$", re.MULTILINE)


def blocking(methods: str) -> str:
    """Methods of a class without ``async`` and ``await``, in the formatter's lines."""
    methods = re.sub(r"\basync def\b", "def", methods)
    methods = re.sub(r"\bawait ", "", methods)
    return _SIGNATURE.sub(_on_one_line, methods)


def _on_one_line(signature: re.Match[str]) -> str:
    line = "".join(signature.groups())
    return line if len(line) <= LINE_LENGTH else signature[0]


def between(text: str, first: str, behind: str, path: Path) -> tuple[str, str, str]:
    """(what is in front of the line ``first``, from there on, from ``behind`` on); each must be there once."""
    for mark in (first, behind):
        if text.count(mark) != 1:
            raise SystemExit(f"{path.name} has the line {mark.strip()!r} {text.count(mark)} times, it should be once")
    start, end = text.index(first), text.index(behind)
    return text[:start], text[start:end], text[end:]


def generate() -> str:
    """What client.py should be."""
    _, methods, _ = between(SOURCE.read_text(), FIRST, BEHIND, SOURCE)
    front, _, rest = between(TARGET.read_text(), BEGIN, END, TARGET)
    return front + BEGIN + blocking(methods) + rest


def main() -> int:
    """Regenerate in place; with --check only compare, and fail if anything differs."""
    wanted = generate()
    stale = wanted != TARGET.read_text()
    if "--check" in sys.argv[1:]:
        if stale:
            print("store/client/client.py is not what aio.py says: run tools/generate_client.py", file=sys.stderr)
        return int(stale)
    TARGET.write_text(wanted)
    print(f"{TARGET.name}: {'changed' if stale else 'up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
