"""Stop strings over a text that grows piece by piece.

A stop string may begin in one piece and end in a later one, so the longest suffix that could still become a stop string
is held back. Example with the stop "END": the pieces "a E", "N", "E", "ND!" give "a ", "", "EN", and then the match.
Independent of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_STOP_STRINGS = 4
#: SGLang's /generate accepts more of them.
MAX_GENERATE_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024


class StopMatcher:
    """Finds the first of ``stops`` in the pieces fed. The text before it is shown; with ``keep``, the stop as well."""

    def __init__(self, stops: Sequence[str], keep: bool = False) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(stops)
        self._keep = keep
        self._held = ""
        self.matched: str | None = None

    def feed(self, piece: str) -> str:
        """Return text that is safe to show. After a match (see ``matched``) it is always empty."""
        if self.matched is not None:
            return ""
        text = self._held + piece
        found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, start, self.matched = min(found)  # the one that ends first, however the text was cut
            self._held = ""
            return text[: end if self._keep else start]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep]

    def flush(self) -> str:
        """End the text; return the part held back."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Return the length of the longest suffix of ``text`` that is a prefix of some stop string."""
        longest = min(len(text), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
