"""Garbage collection of the conductor's process: when to look for garbage in cycles.

Nearly all objects go by themselves, when the last reference does. CPython looks through *all* objects that may be in
cycles whenever the old ones have become a quarter more, and meanwhile no token goes on: with a prefix index of a
million blocks that takes some 50 ms on a quiet core, in the midst of decisions that take one. So what is there at the
start is set aside for good, automatic collections are kept to young objects, and a full one is made when nobody waits:
once in IDLE_S while no request is under way, and after MOST_S in any case, so that cycles cannot grow without bound.
"""

from __future__ import annotations

import gc

#: Between two full collections while there is nothing to do, and at most while there is.
IDLE_S, MOST_S = 60.0, 1800.0
#: Young objects that make a collection of the youngest; how many of these make one of the next; the oldest never.
_THRESHOLDS = (20_000, 20, 1 << 30)


class CollectionPacer:
    """Decides when a full collection is due. Pure."""

    def __init__(self, now_s: float) -> None:
        self._last_s = now_s

    def due(self, now_s: float, busy: bool) -> bool:
        """Whether a collection should be made now; a True counts as made."""
        if now_s - self._last_s < (MOST_S if busy else IDLE_S):
            return False
        self._last_s = now_s
        return True


def begin() -> None:
    """Exempt all present objects from collections, and keep automatic ones to young objects; called once."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


def collect() -> int:
    """Collect everything but the objects that ``begin`` set aside; returns how many objects were freed."""
    return gc.collect()
