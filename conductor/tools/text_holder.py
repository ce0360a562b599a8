"""Text that is held back because what follows decides about it: an unfinished marker, or the space in front of one."""

from __future__ import annotations

from typing import Final

#: A longer run of white space is given out: it stands in front of nothing.
MAX_HELD_SPACE: Final = 1024


class MarkerFinder:
    """Finds ``marker``, which may be cut, and holds back an end that may begin it; an empty one is never found."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """What stands in front of the marker as far as is known, and what follows it, or None until it comes."""
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
        """End the text; returns the beginning of a marker that did not come."""
        held, self._held = self._held, ""
        return held


class SpaceHolder:
    """Holds back the white space at the end of a text until more text comes; ``drop()`` forgets it."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that is safe to show."""
        text = self._held + text
        shown = text.rstrip()
        # As if it came character by character: a run that grows too long is given out, and the next one begins.
        keep = (len(text) - len(shown)) % (MAX_HELD_SPACE + 1)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def drop(self) -> None:
        self._held = ""

    def flush(self) -> str:
        """End the text; returns the space that is held back."""
        held, self._held = self._held, ""
        return held
