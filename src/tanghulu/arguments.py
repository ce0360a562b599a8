"""Checks of callers' arguments: each returns the value in one form, or raises InvalidRequest naming the argument.

The values may have numpy's types, as when they come out of arrays.
"""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any

from tanghulu.errors import InvalidRequest


def whole(name: str, value: Any, least: int, most: int) -> int:
    """Return ``value`` as an int within ``least`` to ``most``."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidRequest(f"{name}={value!r:.80} is not a whole number") from None
    if not least <= number <= most:
        raise InvalidRequest(f"{name}={value!r} is not within {least} to {most}")
    return number


def above_zero(name: str, value: Any, most: float = math.inf) -> float:
    """Return ``value`` as a float greater than 0 and at most ``most``; by default it may be infinite."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise InvalidRequest(f"{name}={value!r:.80} is not a number")
    number = float(value)
    if not 0 < number <= most:  # NaN is neither
        bound = "" if math.isinf(most) else f" and at most {most:g}"
        raise InvalidRequest(f"{name}={value!r} must be more than 0{bound}")
    return number


def text(name: str, value: Any) -> str:
    """Return ``value`` if it is a str that UTF-8 can encode."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{name}={value!r:.80} is not a str")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name}={value!r:.80} is not UTF-8: {error}") from None
    return value
