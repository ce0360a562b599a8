"""The production classes in bad weather and virtual time; see ``world`` for what must hold."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.transfer_engine.sim.world import run_seed

NUM_QUICK = 40
NUM_SLOW = 400
#: Seeds that failed once, through the classes or through the world itself; they run for ever.
PAST_FAILURES = (5, 6, 47, 71, 1035, 1065, 2117, 3120)


def run_seeds(seeds: Iterable[int]) -> None:
    num_complete = num_failed = 0
    for seed in seeds:
        world = run_seed(seed)
        num_complete += world.num_complete
        num_failed += world.num_failed
    assert num_complete > 20, "the weather is so bad that nothing is tested"
    assert num_failed > 5, "the weather is so good that nothing is tested"


@pytest.mark.parametrize("seed", PAST_FAILURES)
def test_past_failures(seed: int):
    run_seed(seed)


def test_some_seeds():
    run_seeds(range(100, 100 + NUM_QUICK))


@pytest.mark.slow
def test_hundreds_of_seeds():
    """Always the same ones, so that no change is blamed for another's; new ones run by hand (``__main__``)."""
    run_seeds(range(10_000, 10_000 + NUM_SLOW))


def test_a_seed_gives_the_same_run():
    first, second = run_seed(3), run_seed(3)
    assert (first.num_events, first.num_complete, first.num_failed) == (
        second.num_events,
        second.num_complete,
        second.num_failed,
    )
    assert first.clock.now_s() == second.clock.now_s()
