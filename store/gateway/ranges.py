"""Two headers of RFC 9110: Range (section 14, one range of bytes) and If-None-Match (13.1.2). Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tanghulu.errors import InvalidRequest

_ONE = re.compile(r"bytes\s*=\s*(\d{0,19})\s*-\s*(\d{0,19})\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """``length`` bytes of a value from ``offset`` on."""

    offset: int
    length: int

    def content_range(self, size_bytes: int) -> str:
        """The Content-Range header of an answer with this part of a value of ``size_bytes``."""
        return f"bytes {self.offset}-{self.offset + self.length - 1}/{size_bytes}"


class RangeNotSatisfiable(InvalidRequest):
    """The value has no byte of the range that was asked for."""

    code = "RANGE_NOT_SATISFIABLE"

    def __init__(self, message: str, size_bytes: int) -> None:
        super().__init__(message)
        self.size_bytes = size_bytes


def asks_for_part(header: str | None) -> bool:
    """Whether ``header`` is one well-formed range; several at once, and other units, are answered with everything."""
    found = _ONE.fullmatch(header or "")
    if found is None or found.groups() == ("", ""):
        return False
    first, last = found.groups()
    return not (first and last) or int(first) <= int(last)


def names_tag(header: str | None, tag: str) -> bool:
    """Whether an If-None-Match ``header`` names the entity tag, weakly or not, in its list or by ``*``."""
    listed = [each.strip().removeprefix("W/") for each in (header or "").split(",")]
    return tag in listed or listed == ["*"]


def part_of(header: str, size_bytes: int) -> ByteRange:
    """The range that ``header``, of which ``asks_for_part`` is true, means for a value of ``size_bytes``.

    Example of 10 bytes: ``bytes=2-4`` is (2, 3), ``bytes=8-`` (8, 2), ``bytes=-3`` (7, 3), ``bytes=5-99`` (5, 5).
    Raises RangeNotSatisfiable for ``bytes=10-`` and ``bytes=-0``.
    """
    found = _ONE.fullmatch(header)
    assert found is not None
    first, last = found.groups()
    if first:
        begin, end = int(first), min(int(last) + 1, size_bytes) if last else size_bytes
    else:
        begin, end = max(size_bytes - int(last), 0), size_bytes
    if begin >= end:
        raise RangeNotSatisfiable(f"{header}: the value has {size_bytes} bytes", size_bytes)
    return ByteRange(begin, end - begin)
