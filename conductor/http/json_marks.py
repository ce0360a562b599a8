"""The bound on how many values a JSON body has, found while the body arrives.

A parser turns each value into an object and keeps the interpreter to itself until it is through: 30 MB of one text take
it some 50 ms, 30 MB of ``{},{},{}`` seconds and gigabytes. So the marks that part values are counted in each piece,
outside of strings, at a gigabyte a second.
"""

from __future__ import annotations

from typing import Final

from tanghulu.web.errors import BadField

#: Commas of a body, with each bracket as FULL_BRACKET of them: a prompt of a million token ids passes.
MAX_MARKS: Final = 1 << 20
#: What an object or array costs a parser, in numbers.
FULL_BRACKET: Final = 4


class JsonMarks:
    """Counts the marks of one JSON text that comes in pieces. Pure.

    Example: ``{"a": "x, \\"y\\", z", "b": [1, 2]}`` has 2 brackets and 2 commas, which makes 10 marks; the commas and
    quotes inside of the string do not count, wherever the pieces are cut.
    """

    def __init__(self, most: int = MAX_MARKS) -> None:
        self.num_marks = 0
        self._most = most
        self._in_string = False
        self._carried = b""  # a backslash whose partner comes with the next piece

    def feed(self, piece: bytes) -> None:
        """Count ``piece``. Raises BadField when the text has more marks than the bound."""
        text = (self._carried + piece).replace(b"\\\\", b"")  # pairs of backslashes, from the left, as JSON reads them
        self._carried = b"\\" if text.endswith(b"\\") else b""
        text = text.replace(b'\\"', b"")
        parts = text.split(b'"')
        for part in parts[1 if self._in_string else 0 :: 2]:
            self.num_marks += part.count(b",") + FULL_BRACKET * (part.count(b"[") + part.count(b"{"))
        self._in_string ^= len(parts) % 2 == 0
        if self.num_marks > self._most:
            raise BadField(f"the body has more than {self._most} values; send a long prompt as a text")
