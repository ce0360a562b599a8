"""Garbage collection of a long-running process: when to look for garbage in cycles.

Nearly all objects go by themselves, when the last reference does. CPython looks through *all* objects that may be in
cycles whenever the old ones have become a quarter more, and meanwhile the event loop stands still: 0.2 s for a million
chunks of a node, some 50 ms for a prefix index of a million blocks, in the midst of steps that take one. The rule here:

- What is there when the process becomes ready is set aside (``gc.freeze``) for good: no collection looks at it. It is
  some 60,000 objects, modules and their functions, which took 35 to 65 ms each time while they were looked at again.
- Automatic collections look at young objects only, at most YOUNG * (1 + MIDDLE) of them, some 10 ms.
- A full collection is made when nobody waits, once in IDLE_S; while there is always something to do, after MOST_S, so
  that cycles cannot grow without bound.
- What survives it is looked at by the next one, up to MAX_OLD objects. A process with more of them, which are blocks of
  an index and in no cycle, sets them aside, and the next collection looks at what has come since.

Classes of which there are millions, and which refer to atoms only, are best not tracked at all: ``msgspec.Struct`` with
``gc=False``, or one integer.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

#: Between two full collections while there is nothing to do, and at most while there is.
IDLE_S, MOST_S = 60.0, 300.0
#: Young objects that make a collection of the youngest; how many of these make one of the next; the oldest never.
YOUNG, MIDDLE = 10_000, 10
#: Objects that one full collection leaves to the next, which takes some 25 ms for them: nobody's caches hold them.
MAX_OLD = 40_000
#: How often it is asked whether a collection is due.
_LOOK_S = 1.0
#: A process that used more than this share of a core since the last look is not idle.
_IDLE_SHARE = 0.1


class CollectionPacer:
    """Decides when a full collection is due. Pure."""

    def __init__(self, now_s: float) -> None:
        self._last_s = now_s

    def due(self, now_s: float, busy: bool) -> bool:
        """Return whether a collection should be made now; a True counts as made."""
        if now_s - self._last_s < (MOST_S if busy else IDLE_S):
            return False
        self._last_s = now_s
        return True


class CpuUse:
    """Whether this process had something to do since the last question, by the CPU time that it took."""

    def __init__(self) -> None:
        self._now_s, self._used_s = time.monotonic(), time.process_time()

    def busy(self) -> bool:
        """Return whether it used more than a small share of a core."""
        now_s, used_s = time.monotonic(), time.process_time()
        share = (used_s - self._used_s) / max(now_s - self._now_s, 1e-3)
        self._now_s, self._used_s = now_s, used_s
        return share > _IDLE_SHARE


def begin() -> None:
    """Set all present objects aside, and keep automatic collections to young ones; called once.

    Nothing is collected first: somebody may wait already. Of a start's garbage there is little, see ``process.run``.
    """
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, 1 << 30)


def collect() -> int:
    """Make a full collection; returns how many objects were freed."""
    num_freed = gc.collect()
    if len(gc.get_objects(generation=2)) > MAX_OLD:
        gc.freeze()
    return num_freed


async def keep_collecting(busy: Callable[[], bool]) -> None:
    """Make full collections by the rule of the module, until cancelled. ``busy``: whether somebody waits."""
    pacer = CollectionPacer(time.monotonic())
    while True:
        await asyncio.sleep(_LOOK_S)
        if pacer.due(time.monotonic(), busy=busy()):
            collect()
