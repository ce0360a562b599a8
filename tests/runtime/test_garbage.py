"""Full collections are made when nobody waits, and often enough."""

from __future__ import annotations

import itertools
import subprocess
import sys

from tanghulu.runtime.garbage import IDLE_S, MOST_S, CollectionPacer


def test_a_full_collection_waits_for_idleness_but_not_for_ever():
    pacer, made = CollectionPacer(0.0), []
    for second in range(1, 4000):
        if pacer.due(float(second), busy=100 <= second < 3000):
            made.append(second)
    assert made[0] == IDLE_S
    assert [s for s in made if 100 <= s < 3000] == list(range(int(IDLE_S + MOST_S), 3000, int(MOST_S)))
    assert all(later - earlier <= MOST_S for earlier, later in itertools.pairwise(made))
    assert len([s for s in made if s >= 3000]) == (4000 - 3000) // IDLE_S + 1


def test_old_objects_are_left_alone_and_cycles_still_go():
    """In a process of its own: what is set is the interpreter's."""
    script = """
import gc, weakref
from tanghulu.runtime import garbage
garbage.begin()
assert gc.get_freeze_count() > 1000
class Cycle: pass
def cycle():
    made = Cycle()
    made.own = made
    return weakref.ref(made)
full = gc.get_stats()[2]["collections"]
kept = [[n] for n in range(1_000_000)]
assert gc.get_stats()[2]["collections"] == full, "no full collection by itself"
young = cycle()
[[n] for n in range(100_000)]
assert young() is None, "young cycles go by themselves"
old = cycle()
gc.collect(1)
garbage.collect()
assert old() is None
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_busy_loop_has_no_full_collection_and_cycles_go_when_it_is_idle() -> None:
    """In a process of its own, whose idle time is short."""
    script = """
import asyncio, gc, weakref
from tanghulu.runtime import garbage
garbage.IDLE_S, garbage._LOOK_S = 0.02, 0.005
class Cycle: pass
def old_cycle():
    made = Cycle()
    made.own = made
    gc.collect(1)
    return weakref.ref(made)
def num_full(): return gc.get_stats()[2]["collections"]
async def main():
    garbage.begin()
    waits, looks = True, 0
    def busy():
        nonlocal looks
        looks += 1
        return waits
    collecting = asyncio.create_task(garbage.keep_collecting(busy))
    before, kept = num_full(), []
    while looks < 20:
        kept += [[n] for n in range(50_000)]
        old = old_cycle()
        await asyncio.sleep(0.001)
    assert old() is not None
    assert num_full() == before, "nobody was made to wait for a full collection"
    waits = False
    while old() is not None:
        await asyncio.sleep(0.001)
    frozen = gc.get_freeze_count()
    assert frozen > len(kept), "what survived is set aside"
    collecting.cancel()
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_what_survives_is_looked_at_again_unless_it_is_too_much_and_the_beginning_never() -> None:
    """A cycle goes when its last user does, also one that has survived a collection."""
    script = """
import gc, weakref
from tanghulu.runtime import garbage
class Cycle: pass
def cycle():
    made = Cycle()
    made.own = made
    return made
garbage.begin()
num_first = gc.get_freeze_count()
used = cycle()
found = weakref.ref(used)
garbage.collect()
assert gc.get_freeze_count() == num_first
assert len(gc.get_objects(generation=2)) < num_first, "what was there at the beginning is not looked at"
del used
garbage.collect()
assert found() is None
used, garbage.MAX_OLD = cycle(), 0
found = weakref.ref(used)
garbage.collect()
assert gc.get_freeze_count() > num_first
del used
garbage.collect()
assert found() is not None
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
