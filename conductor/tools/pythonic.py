"""Tool calls as a Python list of calls: ``[get_weather(city="Paris"), get_time()]``, as Llama 3.2 and 4 write them.

The list stands at the beginning of the answer, or behind Llama 4's ``<|python_start|>``. Arguments have to be turned
into JSON, so a call goes out when it is whole. A list that turns out to be none is content.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from tanghulu.conductor.tools.events import (
    AnswerEvent,
    CallArguments,
    CallBegin,
    CallEnd,
    ContentText,
    NewId,
    merged,
)
from tanghulu.conductor.tools.python_literals import MalformedCall, parse_call
from tanghulu.conductor.tools.text_holder import MAX_HELD_SPACE

OPENING: Final = "<|python_start|>"
CLOSING: Final = "<|python_end|>"
#: A longer call is content.
MAX_CALL_CHARACTERS: Final = 65_536


class PythonicCallParser:
    """One answer. ``names``: the functions of the request; others are no calls."""

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
        """A bracket closes the call, or the list where it has no call in it."""
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
        """Behind a call: a comma, or the end of the list."""
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
