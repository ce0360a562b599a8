"""Choice of the tokens that each request computes in the next step: continuous batching as a pure state machine.

There is no prefill phase and no decode phase. Every request has tokens whose KV is not computed yet: many at first
(prefill), one from then on (decode). A step takes, within ``max_num_batched_tokens``, first one token of every decoding
request, then runs of prompts in their order, then admits waiting requests; a request that reaches its last token
samples the next. (Chunked prefill: Sarathi-Serve, https://arxiv.org/abs/2403.02310.) The rest of the budget may go to
drafts (`ngram_drafts`).

Worked example, budget 8, blocks of 4. A decodes; B waits with 10 tokens, C with 3. Step 1: A 1 token, B its
first 7. Step 2: A 1, B its last 3 and samples, C 3 and samples. Step 3: A, B, C one each.

Room. A request is admitted with blocks for all the tokens it has, so a prefill is never displaced by its own growth;
blocks for generated tokens are taken one by one. When none is left, the youngest running request is preempted: it gives
its blocks back (the full ones stay cached until needed) and returns to the queue at its old place. Admission is
strictly in order, so nobody starves: the oldest always proceeds. If the blocks it gave back are kept
(``moves_preempted``), it fetches them on its return; otherwise it computes what the cache has lost.

Order, as in the conductor's queue. Requests moved from a lost worker, as they have waited there; then the clients take
turns (`FairTurns`), so that a client with hundreds of requests delays another's single one by one turn. Among one
client's waiting requests, those of higher priority take its first turns; then arrival.

Events in: `add`, `abort`, `fetch_done`, `step_done`. Decisions out: `schedule`. No clock, no I/O.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tanghulu.errors import ConfigError, ContextLengthExceeded, InvalidRequest, Overloaded
from tanghulu.fair_turns import FairTurns
from tanghulu.hashing import TokenSequence
from tanghulu.rpc.wire import Failure
from tanghulu.session.outputs import FinishReason, KvLoad, KvSource, Output, TokenLogprobs
from tanghulu.types import RequestId
from tanghulu.workers.engine.block_pool import DEFAULT_EVICTION, BlockPool
from tanghulu.workers.engine.exports import Exports
from tanghulu.workers.engine.ngram_drafts import NgramProposer
from tanghulu.workers.engine.pulls import Pulls
from tanghulu.workers.engine.requests import EngineRequest, EngineRequestEvent, EngineRequestState
from tanghulu.workers.engine.step import CommittedBlock, FetchWanted, Sampled, StepOutcome, StepPlan, plan_fetch

_GRAMMAR_FAILED = Failure.of(
    InvalidRequest(
        "the request's grammar allows no continuation of its text; does its schema refer to nothing but itself?"
    )
)


@dataclass(frozen=True, slots=True)
class EngineCoreConfig:
    """Sizes and bounds of an engine: of a step, of the queue, of a block.

    ``moves_preempted``: the transfers keep blocks given up by preempted requests (`StepPlan.displaced`) where fetches
    find them. With a ``proposer``, which the runner must also have, decodes are speculative. ``debug_checks`` asserts
    all invariants after every step.
    """

    block_tokens: int = 64
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 32
    max_num_waiting: int = 1024
    eviction: str = DEFAULT_EVICTION
    moves_preempted: bool = False
    proposer: NgramProposer | None = None
    debug_checks: bool = False

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}: "
                "a step must hold one token of every sequence"
            )
        if min(self.block_tokens, self.max_num_seqs, self.max_num_waiting) < 1:
            raise ConfigError("block_tokens, max_num_seqs and max_num_waiting must be at least 1")


class Scheduler:
    """Owns every request and, through the pool, every block.

    The model attends to at most ``max_context`` tokens. ``can_fetch``: every FetchWanted is performed.
    """

    def __init__(self, config: EngineCoreConfig, pool: BlockPool, max_context: int, *, can_fetch: bool = False) -> None:
        self.config = config
        self._max_context, self._can_fetch = max_context, can_fetch
        self._block_tokens = config.block_tokens
        self.pool = pool
        self.exports = Exports(pool, config.block_tokens)
        self.pulls = Pulls(pool, config.block_tokens)
        self.max_tokens = min(max_context, pool.num_blocks * config.block_tokens)
        self._requests: dict[RequestId, EngineRequest] = {}
        self._waiting: list[EngineRequest] = []
        self._running: list[EngineRequest] = []
        self._fetches: dict[RequestId, FetchWanted] = {}
        #: Requests ever added.
        self.num_added = 0
        self._turns = FairTurns()
        self._plan: StepPlan | None = None

    # ---- events from outside

    def add(self, request: EngineRequest) -> None:
        """Queue ``request``. Raises ContextLengthExceeded, InvalidRequest or Overloaded, and then keeps nothing."""
        assert request.state is EngineRequestState.WAITING
        assert request.sequence.block_tokens == self._block_tokens
        if request.request_id in self._requests or self.exports.get(request.request_id) is not None:
            raise InvalidRequest(f"request {request.request_id} is already here")
        if request.num_tokens >= self.max_tokens:
            raise ContextLengthExceeded(
                f"request {request.request_id} has {request.num_tokens} tokens; this worker takes at most "
                f"{self.max_tokens - 1} (context {self._max_context}, KV cache "
                f"{self.pool.num_blocks} blocks of {self._block_tokens})"
            )
        if request.num_generated >= request.stop.max_new_tokens:
            raise InvalidRequest(
                f"request {request.request_id} has already generated {request.num_generated} tokens, its max_new_tokens"
            )
        if len(self._waiting) >= self.config.max_num_waiting:
            raise Overloaded(
                f"{len(self._waiting)} requests are waiting, the maximum; retry later or at another worker"
            )
        request.arrival = self.num_added
        request.turn = 0.0 if request.moved else self._turns.take(request.client, request.weight)
        self.num_added += 1
        self._requests[request.request_id] = request
        if not request.moved:
            self._overtake(request)
        insort(self._waiting, request, key=_order)
        self.pulls.end_soon(request.ahead)

    def _overtake(self, request: EngineRequest) -> None:
        """Give ``request`` the first turn of its client's waiting ones of lower priority, and those the following."""
        lower = [
            other
            for other in self._waiting
            if other.priority < request.priority
            and (other.client, other.moved, other.state) == (request.client, False, EngineRequestState.WAITING)
        ]
        for other in reversed(lower):
            other.turn, request.turn = request.turn, other.turn
        if lower:
            self._waiting.sort(key=_order)

    def pull_ahead(self, name: RequestId, sequence: TokenSequence, peer: KvSource) -> FetchWanted | None:
        """Begin to pull the full blocks of ``sequence`` from ``peer``, as far as no request needs the room."""
        if not self._can_fetch:
            return None
        spare = len(self._running) + sum(self._num_blocks(request.num_tokens) for request in self._admissible())
        return self.pulls.begin(name, sequence, peer, spare)

    def abort(self, request_id: RequestId) -> bool:
        """Drop the request; False if the scheduler does not have it (any more): it may have just ended."""
        request = self._requests.get(request_id)
        if request is None or request.state is EngineRequestState.DRAINING:
            return False
        before = request.state
        request.on(EngineRequestEvent.ABORT)
        if before is EngineRequestState.FETCHING:
            return True
        (self._running if before is EngineRequestState.RUNNING else self._waiting).remove(request)
        self._drop(request)
        return True

    def fetch_done(self, request_id: RequestId, num_blocks_ok: int, loads: Sequence[KvLoad] = ()) -> None:
        """Record that the request's FetchWanted has ended; the first ``num_blocks_ok`` blocks hold their KV.

        ``loads`` are the sources tried for them.
        """
        wanted = self._fetches.pop(request_id)
        request = self._requests[request_id]
        assert 0 <= num_blocks_ok <= len(wanted.block_ids)
        self.pool.end_transfer(wanted.block_ids)
        request.on(EngineRequestEvent.FETCHED)
        if request.state is EngineRequestState.ABORTED:
            self._drop(request)
            return
        insort(self._running, request, key=_order)
        request.peer = None
        covered = wanted.num_tokens
        if num_blocks_ok < len(wanted.block_ids):
            request.fetch_blocks = 0
            covered = (wanted.first_block + num_blocks_ok) * self._block_tokens
        # The last token is always computed here: the next token is drawn from its logits.
        computed = min(covered, request.most_reused)
        if request.num_preemptions == 0:
            request.num_fetched_tokens = computed - request.num_computed
            request.loads += loads
        request.num_computed = computed
        self._commit_full_blocks(request)

    def step_done(self, sampled: Sampled) -> StepOutcome:
        """Record that the plan is computed; ``sampled`` are the samples of its sampling runs, in order."""
        plan, self._plan = self._plan, None
        assert plan is not None, "no step was planned"
        tokens, logprobs = sampled.tokens, sampled.logprobs
        outputs: list[Output] = []
        committed: list[CommittedBlock] = []
        sample = num_accepted = 0
        for run in plan.runs:
            request, first = run.request, sample
            sample += run.num_samples
            if request.state is not EngineRequestState.RUNNING:
                continue  # aborted while the step ran
            request.num_computed = computed = request.num_computed + run.num_tokens
            if computed >= request.num_scored:
                request.num_scored = computed + 1
            if computed // self._block_tokens > request.num_committed_blocks:
                committed += self._commit_full_blocks(request)
            if not run.samples:
                self.exports.grow(request)
                continue
            outputs.append(self._append(request, tokens[first], logprobs[first]))
            for at, proposed in enumerate(run.draft, first):
                if proposed != tokens[at] or request.state is not EngineRequestState.RUNNING:
                    break
                num_accepted += 1
                request.num_computed += 1  # the KV of the token just appended is there
                committed += self._commit_full_blocks(request)
                outputs.append(self._append(request, tokens[at + 1], logprobs[at + 1]))
            if run.draft:
                self._shorten(request)
        assert len(tokens) == sample, f"{len(tokens)} tokens for {sample} samples"
        return StepOutcome(outputs, committed, num_accepted)

    def _shorten(self, request: EngineRequest) -> None:
        """Give back the blocks behind those of the request's own tokens, which held rejected drafts."""
        kept = self._num_blocks(request.num_tokens)
        self.pool.release(request.block_ids[kept:], used=False)
        del request.block_ids[kept:]

    # ---- the decision

    def schedule(self) -> StepPlan:
        """Decide the next step; `step_done` must follow before the next call."""
        assert self._plan is None, "the last step is not done"
        plan = StepPlan(self.config.max_num_batched_tokens)
        decoding: list[EngineRequest] = []
        prefilling: list[EngineRequest] = []
        for request in self._running:
            (decoding if len(request.sequence) - request.num_computed == 1 else prefilling).append(request)
        self._plan_running(plan, decoding)
        self._plan_running(plan, prefilling)
        if not plan.preempted:  # a request just displaced must not return over the blocks it gave up
            if self._waiting:
                self._admit_waiting(plan)
            if self.config.proposer is not None:
                self._add_drafts(plan, self.config.proposer)
        self._plan = plan
        return plan

    def _add_drafts(self, plan: StepPlan, proposer: NgramProposer) -> None:
        """Let decodes run ahead with drafts, from the budget and room left by all others."""
        for at, run in enumerate(plan.runs):
            request = run.request
            # A grammar's state only moves forward, and a request to be handed over has one token.
            if run.num_tokens != 1 or not run.samples or request.grammar is not None or request.hold_kv:
                continue
            # One token is always drawn, after the drafted ones.
            ahead = min(self.max_tokens - request.num_tokens, request.stop.max_new_tokens - request.num_generated) - 1
            proposed = proposer.propose(request.sequence.tokens, min(plan.budget, ahead))
            missing = self._num_blocks(request.num_tokens + len(proposed)) - len(request.block_ids)
            if 0 < missing <= self.pool.num_available - len(self._running):
                request.block_ids += self.pool.allocate(missing) or ()
            room = len(request.block_ids) * self._block_tokens - request.num_tokens
            if proposed := proposed[:room]:
                plan.add_draft(at, proposed)

    def _plan_running(self, plan: StepPlan, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            if request.state is not EngineRequestState.RUNNING:
                continue  # just preempted for an older one
            if plan.budget == 0:
                return
            if self._make_room(request, plan):
                plan.add_run(request)

    def _make_room(self, request: EngineRequest, plan: StepPlan) -> bool:
        """Allocate blocks for all the request's tokens, preempting the youngest; False if that was ``request``."""
        num_tokens, block_tokens = len(request.sequence), self._block_tokens
        if num_tokens <= len(request.block_ids) * block_tokens:
            return True
        missing = self._num_blocks(num_tokens) - len(request.block_ids)
        while missing > self.pool.num_available:
            if self.pulls.give_way():
                continue
            victim = self._running[-1]
            self._preempt(victim, plan)
            if victim is request:
                return False
        blocks = self.pool.allocate(missing)
        assert blocks is not None
        request.block_ids += blocks
        return True

    def _preempt(self, victim: EngineRequest, plan: StepPlan) -> None:
        plan.drop_runs(victim)
        self.exports.withdraw(victim)
        plan.preempted.append(victim.request_id)
        victim.on(EngineRequestEvent.PREEMPT)
        victim.num_preemptions += 1
        self._running.remove(victim)
        if self.config.moves_preempted:
            plan.displaced += self._own_blocks(victim)
            victim.fetch_blocks = victim.num_committed_blocks
        self._give_back_blocks(victim)
        insort(self._waiting, victim, key=_order)

    def _own_blocks(self, request: EngineRequest) -> list[CommittedBlock]:
        """Return the request's full blocks that no other request has."""
        full = zip(request.block_ids, request.sequence.block_hashes[: request.num_committed_blocks], strict=False)
        return [
            CommittedBlock(request.request_id, index, block, block_hash)
            for index, (block, block_hash) in enumerate(full)
            if self.pool.num_references(block) == 1
        ]

    def _admit_waiting(self, plan: StepPlan) -> None:
        while plan.budget > 0 and (request := next(self._admissible(), None)) is not None:
            if len(self._running) + len(self._fetches) >= self.config.max_num_seqs:
                return
            if not self._take_blocks(request):
                return
            self._waiting.remove(request)
            self._turns.served(request.turn)
            plan.add_hits(request)
            wanted = plan_fetch(request, self._block_tokens) if self._can_fetch else None
            if wanted is not None:
                request.on(EngineRequestEvent.FETCH)
                self.pool.begin_transfer(wanted.block_ids)
                self._fetches[request.request_id] = wanted
                plan.fetches.append(wanted)
            else:
                request.on(EngineRequestEvent.ADMIT)
                insort(self._running, request, key=_order)
                plan.add_run(request)
                if request.peer is not None and self._can_fetch:
                    plan.declined.append(request.peer)
                    request.peer = None

    def _admissible(self) -> Iterator[EngineRequest]:
        """Return waiting requests, in order, except those for which a last part is just being pulled."""
        return (request for request in self._waiting if not self.pulls.is_transferring(request.ahead))

    def _take_blocks(self, request: EngineRequest) -> bool:
        """Match cached blocks and allocate the rest; False (and nothing taken) if too few are left."""
        # At least the last token must be computed, even if every block of the prompt is cached.
        usable = request.most_reused // self._block_tokens
        hits = self.pool.match(request.sequence.block_hashes[:usable])
        missing = self._num_blocks(request.num_tokens) - len(hits)
        # One block per running request, so that the newcomer does not displace it at its next full block.
        while missing + len(self._running) > self.pool.num_available and not self._fits_alone(missing):
            in_sight = self.pool.num_available + self.pulls.num_blocks
            if missing > in_sight or not self.pulls.give_way():
                self.pool.release(hits, used=False, copied=True)
                return False
        fresh = self.pool.allocate(missing)
        assert fresh is not None
        request.block_ids = hits + fresh
        request.num_computed = len(hits) * self._block_tokens
        request.num_committed_blocks = len(hits)
        if request.ahead is not None:
            self.pulls.drop(request.ahead)
        if request.num_hit_tokens is None:
            request.num_hit_tokens = request.num_computed
        return True

    def _fits_alone(self, missing: int) -> bool:
        return not self._running and missing <= self.pool.num_available

    # ---- progress and ends

    def _append(self, request: EngineRequest, token: int, logprobs: TokenLogprobs | None) -> Output:
        request.sequence.append_one(token)
        reason = request.finish_reason(self.max_tokens)
        cached = min(request.num_cached_tokens, request.num_prompt_tokens)
        output = Output(request.request_id, [token], reason, cached_tokens=cached)
        if request.loads:
            output.loads, request.loads = request.loads, []
        if logprobs is not None:
            output.logprobs.append(logprobs)
        if reason is FinishReason.STOP:
            output.stop_token = token
        elif reason is FinishReason.ERROR:
            output.failure = _GRAMMAR_FAILED
        if reason is not None:
            self._finish(request, reason)
        return output

    def _finish(self, request: EngineRequest, reason: FinishReason) -> None:
        request.on(EngineRequestEvent.FINISH)
        self._running.remove(request)
        if reason is FinishReason.HANDED_OVER:
            self.exports.complete(request)
        self._drop(request)

    def _drop(self, request: EngineRequest) -> None:
        self.exports.withdraw(request)
        if request.ahead is not None:
            self.pulls.drop(request.ahead)
        self._give_back_blocks(request)
        del self._requests[request.request_id]

    def _give_back_blocks(self, request: EngineRequest) -> None:
        self.pool.release(request.block_ids, copied=request.handed_over)
        request.block_ids = []
        request.num_computed = 0
        request.num_committed_blocks = 0

    def _commit_full_blocks(self, request: EngineRequest) -> list[CommittedBlock]:
        full = request.num_computed // self._block_tokens
        fresh: list[CommittedBlock] = []
        if full <= request.num_committed_blocks:
            return fresh
        for index in range(request.num_committed_blocks, full):
            block, block_hash = request.block_ids[index], request.sequence.block_hashes[index]
            if self.pool.commit(block, block_hash, request.sequence, index):
                fresh.append(CommittedBlock(request.request_id, index, block, block_hash))
        request.num_committed_blocks = full
        return fresh

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)

    # ---- for outside

    @property
    def num_waiting(self) -> int:
        """Requests without blocks (not yet, or no longer)."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_fetching(self) -> int:
        """Requests whose blocks a transfer writes, including aborted ones."""
        return len(self._fetches)

    @property
    def pending(self) -> tuple[int, int]:
        """The queue as a load figure: tokens of all live requests still to be computed, and their pairs.

        Twice the (query, key) pairs of these tokens: long prompts cost more than their tokens.
        """
        tokens = pairs = 0
        for request in self._requests.values():
            length, computed = len(request.sequence), request.num_computed
            tokens += length - computed
            pairs += length * length - computed * computed
        return tokens, pairs

    @property
    def has_work(self) -> bool:
        """Whether `schedule` could plan something without an event from outside."""
        return bool(self._running or self._waiting)

    def request(self, request_id: RequestId) -> EngineRequest | None:
        return self._requests.get(request_id)

    def check(self) -> None:
        self.pool.check()
        live = self._requests.values()
        fetching = {request.request_id for request in live if request.state in _WITH_TRANSFER}
        assert {request.request_id for request in self._waiting + self._running} | fetching == self._requests.keys()
        assert all(request.state in _QUEUED for request in self._waiting)
        assert all(request.state is EngineRequestState.RUNNING for request in self._running)
        assert fetching == self._fetches.keys()
        assert self._waiting == sorted(self._waiting, key=_order)
        assert self._running == sorted(self._running, key=_order)
        assert len(self._running) + len(self._fetches) <= self.config.max_num_seqs
        self.pulls.check()
        holders = self.exports.references() + self.pulls.references()
        for request in live:
            request.check(self._block_tokens)
            holders.update(request.block_ids)
        assert all(self.pool.num_references(block) == holders[block] for block in range(self.pool.num_blocks))
        moving = {block for wanted in self._fetches.values() for block in wanted.block_ids}
        assert self.pool.num_in_transfer == len(moving) + self.pulls.num_coming

    def __repr__(self) -> str:
        return (
            f"Scheduler({self.num_waiting} waiting, {self.num_fetching} fetching, {self.num_running} running, "
            f"{len(self.exports)} exported, {self.pool!r})"
        )


_QUEUED = (EngineRequestState.WAITING, EngineRequestState.PREEMPTED)
_WITH_TRANSFER = (EngineRequestState.FETCHING, EngineRequestState.DRAINING)


def _order(request: EngineRequest) -> tuple[bool, float, int, int]:
    return request.order
