"""A check that text arriving in pieces is one JSON value, and where that value ends.

Proceeds character by character, so that cuts do not matter, and stores only the open brackets. One common error of
models is corrected on the way: a bare control character inside a string, such as a line break, is escaped.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto
from typing import Final

MAX_DEPTH: Final = 128
WHITESPACE: Final = " \t\r\n"
#: Longest number or literal.
_MAX_SCALAR_CHARACTERS: Final = 400
_SCALAR = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|true|false|null", re.ASCII)
_SCALAR_CHARACTERS: Final = frozenset("+-.0123456789aeflnrstuE")
#: Characters of a string that need no escape.
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')


class _At(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    ESCAPE = auto()
    SCALAR = auto()


class JsonScanner:
    """One JSON value. ``done``: it has ended. ``broken``: the text is not a JSON value. At most one of them is set."""

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._open: list[str] = []
        self._at = _At.VALUE
        self._is_key = False
        self._hex_digits = 0
        self._scalar = ""

    def feed(self, text: str) -> tuple[int, str]:
        """Process ``text``; return how many characters belong to the value, and their output."""
        position, out = 0, []
        while position < len(text) and not (self.done or self.broken):
            if self._at is _At.STRING and (plain := _PLAIN.match(text, position)):
                out.append(plain[0])
                position = plain.end()
                continue
            shown = self._take(text[position])
            if shown is None:
                break
            out.append(shown)
            position += 1
        return position, "".join(out)

    def _take(self, character: str) -> str | None:
        """Return the output for the character; None if it is not part of the value."""
        if self._at is _At.STRING:
            return self._in_string(character)
        if self._at is _At.ESCAPE:
            return self._in_escape(character)
        if self._at is _At.SCALAR:
            if character in _SCALAR_CHARACTERS and len(self._scalar) < _MAX_SCALAR_CHARACTERS:
                self._scalar += character
                return character
            if not _SCALAR.fullmatch(self._scalar):
                self.broken = True
                return None
            self._value_ended()
            return None if self.done else self._take(character)
        if character in WHITESPACE:
            return character
        self.broken = not self._between(character)
        return None if self.broken else character

    def _in_string(self, character: str) -> str:
        if character == '"':
            if self._is_key:
                self._is_key, self._at = False, _At.COLON
            else:
                self._value_ended()
        elif character == "\\":
            self._at = _At.ESCAPE
        elif character < " ":
            return json.dumps(character)[1:-1]
        return character

    def _in_escape(self, character: str) -> str | None:
        if self._hex_digits:
            if character not in "0123456789abcdefABCDEF":
                self.broken = True
            self._hex_digits -= 1
        elif character == "u":
            self._hex_digits = 4
        elif character not in '"\\/bfnrt':
            self.broken = True
        if not self._hex_digits:
            self._at = _At.STRING
        return None if self.broken else character

    def _between(self, character: str) -> bool:
        """Process a character outside strings, numbers and literals; False if it is not allowed here."""
        match self._at:
            case _At.VALUE | _At.VALUE_OR_END:
                if character == "]" and self._at is _At.VALUE_OR_END:
                    return self._close(character)
                return self._value_begins(character)
            case _At.KEY | _At.KEY_OR_END:
                if character == "}" and self._at is _At.KEY_OR_END:
                    return self._close(character)
                self._is_key, self._at = True, _At.STRING
                return character == '"'
            case _At.COLON:
                self._at = _At.VALUE
                return character == ":"
            case _:
                if character == ",":
                    self._at = _At.KEY if self._open[-1] == "{" else _At.VALUE
                    return True
                return self._close(character)

    def _value_begins(self, character: str) -> bool:
        if character in "{[":
            self._open.append(character)
            self._at = _At.KEY_OR_END if character == "{" else _At.VALUE_OR_END
            return len(self._open) <= MAX_DEPTH
        if character == '"':
            self._at = _At.STRING
            return True
        self._at, self._scalar = _At.SCALAR, character
        return character in _SCALAR_CHARACTERS

    def _close(self, character: str) -> bool:
        if character != {"{": "}", "[": "]"}[self._open[-1]]:
            return False
        self._open.pop()
        self._value_ended()
        return True

    def _value_ended(self) -> None:
        self._at = _At.COMMA_OR_END
        self.done = not self._open
