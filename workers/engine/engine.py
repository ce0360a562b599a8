"""The engine: one model, its KV cache and its requests, advanced one step at a time.

`EngineCore` joins the deciding part (`Scheduler`) with the computing part (a `ModelRunner`: model and sampling in
torch, or the mock). It does no I/O and has no thread: its owner calls `step` in a loop, and all other methods between
two steps, from the same thread. Transfers are queued (`KvTransfers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from tanghulu.errors import InvalidRequest
from tanghulu.hashing import TokenSequence
from tanghulu.runtime.clock import Clock, SystemClock
from tanghulu.session.outputs import KvLoad, KvSource
from tanghulu.types import RequestId
from tanghulu.workers.engine.block_pool import BlockPool
from tanghulu.workers.engine.kv_layout import KvBlocks, KvLayout
from tanghulu.workers.engine.phase_times import PhaseBook
from tanghulu.workers.engine.requests import EngineRequest, EngineRequestState
from tanghulu.workers.engine.scheduler import EngineCoreConfig, Scheduler
from tanghulu.workers.engine.step import (
    CommittedBlock,
    FetchWanted,
    PromptScoreArrays,
    Sampled,
    StepOutcome,
    StepPlan,
    StepResult,
    StepTimings,
)


class Computed(Struct, frozen=True):
    """Result of a runner for a plan: the tokens of each sampling run, in order, and the time of each part.

    ``scores`` are the log probabilities of prompts computed by its runs.
    """

    sampled: Sampled
    forward_s: float
    sample_s: float
    scores: tuple[PromptScoreArrays, ...] = ()


class ModelRunner(Protocol):
    """Computes the scheduler's plans, over the paged cache whose memory it owns."""

    @property
    def layout(self) -> KvLayout: ...

    @property
    def cache(self) -> KvBlocks:
        """The blocks; as many as the engine's block pool has."""

    @property
    def vocab(self) -> int:
        """Upper bound of token ids."""

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer together to which the model can attend."""

    def run(self, plan: StepPlan) -> Computed:
        """Write the KV of every planned token and sample where planned. Blocks for the duration."""


class WrappedRunner:
    """A `ModelRunner` around ``runner``, except `run`, which subclasses define."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.layout, self.cache = runner.layout, runner.cache
        self.vocab, self.max_context = runner.vocab, runner.max_context


class KvTransfers:
    """Moves KV between the engine's blocks and the outside. This one has no outside.

    The engine's thread calls; all methods only queue their work and return at once.
    """

    #: Whether prefixes may be fetched.
    can_fetch = False

    def fetch(self, wanted: FetchWanted) -> None:
        """Begin to fetch; `EngineCore.fetch_done` must follow exactly once, also after a failure (with 0 blocks)."""

    def decline(self, peer: KvSource) -> None:
        """Notify the export's holder that none of it is needed, so that it can release its blocks."""

    def pull(self, wanted: FetchWanted) -> None:
        """Begin to fetch from a peer's growing export; ``wanted.request_id`` names the pull.

        `Pulls.arrived` follows as blocks arrive, in order, then `Pulls.done` exactly once.
        """

    def blocks_committed(self, blocks: Sequence[CommittedBlock]) -> None:
        """Receive blocks whose bytes stay valid during this call; `Exports.hold` them to read them later."""

    def blocks_reused(self, blocks: Sequence[CommittedBlock]) -> None:
        """Receive cached ``blocks`` found by requests; their bytes stay valid during this call."""

    def blocks_preempted(self, blocks: Sequence[CommittedBlock]) -> None:
        """Receive full ``blocks`` that requests gave up and will fetch; their bytes are valid during this call only."""

    def engine_idle(self) -> None:
        """Note that the engine has nothing to compute until an outside event."""


class EngineCore:
    """Owns the cache's blocks and every request of this worker."""

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineCoreConfig,
        transfers: KvTransfers | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Schedule over all blocks of ``runner.cache``; raises ConfigError if bounds contradict each other."""
        self.runner = runner
        self.config = config
        self.pool = BlockPool(runner.cache.num_blocks, config.eviction)
        self._transfers = transfers or KvTransfers()
        self.scheduler = Scheduler(config, self.pool, runner.max_context, can_fetch=self._transfers.can_fetch)
        self.exports, self.pulls = self.scheduler.exports, self.scheduler.pulls
        self._clock = clock or SystemClock()
        self._phases = PhaseBook()

    @property
    def cache(self) -> KvBlocks:
        return self.runner.cache

    def add(self, request: EngineRequest) -> None:
        """Queue ``request``.

        Raises InvalidRequest (bad token ids, double id), ContextLengthExceeded or Overloaded; the request is
        then forgotten.
        """
        vocab = self.runner.vocab
        if int(request.sequence.tokens.max()) >= vocab:
            raise InvalidRequest(
                f"request {request.request_id} has a token id outside the vocabulary of {vocab} tokens"
            )
        sampling = request.sampling
        named = {*sampling.logit_bias, *request.ending_ids, *sampling.logprob_token_ids}
        unknown = sorted(token for token in named if not 0 <= token < vocab)
        if unknown:
            raise InvalidRequest(
                f"logit_bias, stop_token_ids or logprob_token_ids name tokens {unknown[:5]}; the vocabulary has {vocab}"
            )
        self.scheduler.add(request)
        self._phases.added(request.request_id, self._clock.now_s())

    def pull_ahead(self, name: RequestId, sequence: TokenSequence, peer: KvSource) -> bool:
        """Begin to pull the prompt ``sequence`` from a prefill under way; False without room or anything to do.

        `abort` ends it, and a request that names it (``ahead``) continues from what it has fetched.
        """
        wanted = self.scheduler.pull_ahead(name, sequence, peer)
        if wanted is not None:
            self._transfers.pull(wanted)
        return wanted is not None

    def abort(self, request_id: RequestId) -> bool:
        """Drop the request, or the pull, without further output; False if the engine does not have it (any more).

        A peer's export that waits for it is declined; one being fetched is released when the fetch has ended.
        """
        request = self.scheduler.request(request_id)
        peer = request.peer if request is not None and request.state is EngineRequestState.WAITING else None
        if peer is not None:
            self._transfers.decline(peer)
        self._phases.dropped(request_id)
        return self.scheduler.abort(request_id) if request is not None else self.pulls.drop(request_id)

    def fetch_done(self, request_id: RequestId, num_blocks_ok: int, loads: Sequence[KvLoad] = ()) -> None:
        self.scheduler.fetch_done(request_id, num_blocks_ok, loads)
        self._phases.fetched(request_id, self._clock.now_s())

    def step(self) -> StepResult:
        """Plan, compute and sample once. Blocks while the model computes."""
        started = self._clock.now_s()
        plan = self.scheduler.schedule()
        if plan.displaced:
            self._transfers.blocks_preempted(plan.displaced)
        for wanted in plan.fetches:
            self._transfers.fetch(wanted)
        for peer in plan.declined:
            self._transfers.decline(peer)
        if plan.reused:
            self._transfers.blocks_reused(plan.reused)
        planned = self._clock.now_s()
        self._phases.planned(plan, planned)
        computed = self.runner.run(plan) if plan.runs else _NOTHING
        outcome = self.scheduler.step_done(computed.sampled)
        if outcome.committed:
            began = self._clock.now_s()
            self._transfers.blocks_committed(outcome.committed)
            self._phases.stored(outcome.committed, self._clock.now_s() - began)
        if self.config.debug_checks:
            self.scheduler.check()
        timings = StepTimings(planned - started, computed.forward_s, computed.sample_s)
        return self._result(plan, computed, outcome, timings)

    def rest(self) -> None:
        """Notify the transfers if there is nothing to compute; call it after each step and each event."""
        if not self.scheduler.has_work:
            self._transfers.engine_idle()

    def _result(self, plan: StepPlan, computed: Computed, outcome: StepOutcome, timings: StepTimings) -> StepResult:
        now_s = self._clock.now_s()
        for output in outcome.outputs:
            output.phases = self._phases.token(output.request_id, output.finish is not None, now_s)
        return StepResult(
            outputs=outcome.outputs,
            num_computed_tokens=plan.num_tokens + plan.num_drafted,
            num_sequences=len(plan.runs),
            preempted=plan.preempted,
            kv_events=tuple(self.pool.take_events()),
            timings=timings,
            work=plan.work,
            scores=computed.scores,
            num_drafted_tokens=plan.num_drafted,
            num_accepted_tokens=outcome.num_accepted,
        )

    def check(self) -> None:
        self.scheduler.check()

    def __repr__(self) -> str:
        return f"EngineCore({self.runner!r}, {self.scheduler!r})"


_NOTHING = Computed(Sampled([], []), 0.0, 0.0)
