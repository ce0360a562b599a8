"""Tool calls as JSON objects, with or without a leading marker, in a list or one after the other.

One automaton reads the forms of Hermes and Qwen, Llama 3 and Mistral, and the JSON enforced by a grammar; a `JsonForm`
defines their differences. Text that proves not to be a call before its name and arguments have begun is content,
including the marker; if it breaks off later, the call ends there, and the rest is content.

Example, Hermes: ``Let me look.\\n<tool_call>\\n{"name": "f", "arguments": {"a": 1}}\\n</tool_call>`` gives the content
"Let me look.", a call of f, and its arguments ``{"a": 1}``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from tanghulu.conductor.tools.call_reader import CallReader, NamedCallReader
from tanghulu.conductor.tools.events import (
    MAX_HELD_SPACE,
    AnswerEvent,
    CallArguments,
    CallBegin,
    CallEnd,
    ContentText,
    MarkerFinder,
    NewId,
    SpaceHolder,
    merged,
)


@dataclass(frozen=True)
class JsonForm:
    """A notation for calls.

    ``opening`` precedes a call and ``closing`` follows it; ``bare``: at the beginning of an answer a call needs no
    opening. ``separators``: characters of which one separates calls. ``listed``: calls may be in brackets. ``named``: a
    call's name may precede its arguments. ``known``: only the request's own functions are accepted as calls, since the
    form by itself is ambiguous.
    """

    opening: str = ""
    closing: str = ""
    separators: str = ""
    bare: bool = False
    listed: bool = False
    named: bool = False
    known: bool = False


HERMES: Final = JsonForm("<tool_call>", "</tool_call>")
LLAMA3: Final = JsonForm("<|python_tag|>", separators=";,", bare=True, known=True)
MISTRAL: Final = JsonForm("[TOOL_CALLS]", listed=True, named=True)
#: The form of answers under `schemas.calls_schema`.
FORCED: Final = JsonForm(bare=True, listed=True)


class JsonCallParser:
    """One answer in ``form``. ``only``: the whole answer is the arguments of this function."""

    def __init__(self, form: JsonForm, names: Collection[str], new_id: NewId, only: str | None = None) -> None:
        self._form = form
        self._names = names if form.known else None
        self._new_id = new_id
        self._only = only
        self._events: list[AnswerEvent] = []
        self._finder = MarkerFinder(form.opening)
        self._space = SpaceHolder()
        self._num_calls = 0
        self._in_list = False
        #: Text of a call that may still prove to be none, and how much of it is then content for certain.
        self._undecided = ""
        self._certain: int | None = None
        self._reader: CallReader | NamedCallReader | None = None
        self._begun = False
        self._state: Callable[[str], str] = self._start if form.bare else self._content
        if only is not None:
            self._read(NamedCallReader(only))

    def feed(self, text: str) -> list[AnswerEvent]:
        while text:
            text = self._state(text)
        events, self._events = merged(self._events), []
        return events

    def finish(self) -> list[AnswerEvent]:
        if self._begun:
            self._call_ended(complete=False)
        elif self._state != self._after and not self._is_in_a_run:
            self._show(self._undecided + self._finder.flush())
        self._undecided = ""
        if not self._num_calls:
            self._events.append(ContentText(self._space.flush()))
        events, self._events = merged(self._events), []
        return events

    @property
    def _is_in_a_run(self) -> bool:
        """Whether the head of a further call has begun after a comma or another separator, so it is not content."""
        return self._num_calls > 0 and self._certain is None and self._state != self._content

    def _show(self, text: str) -> None:
        self._events.append(ContentText(self._space.feed(text)))

    # Each state takes text, and returns the rest for the next one.

    def _content(self, text: str) -> str:
        shown, rest = self._finder.feed(text)
        self._show(shown)
        if rest is None:
            return ""
        self._expect_call(self._form.opening, len(self._form.opening))
        return rest

    def _start(self, text: str) -> str:
        """Handle the text before the first non-space character: a call without its marker may begin."""
        opening, list_or_call = self._form.opening, "[{" if self._form.listed else "{"
        for position in range(len(text)):
            seen = (self._undecided + text[: position + 1]).lstrip()
            if not seen and len(self._undecided) + position < MAX_HELD_SPACE:
                continue
            if seen and seen != opening and opening.startswith(seen):
                continue
            if seen and seen in list_or_call:
                self._expect_call(self._undecided + text[:position], None)
                return text[position:]
            whole, self._undecided, self._state = self._undecided + text, "", self._content
            return whole
        self._undecided += text
        return ""

    def _expect_call(self, undecided: str, certain: int | None) -> None:
        self._undecided, self._certain, self._state = undecided, certain, self._open

    def _open(self, text: str) -> str:
        """Handle the point where a call should begin."""
        character = text[0]
        if character.isspace() and len(self._undecided) < MAX_HELD_SPACE:
            self._undecided += character
        elif character == "{":
            self._read(CallReader(self._names))
            return text
        elif character == "[" and self._form.listed and not self._in_list:
            self._in_list = True
            self._undecided += character
        elif self._form.named and not self._in_list and (character.isalnum() or character == "_"):
            self._read(NamedCallReader())
            return text
        else:
            return self._no_call(text)
        return text[1:]

    def _read(self, reader: CallReader | NamedCallReader) -> None:
        self._reader, self._begun, self._state = reader, False, self._call

    def _call(self, text: str) -> str:
        reader = self._reader
        assert reader is not None
        consumed = reader.feed(text)
        if not self._begun and reader.name is not None:
            self._begun, self._undecided = True, ""
            self._space.drop()
            self._events.append(CallBegin(self._num_calls, self._new_id(), reader.name))
            self._num_calls += 1
        if self._begun:
            self._events.append(CallArguments(self._num_calls - 1, reader.take()))
        else:
            self._undecided += text[:consumed]
        rest = text[consumed:]
        if reader.done:
            self._call_ended(complete=True)
        elif reader.broken and self._begun:
            self._call_ended(complete=False)
            self._in_list, self._state = False, self._content
        elif reader.broken:
            return self._no_call(rest)
        return rest

    def _call_ended(self, complete: bool) -> None:
        self._events.append(CallEnd(self._num_calls - 1, complete))
        self._begun, self._state = False, self._after

    def _no_call(self, rest: str) -> str:
        """Treat the undecided text as content; rescan it from the end of its marker."""
        undecided, self._undecided, self._in_list, self._state = self._undecided, "", False, self._content
        certain = len(undecided) if self._certain is None else self._certain
        self._show(undecided[:certain])
        return undecided[certain:] + rest

    def _after(self, text: str) -> str:
        """Handle the text after a call: its closing marker, the next call of the same run, or content."""
        self._undecided += text[0]
        seen, form = self._undecided.lstrip(), self._form
        if (not seen and len(self._undecided) <= MAX_HELD_SPACE) or _is_unfinished(seen, form.closing):
            return text[1:]
        if seen and seen == form.closing:
            self._undecided, self._state = "", self._content
        elif self._in_list and seen == "]":
            self._in_list, self._undecided, self._state = False, "", self._content
        elif seen and seen in ("," if self._in_list else form.separators):
            self._expect_call(self._undecided, None)
        elif seen == "{" and form.closing:
            self._expect_call(self._undecided[:-1], None)
            return text
        else:
            undecided, self._undecided, self._in_list, self._state = self._undecided, "", False, self._content
            return undecided + text[1:]
        return text[1:]


def _is_unfinished(seen: str, closing: str) -> bool:
    return 0 < len(seen) < len(closing) and closing.startswith(seen)
