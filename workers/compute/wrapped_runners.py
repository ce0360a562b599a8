"""Runners around another runner: they have its shape, and change how its steps are run.

`ThreadedRunner` picks the number of CPU threads of each step; `ProfiledRunner` traces the first steps with torch's
profiler, for chrome://tracing or Perfetto.
"""

from __future__ import annotations

from pathlib import Path

import structlog
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, supported_activities

from tanghulu.workers.compute.thread_choice import ThreadChoice
from tanghulu.workers.engine.engine import Computed, ModelRunner
from tanghulu.workers.engine.step import StepPlan

#: Steps in a trace: some prefills and enough decodes to see their rhythm, in a file of some megabytes.
NUM_STEPS = 64

_log = structlog.get_logger(__name__)


class WrappedRunner:
    """A `ModelRunner` around ``runner``, except `run`, which subclasses define."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.layout, self.cache = runner.layout, runner.cache
        self.vocab, self.max_context = runner.vocab, runner.max_context


class ThreadedRunner(WrappedRunner):
    """Runs ``runner`` on at most ``num_threads`` threads, for models on the CPU. Only one thread may call `run`."""

    def __init__(self, runner: ModelRunner, num_threads: int) -> None:
        super().__init__(runner)
        self.choice = ThreadChoice(num_threads)
        self._threads = 0  # not set in the calling thread yet

    def run(self, plan: StepPlan) -> Computed:
        """Run the step on the number of threads that has proved best for steps of its size."""
        num_tokens = plan.num_tokens + plan.num_drafted
        threads = self.choice.threads(num_tokens)
        if threads != self._threads:
            torch.set_num_threads(threads)  # for the products that this thread starts from now on
            self._threads = threads
        computed = self._runner.run(plan)
        self.choice.took(num_tokens, computed.forward_s)
        return computed

    def __repr__(self) -> str:
        return f"ThreadedRunner({self._runner!r}, {self.choice.best})"


class ProfiledRunner(WrappedRunner):
    """Traces only the first ``num_steps`` steps of ``runner``; writes the trace to ``path``."""

    def __init__(self, runner: ModelRunner, path: Path, num_steps: int = NUM_STEPS) -> None:
        super().__init__(runner)
        self._path = path
        self._left = num_steps
        self._profiler: profile | None = None

    def run(self, plan: StepPlan) -> Computed:
        """Forward and sample, tracing the first steps."""
        if self._left == 0:
            return self._runner.run(plan)
        if self._profiler is None:
            lanes_too = _ExperimentalConfig(profile_all_threads=True)
            self._profiler = profile(activities=supported_activities(), experimental_config=lanes_too)  # type: ignore[no-untyped-call]
            self._profiler.start()
        computed = self._runner.run(plan)
        self._left -= 1
        if self._left == 0:
            self._write(self._profiler)
        return computed

    def _write(self, profiler: profile) -> None:
        """Write the trace; if that fails, it is logged and requests continue."""
        profiler.stop()
        self._profiler = None
        try:
            profiler.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            _log.error("profile.failed", path=str(self._path), error=str(error))
        else:
            _log.info("profile.written", path=str(self._path))

    def __repr__(self) -> str:
        return f"ProfiledRunner({self._runner!r}, {self._left} steps left)"
