"""Tool calls as a Python list of calls: ``[get_weather(city="Paris"), get_time()]``, as Llama 3.2 and 4 write them.

The list is at the beginning of the answer, or after Llama 4's ``<|python_start|>``. Arguments have to be converted to
JSON, so a call is emitted when it is complete. Text that proves not to be such a list is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any, Final

from tanghulu.conductor.tools.events import (
    MAX_HELD_SPACE,
    AnswerEvent,
    CallArguments,
    CallBegin,
    CallEnd,
    ContentText,
    NewId,
    merged,
)

OPENING: Final = "<|python_start|>"
CLOSING: Final = "<|python_end|>"
#: A longer call is content.
MAX_CALL_CHARACTERS: Final = 65_536


class PythonicCallParser:
    """One answer. ``names``: the functions of the request; calls of others are content."""

    def __init__(self, names: Collection[str], new_id: NewId) -> None:
        self._names = names
        self._new_id = new_id
        self._events: list[AnswerEvent] = []
        self._num_calls = 0
        self._undecided = ""
        self._marked = False
        self._call_start = 0
        self._depth = 0
        self._quote = ""
        self._is_escaped = False
        self._state: Callable[[str], None] = self._start

    def feed(self, text: str) -> list[AnswerEvent]:
        for position, character in enumerate(text):
            if self._state == self._content:
                self._content(text[position:])
                break
            self._state(character)
        events, self._events = merged(self._events), []
        return events

    def finish(self) -> list[AnswerEvent]:
        if self._state not in (self._behind, self._closing):
            self._content(self._undecided)
        self._undecided = ""
        events, self._events = merged(self._events), []
        return events

    # Each state takes one character.

    def _content(self, text: str) -> None:
        self._events.append(ContentText(text))

    def _no_call(self) -> None:
        undecided, self._undecided, self._state = self._undecided, "", self._content
        self._content(undecided)

    def _start(self, character: str) -> None:
        self._undecided += character
        seen = self._undecided.lstrip()
        if not self._marked and seen == OPENING:
            self._marked = True
        elif seen.removeprefix(OPENING if self._marked else "").lstrip() == "[":
            self._begin_call()
        elif self._marked and seen.removeprefix(OPENING).isspace() and len(self._undecided) <= MAX_HELD_SPACE:
            pass
        elif self._marked or not OPENING.startswith(seen) or len(self._undecided) > MAX_HELD_SPACE:
            self._no_call()

    def _begin_call(self) -> None:
        self._call_start = len(self._undecided)
        self._depth, self._quote, self._is_escaped, self._state = 0, "", False, self._call

    def _call(self, character: str) -> None:
        self._undecided += character
        if len(self._undecided) > MAX_CALL_CHARACTERS:
            self._no_call()
        elif self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == self._quote:
                self._quote = ""
        elif character in "'\"":
            self._quote = character
        elif character in "([{":
            self._depth += 1
        elif character in ")]}":
            self._depth -= 1
            if self._depth <= 0:
                self._call_ended()

    def _call_ended(self) -> None:
        """Handle a bracket that closes the call, or the list if it has no call."""
        try:
            name, arguments = parse_call(self._undecided[self._call_start :])
        except MalformedCall:
            self._no_call()
            return
        if name not in self._names:
            self._no_call()
            return
        index, self._num_calls = self._num_calls, self._num_calls + 1
        self._events += [
            CallBegin(index, self._new_id(), name),
            CallArguments(index, arguments),
            CallEnd(index, complete=True),
        ]
        self._undecided, self._state = "", self._behind

    def _behind(self, character: str) -> None:
        """Handle the character after a call: a comma, or the end of the list."""
        self._undecided += character
        seen = self._undecided.lstrip()
        if seen == ",":
            self._begin_call()
        elif seen == "]":
            self._undecided, self._state = "", self._closing
        elif seen or len(self._undecided) > MAX_HELD_SPACE:
            self._no_call()

    def _closing(self, character: str) -> None:
        self._undecided += character
        seen = self._undecided.lstrip()
        if seen == CLOSING:
            self._undecided, self._state = "", self._content
        elif not CLOSING.startswith(seen) or len(self._undecided) > MAX_HELD_SPACE:
            self._no_call()


MAX_DEPTH: Final = 64
_WORDS: Final = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_NAME = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.-]{0,255})\s*")
_NUMBER = re.compile(r"[+-]?(?:\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})(?:[eE][+-]?\d{1,4})?", re.ASCII)
_SPACE = re.compile(r"\s*")
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}


class MalformedCall(ValueError):
    """The text is not a call whose arguments are named literals."""


def parse_call(text: str) -> tuple[str, str]:
    """Return the name and the arguments, as a JSON object, of the call ``text``. Raises MalformedCall."""
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
    # Half a character, as produced by "\ud800", is only valid in JSON when escaped.
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
        """Return whether ``character`` comes next; if so, skip it."""
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
