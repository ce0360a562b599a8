"""How many threads a step gets: the choice in simulated machines, and that the runner really takes them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.workers.compute.models.model import Model
from tanghulu.workers.compute.process_tuning import wait_shortly
from tanghulu.workers.compute.runners import ThreadedRunner
from tanghulu.workers.compute.thread_choice import FIRST_WAIT, LONGEST_WAIT, MOST_TOKENS, SAMPLES, ThreadChoice
from tanghulu.workers.engine.engine import Computed, EngineCore, ModelRunner
from tanghulu.workers.engine.scheduler import EngineCoreConfig
from tanghulu.workers.engine.step import StepPlan
from tests.workers.tiny import BLOCK, engine, request, run_all


def _drive(choice: ThreadChoice, seconds: Callable[[int], float], num_steps: int, num_tokens: int = 1) -> list[int]:
    """The threads of each step on a machine where a step on n of them takes ``seconds(n)``."""
    taken = []
    for _ in range(num_steps):
        threads = choice.threads(num_tokens)
        taken.append(threads)
        choice.took(num_tokens, seconds(threads))
        choice.check()
    return taken


def test_the_worked_example() -> None:
    choice = ThreadChoice(2)
    _drive(choice, lambda threads: 0.050, SAMPLES)
    times = iter([0.041, 0.044, 0.040, 0.090, 0.042])
    assert _drive(choice, lambda threads: next(times), SAMPLES) == [1] * SAMPLES
    assert choice.best == {1: 1}
    assert _drive(choice, lambda threads: 0.042, FIRST_WAIT) == [1] * FIRST_WAIT
    times = iter([0.051, 0.049, 0.050])
    assert _drive(choice, lambda threads: next(times), 3) == [2] * 3
    assert choice.threads(1) == 1, "three of five are lost"


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([2, 3, 4, 6, 8, 16]), st.integers(0, 2**32))
def test_it_finds_the_fastest_and_stays_nearly_always(most: int, seed: int) -> None:
    """Whatever the best count is, with one disturbed step of eight."""
    rng = random.Random(seed)
    counts = sorted({*(count for count in (1, 2, 4, 8) if count < most), most})
    best = rng.choice(counts)

    def seconds(threads: int) -> float:
        off = abs(counts.index(threads) - counts.index(best))
        return (1 + 0.3 * off) * rng.uniform(0.99, 1.01) * (4 if rng.random() < 0.12 else 1)

    choice = ThreadChoice(most)
    _drive(choice, seconds, 400)
    taken = _drive(choice, seconds, 2000)
    assert taken.count(best) > 1800


def test_fewer_threads_that_are_as_fast_leave_cores_to_others() -> None:
    choice = ThreadChoice(4)
    _drive(choice, lambda threads: 0.01, 100)
    assert choice.best == {1: 1}


def test_it_notices_that_the_machine_has_changed() -> None:
    choice = ThreadChoice(2)
    _drive(choice, lambda threads: 0.01 * threads, 3000)
    assert choice.best == {1: 1}
    _drive(choice, lambda threads: 0.04 / threads, LONGEST_WAIT + SAMPLES)
    assert choice.best == {1: 2}


def test_sizes_are_learnt_apart_and_large_steps_take_all() -> None:
    choice = ThreadChoice(2)
    _drive(choice, lambda threads: 0.01 * threads, 20, num_tokens=1)
    _drive(choice, lambda threads: 0.04 / threads, 20, num_tokens=8)
    assert choice.best == {1: 1, 8: 2}
    assert _drive(choice, lambda threads: 0.01 * threads, 50, num_tokens=MOST_TOKENS + 1) == [2] * 50
    alone = ThreadChoice(1)
    assert _drive(alone, lambda threads: 0.01, 50) == [1] * 50


class _Watched:
    """Notes on how many threads each step of ``runner`` ran; a step takes as long as ``slow`` says."""

    def __init__(self, runner: ModelRunner, slow: Callable[[int], float]) -> None:
        self._runner, self._slow = runner, slow
        self.layout, self.cache, self.vocab, self.max_context = (
            runner.layout,
            runner.cache,
            runner.vocab,
            runner.max_context,
        )
        self.seen: list[tuple[int, int]] = []

    def run(self, plan: StepPlan) -> Computed:
        computed = self._runner.run(plan)
        self.seen.append((plan.num_tokens, torch.get_num_threads()))
        return Computed(computed.sampled, self._slow(torch.get_num_threads()), 0.0)


@pytest.fixture
def as_before() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("as_before")
def test_steps_run_on_the_threads_that_were_chosen(tiny_model: Model) -> None:
    plain = engine(tiny_model)
    plain.add(request("a", range(2, 82), 40))
    expected = run_all(plain)
    watched = _Watched(engine(tiny_model).runner, lambda threads: 0.01 * threads)
    core = EngineCore(ThreadedRunner(watched, 2), EngineCoreConfig(block_tokens=BLOCK, max_num_batched_tokens=80))
    core.add(request("a", range(2, 82), 40))
    assert run_all(core) == expected
    assert watched.seen[0] == (80, 2)
    assert watched.seen[-1] == (1, 1)


def test_threads_wait_a_moment_and_then_sleep_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    wait_shortly()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    assert int(os.environ["GOMP_SPINCOUNT"]) > 0
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.delenv("GOMP_SPINCOUNT")
    wait_shortly()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    assert "GOMP_SPINCOUNT" not in os.environ
