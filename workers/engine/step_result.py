"""The result of a step of the engine, as plain data: sampled tokens, each request's output, events, timings."""

from __future__ import annotations

from dataclasses import dataclass

from tanghulu.types import RequestId
from tanghulu.workers.engine.block_pool import KvEvent
from tanghulu.workers.engine.requests import EngineFinishReason
from tanghulu.workers.engine.step_model import NO_WORK, StepWork


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithm of the model's own probability of ``token``, before penalties and temperature."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The chosen token's logprob and those of the most likely ones, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token for each row, in order; ``logprobs`` has None where none were asked for."""

    tokens: list[int]
    logprobs: list[Logprobs | None]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One request's output of a step. The token counts are of the whole request so far.

    ``num_cached_tokens`` were found in this worker's cache or fetched instead of computed.
    """

    request_id: RequestId
    tokens: tuple[int, ...]
    logprobs: Logprobs | None
    finish_reason: EngineFinishReason | None
    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Where a step's time went, in seconds."""

    schedule_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step; empty (`idle`) if there was nothing to compute."""

    outputs: tuple[RequestOutput, ...] = ()
    num_computed_tokens: int = 0
    num_sequences: int = 0
    preempted: tuple[RequestId, ...] = ()
    kv_events: tuple[KvEvent, ...] = ()
    timings: StepTimings = StepTimings()
    work: StepWork = NO_WORK

    @property
    def idle(self) -> bool:
        """Whether the step computed nothing: wait for an event before the next one."""
        return self.num_sequences == 0
