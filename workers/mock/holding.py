"""Holds the mock engine before steps that files ask for, so that tests find requests at a moment and keep them there.

A file in the directory of ``--mock-hold`` names the step to stop before:

    step      the next one
    prefill   the next one that computes a prompt
    decode    the next one of a request with DECODE_TOKENS tokens or more

The engine renames the file to ``<name>.held`` and stands still until that one is gone: its thread does nothing
meanwhile, as in a call to a GPU, and the rest of the process goes on. Example: to stop a worker in the middle of an
answer, ``touch DIR/decode``, wait for ``DIR/decode.held``, and remove it to go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from tanghulu.workers.engine.engine import Computed, ModelRunner
from tanghulu.workers.engine.step_plan import ScheduledRun, StepPlan

_log = structlog.get_logger(__name__)

#: Generated tokens of a request that is in the middle of its answer.
DECODE_TOKENS: Final = 16
_POLL_S: Final = 0.002
#: A hold that nobody ends, as when its test was killed, ends by itself: a held engine keeps its process from ending.
MOST_S: Final = 300.0


class HoldingRunner:
    """A `ModelRunner` around ``runner`` whose steps wait while a file in ``folder`` holds them."""

    def __init__(self, runner: ModelRunner, folder: Path, sleep: Callable[[float], None] = time.sleep) -> None:
        self._runner = runner
        self._folder = folder
        self._sleep = sleep
        self.layout, self.cache = runner.layout, runner.cache
        self.vocab, self.max_context = runner.vocab, runner.max_context

    def run(self, plan: StepPlan) -> Computed:
        """Run the step, at once or when its hold is gone."""
        for name, holds in (("step", _any), ("prefill", _is_prefill), ("decode", _is_answer)):
            if any(map(holds, plan.runs)):
                self._wait(name)
        return self._runner.run(plan)

    def _wait(self, name: str) -> None:
        held = self._folder / f"{name}.held"
        try:
            (self._folder / name).rename(held)
        except FileNotFoundError:
            return
        _log.info("mock.held", before=name)
        polls_left = int(MOST_S / _POLL_S)
        while held.exists() and polls_left:
            polls_left -= 1
            self._sleep(_POLL_S)

    def __repr__(self) -> str:
        return f"HoldingRunner({self._runner!r}, {self._folder})"


def _any(run: ScheduledRun) -> bool:
    return True


def _is_prefill(run: ScheduledRun) -> bool:
    return run.start < run.request.num_prompt_tokens


def _is_answer(run: ScheduledRun) -> bool:
    return run.start - run.request.num_prompt_tokens >= DECODE_TOKENS
