"""Garbage collection of a long-running process: when to search for cycles.

Nearly all objects are freed with their last reference. CPython searches *all* objects that may be in cycles whenever
the old ones have grown by a quarter, and meanwhile the event loop stalls: 0.2 s for a million chunks of a node, some
50 ms for a prefix index of a million blocks, in the midst of steps that take one. The rule here:

- Objects present when the process becomes ready are set aside (``gc.freeze``) for good: no collection visits them. They
  are some 60,000, modules and their functions, which took 35 to 65 ms each time while they were still visited.
- Automatic collections visit young objects only, at most YOUNG * (1 + MIDDLE) of them, some 10 ms.
- A full collection runs when nobody waits, once in IDLE_S; while there is always work, after MOST_S, so
  that cycles cannot grow without bound.
- Its survivors are visited by the next one, up to MAX_OLD objects. A process with more of them, which are blocks of
  an index and in no cycle, sets them aside, and the next collection visits only newer ones.

Classes with millions of instances that refer to atoms only are best not tracked at all: ``msgspec.Struct`` with
``gc=False``, or one integer.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

#: Interval of full collections while idle, and its maximum while busy.
IDLE_S, MOST_S = 60.0, 300.0
#: Young objects that trigger a collection of the youngest; how many of these trigger one of the next; the oldest never.
YOUNG, MIDDLE = 10_000, 10
#: Objects that one full collection leaves to the next, which takes some 25 ms, as they are in no CPU cache.
MAX_OLD = 40_000
#: Interval of checks whether a collection is due.
_LOOK_S = 1.0
#: A process that used more than this fraction of a core since the last check is not idle.
_IDLE_SHARE = 0.1


class CollectionPacer:
    """Decides when a full collection is due. Pure."""

    def __init__(self, now_s: float) -> None:
        self._last_s = now_s

    def due(self, now_s: float, busy: bool) -> bool:
        """Return whether a collection is due now; a True counts as made."""
        if now_s - self._last_s < (MOST_S if busy else IDLE_S):
            return False
        self._last_s = now_s
        return True


class CpuUse:
    """Activity of this process since the last call, measured by its CPU time."""

    def __init__(self) -> None:
        self._now_s, self._used_s = time.monotonic(), time.process_time()

    def busy(self) -> bool:
        """Return whether it used more than a small fraction of a core."""
        now_s, used_s = time.monotonic(), time.process_time()
        share = (used_s - self._used_s) / max(now_s - self._now_s, 1e-3)
        self._now_s, self._used_s = now_s, used_s
        return share > _IDLE_SHARE


def begin() -> None:
    """Set all present objects aside, and limit automatic collections to young ones; called once.

    Nothing is collected first: a caller may be waiting already. A start leaves little garbage, see ``process.run``.
    """
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, 1 << 30)


def collect() -> int:
    """Run a full collection; returns the number of freed objects."""
    num_freed = gc.collect()
    if len(gc.get_objects(generation=2)) > MAX_OLD:
        gc.freeze()
    return num_freed


async def keep_collecting(busy: Callable[[], bool]) -> None:
    """Run full collections by the rule of the module, until cancelled. ``busy`` returns whether somebody waits."""
    pacer = CollectionPacer(time.monotonic())
    while True:
        await asyncio.sleep(_LOOK_S)
        if pacer.due(time.monotonic(), busy=busy()):
            collect()
