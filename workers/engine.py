"""The engine: one model, its KV cache and its requests, advanced one step at a time.

`EngineCore` joins the deciding part (`Scheduler`) with the computing part (model, cache, sampling). It does no
I/O and has no thread: whoever owns it calls `step` in a loop, and all other methods between two steps, from the
same thread. What must travel goes through two hooks, which may only note down what to do and return at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tanghulu.clock import Clock, SystemClock
from tanghulu.errors import InvalidRequest
from tanghulu.types import RequestId
from tanghulu.workers.block_pool import BlockPool, KvEvent
from tanghulu.workers.kv_cache import KvCache, KvLayout
from tanghulu.workers.models.forward_batch import SequenceChunk, build_forward_batch
from tanghulu.workers.models.registry import Model
from tanghulu.workers.requests import EngineRequest, FinishReason
from tanghulu.workers.sampling import Logprobs, Sampled, SamplingRow, sample
from tanghulu.workers.scheduler import Scheduler, SchedulerConfig
from tanghulu.workers.step_plan import CommittedBlock, FetchWanted, ScheduledRun, StepOutcome, StepPlan


class KvFetcher(Protocol):
    """Brings KV from outside into blocks."""

    def fetch(self, wanted: FetchWanted) -> None:
        """Begin; `EngineCore.fetch_done` must follow exactly once, also after a failure (with 0 blocks)."""
        ...


class KvSink(Protocol):
    """Is told of blocks that are worth keeping outside."""

    def blocks_committed(self, blocks: Sequence[CommittedBlock]) -> None:
        """Their bytes stay valid during this call; `EngineCore.hold` them to read them later."""
        ...


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and bounds of an engine. ``debug_checks`` asserts all invariants after every step."""

    block_tokens: int = 64
    kv_capacity_bytes: int = 1 << 30
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 32
    max_num_waiting: int = 1024
    max_context: int | None = None
    debug_checks: bool = False


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one request gained in a step. The token counts are of the whole request so far.

    ``num_cached_tokens`` were found in this worker's cache or fetched instead of computed.
    """

    request_id: RequestId
    tokens: tuple[int, ...]
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
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
    """Everything that one step has to tell. Empty (`idle`) if there was nothing to compute."""

    outputs: tuple[RequestOutput, ...] = ()
    num_computed_tokens: int = 0
    num_sequences: int = 0
    preempted: tuple[RequestId, ...] = ()
    kv_events: tuple[KvEvent, ...] = ()
    timings: StepTimings = StepTimings()

    @property
    def idle(self) -> bool:
        """Whether the step computed nothing: wait for an event before the next one."""
        return self.num_sequences == 0


class EngineCore:
    """Owns the cache's blocks and every request sent to this worker."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        cache_buffer: memoryview | bytearray | None = None,
        fetcher: KvFetcher | None = None,
        sink: KvSink | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Lay out the cache in ``cache_buffer`` (or own memory) of at least ``kv_capacity_bytes``.

        Raises ConfigError with the figures if not even one block fits or bounds contradict each other.
        """
        self.model = model
        self.config = config
        self.layout = KvLayout.of(model.config, config.block_tokens, model.dtype)
        num_blocks = self.layout.num_blocks_in(config.kv_capacity_bytes)
        self.cache = KvCache(self.layout, num_blocks, cache_buffer)
        self.scheduler = Scheduler(self._scheduler_config(can_fetch=fetcher is not None), BlockPool(num_blocks))
        self._fetcher = fetcher
        self._sink = sink
        self._clock = clock or SystemClock()

    def _scheduler_config(self, *, can_fetch: bool) -> SchedulerConfig:
        config, trained = self.config, self.model.config.max_context
        return SchedulerConfig(
            block_tokens=config.block_tokens,
            max_context=min(trained, config.max_context or trained),
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_num_waiting=config.max_num_waiting,
            can_fetch=can_fetch,
        )

    def add(self, request: EngineRequest) -> None:
        """Queue ``request``.

        Raises InvalidRequest (bad token ids, double id), ContextLengthExceeded or Overloaded; the request is
        then forgotten.
        """
        vocab = self.model.config.vocab
        if int(request.sequence.tokens.max()) >= vocab:
            raise InvalidRequest(f"request {request.request_id} has a token id outside the vocabulary of {vocab}")
        named = {token for token, _ in request.sampling.logit_bias} | request.stop.ending_ids
        unknown = sorted(token for token in named if not 0 <= token < vocab)
        if unknown:
            raise InvalidRequest(f"logit_bias or stop ids name tokens {unknown[:5]}; the vocabulary has {vocab}")
        self.scheduler.add(request)

    def abort(self, request_id: RequestId) -> bool:
        """Drop the request without further output; False if it is not here (any more)."""
        return self.scheduler.abort(request_id)

    def fetch_done(self, request_id: RequestId, num_blocks_ok: int, tokens: Sequence[int] = ()) -> FinishReason | None:
        """The fetcher is done with a request; see `Scheduler.fetch_done`."""
        return self.scheduler.fetch_done(request_id, num_blocks_ok, tokens)

    def release_export(self, request_id: RequestId) -> bool:
        """Give up a handed-over request's blocks; False if there are none."""
        return self.scheduler.release_export(request_id)

    def hold(self, block_ids: Sequence[int]) -> None:
        """Keep blocks (in use or cached) from being reused while their bytes are read."""
        self.scheduler.hold(block_ids)

    def unhold(self, block_ids: Sequence[int]) -> None:
        """End a `hold`."""
        self.scheduler.unhold(block_ids)

    def drop_cached(self) -> int:
        """Forget every cached block that nobody uses; returns how many. The next step reports the events."""
        return self.scheduler.pool.drop_cached()

    def step(self) -> StepResult:
        """Plan, compute and sample once. Takes as long as the model takes."""
        started = self._clock.now_s()
        plan = self.scheduler.schedule()
        if self._fetcher is not None:
            for wanted in plan.fetches:
                self._fetcher.fetch(wanted)
        planned = self._clock.now_s()
        logits = self._forward(plan) if plan.runs else None
        computed = self._clock.now_s()
        sampled = self._sample(plan, logits)
        outcome = self.scheduler.step_done(sampled.tokens)
        if self._sink is not None and outcome.committed:
            self._sink.blocks_committed(outcome.committed)
        if self.config.debug_checks:
            self.scheduler.check()
        timings = StepTimings(planned - started, computed - planned, self._clock.now_s() - computed)
        return self._result(plan, sampled, outcome, timings)

    def _forward(self, plan: StepPlan) -> torch.Tensor:
        chunks = [_chunk(run) for run in plan.runs]
        return self.model.forward(build_forward_batch(chunks, self.config.block_tokens), self.cache)

    def _sample(self, plan: StepPlan, logits: torch.Tensor | None) -> Sampled:
        rows = [SamplingRow.of(run.request) for run in plan.runs if run.samples]
        if logits is None or not rows:
            return Sampled([], [])
        return sample(logits, rows)

    def _result(self, plan: StepPlan, sampled: Sampled, outcome: StepOutcome, timings: StepTimings) -> StepResult:
        sampling = [run.request.request_id for run in plan.runs if run.samples]
        logprobs = dict(zip(sampling, sampled.logprobs, strict=True))
        outputs = tuple(
            RequestOutput(
                request_id=output.request.request_id,
                tokens=(output.token,),
                logprobs=logprobs[output.request.request_id],
                finish_reason=output.finish_reason,
                num_prompt_tokens=output.request.num_prompt_tokens,
                num_generated_tokens=output.request.num_generated,
                num_cached_tokens=output.request.num_cached_tokens,
            )
            for output in outcome.outputs
        )
        return StepResult(
            outputs=outputs,
            num_computed_tokens=plan.num_tokens,
            num_sequences=len(plan.runs),
            preempted=plan.preempted,
            kv_events=tuple(self.scheduler.pool.take_events()),
            timings=timings,
        )

    def check(self) -> None:
        """Assert all invariants of scheduler and pool."""
        self.scheduler.check()

    def __repr__(self) -> str:
        return f"EngineCore({self.model.config.architecture}, {self.cache!r}, {self.scheduler!r})"


def _chunk(run: ScheduledRun) -> SequenceChunk:
    request = run.request
    tokens = request.sequence.tokens[run.start : run.start + run.num_tokens]
    return SequenceChunk(tokens, run.start, request.block_ids, run.samples)
