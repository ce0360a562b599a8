"""The parts of an assistant's answer in order of their text, and text that is held back.

Independent of HTTP. A parser takes text piece by piece and returns these; however the text is cut, the joined parts are
the same, since every decision depends only on the text so far. An unfinished marker, or white space before one, is
decided by the following text, so it is held back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

#: Reason for the end of an answer that calls tools.
TOOL_CALLS: Final = "tool_calls"


@dataclass(frozen=True, slots=True)
class ContentText:
    """The next piece of the answer proper."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """The next piece of the model's reasoning before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call, the ``index``-th of the answer, and the function it names."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments; all pieces together are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a call. ``complete`` is False if the text broke off inside its arguments."""

    index: int
    complete: bool


AnswerEvent: TypeAlias = ContentText | ReasoningText | CallBegin | CallArguments | CallEnd
NewId: TypeAlias = Callable[[], str]


class AnswerParser(Protocol):
    """One answer's growing text."""

    def feed(self, text: str) -> list[AnswerEvent]:
        """Return the parts decided by ``text``; may be empty."""

    def finish(self) -> list[AnswerEvent]:
        """End the text; return the parts held back."""


def merged(events: Iterable[AnswerEvent]) -> list[AnswerEvent]:
    """Return ``events`` with neighbouring pieces of one kind joined, and empty ones removed."""
    out: list[AnswerEvent] = []
    for event in events:
        if isinstance(event, CallBegin | CallEnd):
            out.append(event)
        elif event.text:
            joined = _joined(out[-1], event) if out else None
            if joined is None:
                out.append(event)
            else:
                out[-1] = joined
    return out


def _joined(last: AnswerEvent, event: AnswerEvent) -> AnswerEvent | None:
    match last, event:
        case ContentText(first), ContentText(second):
            return ContentText(first + second)
        case ReasoningText(first), ReasoningText(second):
            return ReasoningText(first + second)
        case CallArguments(index, first), CallArguments(same, second) if index == same:
            return CallArguments(index, first + second)
    return None


#: A longer run of white space is emitted: it does not precede anything.
MAX_HELD_SPACE: Final = 1024


class MarkerFinder:
    """Finds ``marker``, which may be cut, and holds back a suffix that may begin it; an empty one is never found."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the text known to precede the marker, and the text after it, or None until it is found."""
        if not self._marker:
            return text, None
        text = self._held + text
        self._held = ""
        start = text.find(self._marker)
        if start >= 0:
            return text[:start], text[start + len(self._marker) :]
        for length in range(min(len(text), len(self._marker) - 1), 0, -1):
            if self._marker.startswith(text[-length:]):
                self._held = text[-length:]
                return text[:-length], None
        return text, None

    def flush(self) -> str:
        """End the text; return the beginning of an incomplete marker."""
        held, self._held = self._held, ""
        return held


class SpaceHolder:
    """Holds back the white space at the end of a text until more text arrives; ``drop()`` discards it."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        """Return the text that is safe to show."""
        text = self._held + text
        shown = text.rstrip()
        # As if it came character by character: a run that grows too long is emitted, and the next one begins.
        keep = (len(text) - len(shown)) % (MAX_HELD_SPACE + 1)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def drop(self) -> None:
        self._held = ""

    def flush(self) -> str:
        """End the text; return the space held back."""
        held, self._held = self._held, ""
        return held
