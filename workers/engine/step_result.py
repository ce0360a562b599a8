"""The result of a step of the engine, as plain data: sampled tokens, each request's output, events, timings."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from tanghulu.session.outputs import Output, TokenLogprobs
from tanghulu.types import RequestId
from tanghulu.workers.engine.block_pool import KvEvent
from tanghulu.workers.engine.prompt_scores import PromptScoreArrays
from tanghulu.workers.engine.step_model import NO_WORK, StepWork
from tanghulu.workers.engine.step_plan import CommittedBlock


class Sampled(Struct, frozen=True):
    """One token per row, in order; ``logprobs`` has None where none are requested."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


class StepOutcome(Struct, frozen=True):
    """Changes by a completed step; ``num_accepted`` tokens of drafts were right."""

    outputs: list[Output]
    committed: list[CommittedBlock]
    num_accepted: int = 0


class StepTimings(Struct, frozen=True):
    """Parts of a step's time, in seconds."""

    schedule_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0


class StepResult(Struct, frozen=True):
    """The result of one step; empty (`idle`) if there was nothing to compute.

    ``num_drafted_tokens`` of the computed ones were proposed, and ``num_accepted_tokens`` of those became text.
    """

    outputs: Sequence[Output] = ()
    num_computed_tokens: int = 0
    num_sequences: int = 0
    preempted: Sequence[RequestId] = ()
    kv_events: tuple[KvEvent, ...] = ()
    timings: StepTimings = StepTimings()
    work: StepWork = NO_WORK
    scores: tuple[PromptScoreArrays, ...] = ()
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def idle(self) -> bool:
        """Whether the step computed nothing: wait for an event before the next one."""
        return self.num_sequences == 0
