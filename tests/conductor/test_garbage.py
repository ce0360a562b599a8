"""Full collections are made when nobody waits, and often enough."""

from __future__ import annotations

import itertools
import subprocess
import sys

from tanghulu.conductor.garbage import IDLE_S, MOST_S, CollectionPacer


def test_a_full_collection_waits_for_idleness_but_not_for_ever():
    pacer, made = CollectionPacer(0.0), []
    for second in range(1, 4000):
        if pacer.due(float(second), busy=100 <= second < 3000):
            made.append(second)
    assert made[0] == IDLE_S
    assert [s for s in made if 100 <= s < 3000] == [IDLE_S + MOST_S]
    assert all(later - earlier <= MOST_S for earlier, later in itertools.pairwise(made))
    assert len([s for s in made if s >= 3000]) == (4000 - 3000) // IDLE_S + 1


def test_old_objects_are_left_alone_and_cycles_still_go():
    """In a process of its own: what is set is the interpreter's."""
    script = """
import gc, weakref
from tanghulu.conductor import garbage
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
