"""How long a step of the mock engine takes: a model of time with five constants, in seconds.

A step that computes, for each sequence, ``n`` tokens after ``p`` that are there already takes

    step_s + sum(token_s * n + pair_s * ((p + n)^2 - p^2))    over sequences in prefill
           + sum(sequence_s + context_s * p)                  over sequences in decode

which is the latency model of Mooncake's paper (FAST '25, table 1) applied to a step of chunked prefill and decode
together. Example with ``gpu-70b``: a prompt of 8,000 tokens, computed at once, takes 20 ms + 8,000 x 95 us
+ 64e6 x 2.1 ns = 0.91 s; a decode step of 8 sequences at 8,000 tokens each
20 ms + 8 x 0.1 ms + 64,000 x 29 ns = 22.7 ms.
"""

from __future__ import annotations

from dataclasses import dataclass

from tanghulu.workers.engine.step_plan import ScheduledRun, StepPlan


@dataclass(frozen=True, slots=True)
class MockTiming:
    """The constants, in seconds, and by how much they are divided."""

    step_s: float
    token_s: float
    pair_s: float
    sequence_s: float
    context_s: float
    speedup: float = 1.0

    def step_seconds(self, plan: StepPlan) -> float:
        return (self.step_s + sum(map(self._run_seconds, plan.runs))) / self.speedup

    def _run_seconds(self, run: ScheduledRun) -> float:
        if run.num_tokens == 1 and run.samples:
            return self.sequence_s + self.context_s * run.start
        end = run.start + run.num_tokens
        return self.token_s * run.num_tokens + self.pair_s * (end * end - run.start * run.start)


#: ``cpu-135m``: SmolLM2-135M in float32 on two cores without bfloat16, measured with this engine. ``gpu-8b`` and
#: ``gpu-70b``: Llama shapes on 8 x A800 at an MFU of one half (22 l d^2 and 4 l d floating-point operations a token
#: and a pair), decode bound by memory.
TIMINGS = {
    "cpu-135m": MockTiming(step_s=0.045, token_s=1.9e-3, pair_s=2.5e-8, sequence_s=0.008, context_s=4e-6),
    "gpu-8b": MockTiming(step_s=0.006, token_s=9.5e-6, pair_s=4.2e-10, sequence_s=6e-5, context_s=8e-9),
    "gpu-70b": MockTiming(step_s=0.020, token_s=9.5e-5, pair_s=2.1e-9, sequence_s=1e-4, context_s=2.9e-8),
}
