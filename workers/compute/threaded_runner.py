"""A runner that takes as many of the CPU's threads for each step as have proved best for steps of its size."""

from __future__ import annotations

import torch

from tanghulu.workers.compute.thread_choice import ThreadChoice
from tanghulu.workers.compute.wrapped_runner import WrappedRunner
from tanghulu.workers.engine.engine import Computed, ModelRunner
from tanghulu.workers.engine.step_plan import StepPlan


class ThreadedRunner(WrappedRunner):
    """``runner`` on at most ``num_threads`` threads; for models on the CPU. Only one thread may call `run`."""

    def __init__(self, runner: ModelRunner, num_threads: int) -> None:
        super().__init__(runner)
        self.choice = ThreadChoice(num_threads)
        self._threads = 0  # not set in the calling thread yet

    def run(self, plan: StepPlan) -> Computed:
        """As ``runner`` does."""
        num_tokens = plan.num_tokens
        threads = self.choice.threads(num_tokens)
        if threads != self._threads:
            torch.set_num_threads(threads)  # of the products that this thread starts from now on
            self._threads = threads
        computed = self._runner.run(plan)
        self.choice.took(num_tokens, computed.forward_s)
        return computed

    def __repr__(self) -> str:
        return f"ThreadedRunner({self._runner!r}, {self.choice.best})"
