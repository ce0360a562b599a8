"""A call as Python writes it: ``get_weather(city="Paris", days=[1, 2])``. Only names and literals, nothing is run.

Besides Python's words JSON's are taken (true, false, null), which models mix in.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

MAX_DEPTH: Final = 64
_WORDS: Final = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_NAME = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.-]{0,255})\s*")
_NUMBER = re.compile(r"[+-]?(?:\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})(?:[eE][+-]?\d{1,4})?", re.ASCII)
_SPACE = re.compile(r"\s*")
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}


class MalformedCall(ValueError):
    """The text is no call whose arguments are named literals."""


def parse_call(text: str) -> tuple[str, str]:
    """The name and the arguments, as a JSON object, of the call that ``text`` is. Raises MalformedCall."""
    reader = _Reader(text)
    name = reader.word()
    reader.expect("(")
    arguments: dict[str, Any] = {}
    while not reader.skipped(")"):
        if arguments:
            reader.expect(",")
            if reader.skipped(")"):
                break
        key = reader.word()
        if key in arguments:
            raise MalformedCall(f"the argument {key} comes twice")
        reader.expect("=")
        arguments[key] = reader.value(0)
    if reader.rest().strip():
        raise MalformedCall("there is text behind the call")
    try:
        return name, _as_json(arguments)
    except ValueError as error:
        raise MalformedCall(str(error)) from error


def _as_json(arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    # Half a character, which "\ud800" makes, can only stand in JSON escaped.
    return text if not re.search("[\ud800-\udfff]", text) else json.dumps(arguments, allow_nan=False)


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rest(self) -> str:
        return self._text[self._at :]

    def word(self) -> str:
        found = _NAME.match(self._text, self._at)
        if found is None:
            raise MalformedCall("a name is missing")
        self._at = found.end()
        return found[1]

    def skipped(self, character: str) -> bool:
        """Whether ``character`` comes next; then it is passed over."""
        at = self._skip_space()
        if not self._text.startswith(character, at):
            return False
        self._at = at + 1
        return True

    def expect(self, character: str) -> None:
        if not self.skipped(character):
            raise MalformedCall(f"{character} is missing")

    def _skip_space(self) -> int:
        found = _SPACE.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
        return self._at

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise MalformedCall("the arguments are nested too deeply")
        for opening, closing in ("[]", "()"):
            if self.skipped(opening):
                return self._items(closing, depth + 1)
        if self.skipped("{"):
            return self._pairs(depth + 1)
        if self._text.startswith(('"', "'"), self._skip_space()):
            return self._string()
        if number := _NUMBER.match(self._text, self._at):
            self._at = number.end()
            return json.loads(number[0]) if re.fullmatch(r"-?(0|[1-9]\d*)", number[0]) else float(number[0])
        name = self.word()
        if name not in _WORDS:
            raise MalformedCall(f"{name} is no literal")
        return _WORDS[name]

    def _items(self, closing: str, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self.skipped(closing):
            if items:
                self.expect(",")
                if self.skipped(closing):
                    break
            items.append(self.value(depth))
        return items

    def _pairs(self, depth: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        while not self.skipped("}"):
            if pairs:
                self.expect(",")
                if self.skipped("}"):
                    break
            key = self.value(depth)
            if not isinstance(key, str):
                raise MalformedCall("a key is no string")
            self.expect(":")
            pairs[key] = self.value(depth)
        return pairs

    def _string(self) -> str:
        quote, self._at = self._text[self._at], self._at + 1
        out: list[str] = []
        while self._at < len(self._text):
            character = self._text[self._at]
            self._at += 1
            if character == quote:
                return "".join(out)
            out.append(self._escaped() if character == "\\" else character)
        raise MalformedCall("a string does not end")

    def _escaped(self) -> str:
        character = self._text[self._at : self._at + 1]
        self._at += 1
        if (digits := _HEX_DIGITS.get(character)) is not None:
            code, self._at = self._text[self._at : self._at + digits], self._at + digits
            if not re.fullmatch(f"[0-9A-Fa-f]{{{digits}}}", code) or int(code, 16) > 0x10FFFF:
                raise MalformedCall("an escape is no character")
            return chr(int(code, 16))
        if character in _ESCAPES:
            return _ESCAPES[character]
        return character if character in "\\'\"" else "\\" + character
