"""The place where two chats part: the message, the characters on both sides, and the kind of difference."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Final

from tanghulu.conductor.text.served_model import ServedModel
from tanghulu.hashing import Tokens

#: Tokens shown before and after the break.
BEFORE, AFTER = 12, 24
#: A prompt is decoded up to here to find its message.
MAX_DECODED: Final = 32_768
#: The digits of a date, a time or a counter around a break.
_DATE: Final = re.compile(r"\d{4}-\d|\d[:./-]\d|\b\d{1,2} [A-Z][a-z]{2}|[A-Z][a-z]{2} \d")
_REASONING: Final = re.compile(r"</?(think|reasoning)|◁think")


def message_starts(text: str, contents: Sequence[object]) -> tuple[int, ...]:
    """Return the positions in a rendered chat at which its messages' contents begin; found in order, not parsed."""
    starts, at = [], 0
    for content in contents:
        if isinstance(content, str) and (wanted := content.strip()[:64]):
            found = text.find(wanted, at)
            at = found if found >= 0 else at
        starts.append(at)
        at += 1
    return tuple(starts)


def place_of(model: ServedModel, prompt: Tokens, shared: int, theirs: Tokens, starts: Sequence[int]) -> dict[str, Any]:
    """Return the place of a break behind ``shared`` tokens: its message (None: before the first) and kind.

    The kinds are date, reasoning, template (before the first message: tools, a default system prompt) and text.
    ``before``, ``ours`` and ``theirs`` are the texts around it.
    """
    before = model.decode(prompt[max(0, shared - BEFORE) : shared].tolist())
    ours = model.decode(prompt[shared : shared + AFTER].tolist())
    other = model.decode(theirs[:AFTER].tolist())
    message: int | None = None
    if starts and shared <= MAX_DECODED:
        at = len(model.decode(prompt[:shared].tolist()))
        # A token may begin before the content that it is a part of.
        message = bisect_right(starts, at + len(ours[:1])) - 1
    around = [before[-8:] + each[:12] for each in (ours, other)]
    kind = "text"
    if starts and message == -1:
        message, kind = None, "template"
    if all(_DATE.search(each) for each in around):
        kind = "date"
    elif any(_REASONING.search(each[:24]) for each in (ours, other)):
        kind = "reasoning"
    return {"message": message, "kind": kind, "before": before, "ours": ours, "theirs": other}
