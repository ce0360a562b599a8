"""How fast this worker is, from its own steps: exponential averages over what the steps did. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tanghulu.workers.engine import StepResult

_WEIGHT = 0.2  # of the newest step
_PREFILL_TOKENS = 32  # steps of at least so many tokens are prefill; decode's time is that of smaller ones


@dataclass(frozen=True, slots=True)
class Speeds:
    """Measured lately; 0 while unknown."""

    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0


class SpeedMeter:
    """Feed it steps; read ``speeds``."""

    def __init__(self) -> None:
        self.speeds = Speeds()

    def step(self, result: StepResult) -> None:
        """Take a step that computed something into account."""
        seconds = result.timings.forward_s + result.timings.sample_s
        if seconds <= 0 or not result.num_computed_tokens:
            return
        if result.num_computed_tokens >= max(_PREFILL_TOKENS, 2 * result.num_sequences):
            rate = _average(self.speeds.prefill_tokens_per_s, result.num_computed_tokens / seconds)
            self.speeds = Speeds(rate, self.speeds.decode_step_s)
        else:
            self.speeds = Speeds(self.speeds.prefill_tokens_per_s, _average(self.speeds.decode_step_s, seconds))


def _average(old: float, new: float) -> float:
    return new if old == 0 else (1 - _WEIGHT) * old + _WEIGHT * new
