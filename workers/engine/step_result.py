"""The result of a step of the engine, as plain data: sampled tokens, each request's output, events, timings."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from tanghulu.types import RequestId
from tanghulu.workers.engine.block_pool import KvEvent
from tanghulu.workers.engine.phase_times import PhaseTimes
from tanghulu.workers.engine.prompt_scores import PromptScores
from tanghulu.workers.engine.requests import EngineFinishReason
from tanghulu.workers.engine.step_model import NO_WORK, StepWork
from tanghulu.workers.engine.step_plan import CommittedBlock


class TokenLogprob(Struct, frozen=True):
    """Natural logarithm of the model's own probability of ``token``, before penalties and temperature."""

    token: int
    logprob: float


class Logprobs(Struct, frozen=True):
    """The chosen token's logprob, those of the most likely ones, best first, and those that were asked for by id."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
    asked: tuple[TokenLogprob, ...] = ()


class Sampled(Struct, frozen=True):
    """One token for each row, in order; ``logprobs`` has None where none were asked for."""

    tokens: list[int]
    logprobs: list[Logprobs | None]


class RequestOutput(Struct):
    """One token of a request; a step may have several, in order. The token counts are of the request up to it.

    ``num_cached_tokens`` were found in this worker's cache or fetched instead of computed. ``phases`` come with the
    first token and with the last; whoever has the clock sets them.
    """

    request_id: RequestId
    tokens: tuple[int, ...]
    logprobs: Logprobs | None
    finish_reason: EngineFinishReason | None
    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int
    phases: PhaseTimes | None = None


class StepOutcome(Struct, frozen=True):
    """What a completed step changed; ``num_accepted`` tokens of drafts were right."""

    outputs: list[RequestOutput]
    committed: list[CommittedBlock]
    num_accepted: int = 0


class StepTimings(Struct, frozen=True):
    """Where a step's time went, in seconds."""

    schedule_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0


class StepResult(Struct, frozen=True):
    """The result of one step; empty (`idle`) if there was nothing to compute.

    ``num_drafted_tokens`` of the computed ones were proposed, of which ``num_accepted_tokens`` became text.
    """

    outputs: Sequence[RequestOutput] = ()
    num_computed_tokens: int = 0
    num_sequences: int = 0
    preempted: Sequence[RequestId] = ()
    kv_events: tuple[KvEvent, ...] = ()
    timings: StepTimings = StepTimings()
    work: StepWork = NO_WORK
    scores: tuple[PromptScores, ...] = ()
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def idle(self) -> bool:
        """Whether the step computed nothing: wait for an event before the next one."""
        return self.num_sequences == 0
