"""Bounds on the contents of a JSON body, checked before it is parsed.

A parser turns each value into an object and holds the interpreter lock until it has finished: 30 MB of one text take 50
ms, or 150 ms in fresh memory; 30 MB of ``{},{},{}`` take seconds and gigabytes. So the marks that separate values are
counted first, and the longest string is measured. Usually it is enough to count marks anywhere in the text; only a body
that may have too many, or too long a string, is scanned with regard to its strings.
"""

from __future__ import annotations

import math
from typing import Final

from tanghulu.errors import ContextLengthExceeded
from tanghulu.web.errors import BadField

#: Commas of a body, with each bracket and each colon as BRACKET_MARKS: a prompt of a million token ids passes.
MAX_MARKS: Final = 1 << 20
#: The same for a body without a list of token ids, including the marks inside the argument texts of calls.
MAX_CHAT_MARKS: Final = 1 << 18
#: Memory per mark after parsing: enough for a short text, less is needed by a number, more by a validated call.
MARK_BYTES: Final = 64
#: Parsing cost of an object, an array or a name in an object, in numbers.
BRACKET_MARKS: Final = 4
#: Beyond this many marks, those in strings are told apart, unless the body is long: their cost counts as memory.
_FEW_MARKS: Final = 512
_CAREFUL_BYTES: Final = 1 << 20
#: The interpreter is released between two pieces.
_PIECE_BYTES: Final = 256 << 10


def check_marks(body: bytes | memoryview, most_string_bytes: float = math.inf, most_marks: int = MAX_MARKS) -> int:
    """Return an upper bound of the body's marks. Raises BadField, or ContextLengthExceeded for a long string."""
    starts = range(0, len(body), _PIECE_BYTES)
    marks = sum(_marks_of(bytes(body[start : start + _PIECE_BYTES])) for start in starts)
    is_cheap = marks <= _FEW_MARKS or len(body) > _CAREFUL_BYTES
    if is_cheap and marks <= most_marks and len(body) <= most_string_bytes:
        return marks
    counted = JsonMarks()
    for start in starts:
        counted.feed(bytes(body[start : start + _PIECE_BYTES]))
        if counted.num_marks > most_marks:
            raise BadField(f"the body has more than {most_marks} JSON values; send a long prompt as text")
        if counted.longest_string > most_string_bytes:
            raise ContextLengthExceeded(
                f"a string in the body has more than {most_string_bytes} bytes, too many for the context of any "
                "served model; shorten it"
            )
    return counted.num_marks


def marks_of(text: bytes) -> int:
    """Return the marks of a whole JSON text."""
    if (marks := _marks_of(text)) <= BRACKET_MARKS:
        return marks
    counted = JsonMarks()
    for start in range(0, len(text), _PIECE_BYTES):
        counted.feed(text[start : start + _PIECE_BYTES])
    return counted.num_marks


class JsonMarks:
    """Counts the marks of one JSON text, outside of strings, as its pieces arrive. Pure.

    Example: ``{"a": "x, \\"y\\", z", "b": [1, 2]}`` has 2 brackets, 2 colons and 2 commas: 18 marks; the commas and
    quotes inside the string do not count, wherever the pieces are cut.
    """

    def __init__(self) -> None:
        self.num_marks = 0
        #: Bytes of the longest string so far, without escaped quotes and backslashes.
        self.longest_string = 0
        self._open_bytes = 0  # of the unfinished string
        self._in_string = False
        self._carried = b""  # a backslash whose partner is in the next piece

    def feed(self, piece: bytes) -> None:
        """Count ``piece``."""
        text = (self._carried + piece).replace(b"\\\\", b"")  # pairs of backslashes, from the left, as JSON reads them
        self._carried = b"\\" if text.endswith(b"\\") else b""
        parts = text.removesuffix(self._carried).replace(b'\\"', b"").split(b'"')
        self.num_marks += sum(_marks_of(part) for part in parts[self._in_string :: 2])
        lengths = [len(part) for part in parts[not self._in_string :: 2]]
        if self._in_string:
            lengths[0] += self._open_bytes
        self._in_string ^= len(parts) % 2 == 0
        self._open_bytes = lengths[-1] if self._in_string else 0
        self.longest_string = max(self.longest_string, *lengths, 0)


def _marks_of(text: bytes) -> int:
    return text.count(b",") + BRACKET_MARKS * sum(map(text.count, (b"[", b"{", b":")))
