"""Reasoning before an answer: ``<think>...</think>``, as written by Qwen 3, DeepSeek R1 and similar models.

Reasoning is at the beginning of an answer, or already opened by the prompt. White space around it is removed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tanghulu.conductor.tools.events import (
    MAX_HELD_SPACE,
    AnswerEvent,
    AnswerParser,
    ContentText,
    MarkerFinder,
    ReasoningText,
    SpaceHolder,
    merged,
)

OPENING: Final = "<think>"
CLOSING: Final = "</think>"


def is_open(prompt: str) -> bool:
    """Return whether a rendered prompt ends inside reasoning, as with some templates."""
    return prompt.rstrip().endswith(OPENING)


class ReasoningParser:
    """Removes reasoning from an answer and passes the rest to ``answer``; ``opened``: the prompt has begun it."""

    def __init__(self, answer: AnswerParser, opened: bool) -> None:
        self._answer = answer
        self._events: list[AnswerEvent] = []
        self._undecided = ""
        self._finder = MarkerFinder(CLOSING)
        self._space = SpaceHolder()
        self._has_begun = False
        self._state: Callable[[str], str] = self._reasoning if opened else self._start

    def feed(self, text: str) -> list[AnswerEvent]:
        while text:
            text = self._state(text)
        events, self._events = merged(self._events), []
        return events

    def finish(self) -> list[AnswerEvent]:
        if self._state == self._start:
            self._to_answer(self._undecided)
        elif self._state == self._reasoning:
            self._think(self._finder.flush())
        self._undecided = ""
        events, self._events = merged([*self._events, *self._answer.finish()]), []
        return events

    def _start(self, text: str) -> str:
        for position in range(len(text)):
            seen = (self._undecided + text[: position + 1]).lstrip()
            if seen == OPENING:
                self._undecided, self._state = "", self._reasoning
                return text[position + 1 :]
            if OPENING.startswith(seen) and (seen or len(self._undecided) + position < MAX_HELD_SPACE):
                continue
            whole, self._undecided, self._state = self._undecided + text, "", self._to_answer
            return whole
        self._undecided += text
        return ""

    def _reasoning(self, text: str) -> str:
        shown, rest = self._finder.feed(text)
        self._think(shown)
        if rest is None:
            return ""
        self._state = self._behind
        return rest

    def _think(self, text: str) -> None:
        if not self._has_begun:
            text = text.lstrip()
            self._has_begun = bool(text)
        self._events.append(ReasoningText(self._space.feed(text)))

    def _behind(self, text: str) -> str:
        """Handle the text between the reasoning and the answer."""
        rest = text.lstrip()
        if rest:
            self._state = self._to_answer
        return rest

    def _to_answer(self, text: str) -> str:
        self._events += self._answer.feed(text)
        return ""


class PlainAnswer:
    """An answer without tool calls."""

    def feed(self, text: str) -> list[AnswerEvent]:
        return [ContentText(text)] if text else []

    def finish(self) -> list[AnswerEvent]:
        return []
