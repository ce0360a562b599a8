"""A model runner that traces its first steps with torch's profiler, for chrome://tracing or Perfetto."""

from __future__ import annotations

from pathlib import Path

import structlog
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, supported_activities

from tanghulu.workers.compute.wrapped_runner import WrappedRunner
from tanghulu.workers.engine.engine import Computed, ModelRunner
from tanghulu.workers.engine.step_plan import StepPlan

#: Steps in a trace: some prefills and enough decodes to see their rhythm, in a file of some megabytes.
NUM_STEPS = 64

_log = structlog.get_logger(__name__)


class ProfiledRunner(WrappedRunner):
    """``runner``, its first ``num_steps`` steps traced; then the trace is written to ``path`` and nothing is traced."""

    def __init__(self, runner: ModelRunner, path: Path, num_steps: int = NUM_STEPS) -> None:
        super().__init__(runner)
        self._path = path
        self._left = num_steps
        self._profiler: profile | None = None

    def run(self, plan: StepPlan) -> Computed:
        """Forward and sample, traced while steps are left."""
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
        """A trace that cannot be written is said in the log; requests go on."""
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
