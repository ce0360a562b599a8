"""One tool call as written by models: a JSON object with a name and arguments, or a name followed by the arguments.

Arguments are passed on as they arrive once the name is known; until then they are held, up to MAX_HELD_CHARACTERS.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from enum import Enum, auto
from typing import Final

from tanghulu.conductor.tools.json_scanner import WHITESPACE, JsonScanner

#: Most characters held back of a call before it is known to be one.
MAX_HELD_CHARACTERS: Final = 65_536
MAX_NAME_CHARACTERS: Final = 256
_ARGUMENTS: Final = ("arguments", "parameters")
#: Separator between a name and its arguments in Mistral's form; a call's id may precede it.
ARGUMENTS_MARK: Final = "[ARGS]"
ID_MARK: Final = "[CALL_ID]"
_IN_A_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]")


#: Half a character, which JSON can escape but no text can contain.
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class _Expect(Enum):
    OBJECT = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()
    STREAM = auto()


class CallReader:
    """One call. ``names``: the functions it may name; None allows any.

    ``name`` is set once this is known to be a call; ``take()`` then returns its arguments as they arrive. Finally,
    either ``done`` or ``broken`` ends it.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self.name: str | None = None
        self.done = False
        self.broken = False
        self._names = names
        self._expect = _Expect.OBJECT
        self._key = ""
        self._value = JsonScanner()
        self._raw = ""
        self._read_name: str | None = None
        self._arguments = ""  # not taken yet
        self._has_arguments = False
        self._num_held = 0

    def take(self) -> str:
        """Return pieces of the arguments that have not been taken."""
        if self.name is None:
            return ""
        piece, self._arguments = self._arguments, ""
        return piece

    def feed(self, text: str) -> int:
        """Process ``text``; return how many characters belong to the call."""
        position = 0
        while position < len(text) and not (self.done or self.broken):
            if self.name is not None:
                position += self._take(text[position:])
            elif self._num_held == MAX_HELD_CHARACTERS:
                self.broken = True
            else:
                consumed = self._take(text[position : position + MAX_HELD_CHARACTERS - self._num_held])
                self._num_held += consumed
                position += consumed
        return position

    def _take(self, text: str) -> int:
        """Process the next character, or as much of ``text`` as belongs to the current value."""
        if self._raw:
            return self._scan(text)
        if self._step(text[0]):
            return 1
        self.broken = True
        return 0

    def _step(self, character: str) -> bool:
        """Process a character between values; False if it is not allowed here."""
        if character in WHITESPACE:
            return True
        match self._expect:
            case _Expect.OBJECT:
                self._expect = _Expect.KEY
                return character == "{"
            case _Expect.COLON:
                self._expect = _Expect.VALUE
                return character == ":"
            case _Expect.COMMA:
                self._expect = _Expect.KEY
                return character == "," or (character == "}" and self._end())
            case _Expect.KEY:
                if character == "}":
                    return self._end()
                return character == '"' and self._begin(character)
            case _:
                return self._begin_value(character)

    def _begin_value(self, character: str) -> bool:
        if self._key in _ARGUMENTS:
            if self._has_arguments:
                return False
            if character == "{":
                self._has_arguments = True
                self._expect = _Expect.STREAM
                self.name = self._read_name
        return self._begin(character)

    def _begin(self, character: str) -> bool:
        self._value, self._raw = JsonScanner(), ""
        _, self._raw = self._value.feed(character)
        if self._expect is _Expect.STREAM:
            self._arguments += self._raw
        return not self._value.broken

    def _scan(self, text: str) -> int:
        """Process the part that belongs to the current value."""
        consumed, shown = self._value.feed(text)
        if self._expect is _Expect.STREAM:
            self._arguments += shown
        elif self.name is None or self._expect is _Expect.KEY:
            self._raw += shown
        if self._value.broken:
            self.broken = True
        elif self._value.done:
            self.broken |= not self._value_ended()
        return consumed

    def _value_ended(self) -> bool:
        raw, self._raw = self._raw, ""
        if self._expect is _Expect.KEY:
            self._key, self._expect = json.loads(raw), _Expect.COLON
            return True
        streamed, self._expect = self._expect is _Expect.STREAM, _Expect.COMMA
        if streamed:
            return True
        if self._key == "name":
            return self._name_known(raw)
        return self._key not in _ARGUMENTS or self._arguments_known(raw)

    def _name_known(self, raw: str) -> bool:
        name = json.loads(raw) if self._read_name is None and raw.startswith('"') else ""
        self._read_name = name
        known = self._names is None or name in self._names
        if not (0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable() and known):
            return False
        if self._has_arguments:
            self.name = name
        return True

    def _arguments_known(self, raw: str) -> bool:
        """Process arguments that are not an object: null, or an object's JSON inside a string."""
        self._has_arguments = True
        if raw == "null":
            self._arguments = "{}"
            return True
        if not raw.startswith('"'):
            return False
        text = json.loads(raw).strip() or "{}"
        inner = JsonScanner()
        consumed, shown = inner.feed(text)
        self._arguments = shown
        return text.startswith("{") and inner.done and consumed == len(text) and not _SURROGATE.search(shown)

    def _end(self) -> bool:
        if self._read_name is None:
            return False
        self.name = self._read_name
        if not self._has_arguments:
            self._arguments = "{}"
        self.done = True
        return True


class NamedCallReader:
    """One call preceded by its name: ``name[ARGS]{...}``, ``name[CALL_ID]id[ARGS]{...}`` or ``name{...}``.

    Used like a `CallReader`. If ``name`` is given, the text is only that function's arguments.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name: str | None = None
        self.done = False
        self.broken = False
        self._given = name
        self._head = ""
        self._scanner = JsonScanner()
        self._arguments = ""

    def take(self) -> str:
        """Return pieces of the arguments that have not been taken."""
        piece, self._arguments = self._arguments, ""
        return piece

    def feed(self, text: str) -> int:
        """Process ``text``; return how many characters belong to the call."""
        position = 0
        while position < len(text) and self.name is None and not self.broken:
            if text[position] == "{" and not self._head.endswith(ID_MARK):
                self.name = self._name()
                self.broken = self.name is None
                break
            self._head += text[position]
            position += 1
            self.broken = len(self._head) > 2 * MAX_NAME_CHARACTERS or not self._may_go_on()
            if self.broken:
                position -= 1
        if self.name is None or self.done or self.broken:
            return position
        consumed, shown = self._scanner.feed(text[position:])
        self._arguments += shown
        self.done, self.broken = self._scanner.done, self._scanner.broken
        return position + consumed

    def _name(self) -> str | None:
        if self._given is not None:
            return self._given if not self._head.strip() else None
        name = self._head.partition("[")[0].strip()
        return name if 0 < len(name) <= MAX_NAME_CHARACTERS and self._head_is_whole() else None

    def _head_is_whole(self) -> bool:
        _, mark, rest = self._head.rstrip().partition("[")
        return not mark or rest.endswith(ARGUMENTS_MARK[1:])

    def _may_go_on(self) -> bool:
        """Return whether the head can still become a call, checking only its last character inside the name."""
        name, mark, rest = self._head.partition("[")
        if self._given is not None:
            return not self._head.strip()
        if not mark:
            last = name[-1]
            return bool(_IN_A_NAME.match(last)) if not last.isspace() else name.strip() != ""
        rest = mark + rest
        if rest.startswith(ID_MARK):
            _, mark, after = rest[len(ID_MARK) :].partition("[")
            rest = mark + after
        rest = rest.rstrip()
        return ARGUMENTS_MARK.startswith(rest) or ID_MARK.startswith(rest)
