"""The parts of an assistant's answer in the order in which its text brings them.

Knows nothing of HTTP. A parser takes text piece by piece and gives these; however the text is cut, the joined parts are
the same, since every decision depends on the text so far alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

#: Why an answer ended that calls tools.
TOOL_CALLS: Final = "tool_calls"


@dataclass(frozen=True, slots=True)
class ContentText:
    """The next piece of the answer proper."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """The next piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call, the ``index``-th of the answer, and the function that it names."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments; all of them together are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a call. ``complete`` is False where the text broke off inside of its arguments."""

    index: int
    complete: bool


AnswerEvent: TypeAlias = ContentText | ReasoningText | CallBegin | CallArguments | CallEnd
NewId: TypeAlias = Callable[[], str]


class AnswerParser(Protocol):
    """One answer's text, growing."""

    def feed(self, text: str) -> list[AnswerEvent]:
        """The parts that ``text`` decides; may be none."""

    def finish(self) -> list[AnswerEvent]:
        """End the text; returns the parts that were held back."""


def merged(events: Iterable[AnswerEvent]) -> list[AnswerEvent]:
    """``events`` with neighbouring pieces of one kind joined, and empty ones left out."""
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
