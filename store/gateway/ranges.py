"""Headers of RFC 9110: Range (section 14, one range of bytes), If-Match and If-None-Match (13.1). Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tanghulu.errors import InvalidRequest
from tanghulu.web.errors import PreconditionFailed

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


def names_tag(header: str, tag: str | None, *, weakly: bool) -> bool:
    """Whether a condition's ``header`` names the entity tag in its list, or any by ``*``; None is no entity.

    If-None-Match compares ``weakly``, If-Match does not.
    """
    listed = [each.strip() for each in header.split(",")]
    if weakly:
        listed = [each.removeprefix("W/") for each in listed]
    return tag is not None and (tag in listed or listed == ["*"])


def check_conditions(if_match: str | None, if_none_match: str | None, tag: str | None) -> bool:
    """Whether If-None-Match names what is there, which a reader has already, then.

    Raises PreconditionFailed if If-Match does not name it.
    """
    if if_match is not None and not names_tag(if_match, tag, weakly=False):
        raise PreconditionFailed(f"If-Match is {if_match[:80]}, and {f'the ETag is {tag}' if tag else 'there is none'}")
    return if_none_match is not None and names_tag(if_none_match, tag, weakly=True)


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
