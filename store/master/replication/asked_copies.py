"""Chunks that somebody asked to be held by more nodes, and until when. Pure; CopyPlanner orders the copies.

Example: a conductor sees that a document's prefix is about to be read from everywhere and asks for two holders of its
100 chunks for 30 s. It asks again while that lasts; what it asks for no longer is forgotten here, and the copies go
when nobody reads them (CopyPlanner's cooling).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from tanghulu.errors import InvalidRequest

MAX_KEYS = 8192
#: Longest time for which one call can ask.
MAX_ASKED_S = 3600.0


class AskedCopies:
    """key -> (wanted holders, until when)."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, keys: Iterable[str], holders: int, for_s: float, now_s: float) -> int:
        """``holders`` nodes shall hold each of ``keys`` for ``for_s`` seconds; returns how many keys were taken.

        Beyond MAX_KEYS no new ones are. Raises InvalidRequest for less than one holder or a time outside of 0 to
        MAX_ASKED_S.
        """
        if holders < 1:
            raise InvalidRequest(f"{holders} holders were asked for; at least one node holds a chunk")
        if not (math.isfinite(for_s) and 0 < for_s <= MAX_ASKED_S):
            raise InvalidRequest(f"copies were asked for {for_s:g} s; it must be above 0 and at most {MAX_ASKED_S:g} s")
        num_taken = 0
        for key in keys:
            if key in self._asked or len(self._asked) < MAX_KEYS:
                self._asked[key] = (holders, now_s + for_s)
                num_taken += 1
        return num_taken

    def wanted(self, key: str) -> int:
        """How many nodes shall hold ``key``; 1 if nobody asked."""
        return self._asked[key][0] if key in self._asked else 1

    def keys(self, now_s: float) -> list[str]:
        """What is asked for now; the rest is forgotten."""
        for key in [key for key, (_, until_s) in self._asked.items() if until_s <= now_s]:
            del self._asked[key]
        return list(self._asked)

    def check(self) -> None:
        """It is bounded."""
        assert len(self._asked) <= MAX_KEYS
        assert all(holders >= 1 for holders, _ in self._asked.values())

    def __repr__(self) -> str:
        return f"AskedCopies({len(self._asked)} keys)"
