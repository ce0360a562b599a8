"""A step as plain data: the scheduler's plan, and its result: samples, outputs, scores of prompts, timings."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from tanghulu.session.outputs import KvSource, Output, PrefixHolder, TokenLogprobs
from tanghulu.session.speed import NO_WORK, StepWork
from tanghulu.types import BlockHash, RequestId
from tanghulu.workers.engine.block_pool import KvEvent
from tanghulu.workers.engine.requests import EngineRequest


class ScheduledRun(Struct, frozen=True):
    """Compute tokens ``start .. start+num_tokens`` of ``request``; ``samples`` if that reaches its last token.

    A sampling run may have a ``draft``: tokens that may follow, computed after its own. A token is then drawn after its
    last and after each of the draft, as if all before it were accepted.
    """

    request: EngineRequest
    start: int
    num_tokens: int
    samples: bool
    draft: tuple[int, ...] = ()

    @property
    def num_samples(self) -> int:
        """Number of drawn tokens."""
        return 1 + len(self.draft) if self.samples else 0


class FetchWanted(Struct, frozen=True):
    """Write KV into ``block_ids``, the prompt's blocks from number ``first_block`` on, then call `fetch_done`.

    ``num_tokens`` counts from the prompt's first token: the last block is partial if it is not a multiple of the block
    size, which happens only with ``peer``. ``block_hashes`` are those of the full blocks among them. The blocks belong
    to the transfer until `fetch_done`, even if the request is aborted meanwhile. Blocks that ``peer`` does not deliver,
    or all without one, come from ``holder``, if there is one, and from the store.

    A pull (`pulls`) is fetched from ``peer`` alone, as its export grows, and soon ends once ``ending`` is set.
    """

    request_id: RequestId
    first_block: int
    block_ids: tuple[int, ...]
    block_hashes: tuple[BlockHash, ...]
    num_tokens: int
    peer: KvSource | None
    holder: PrefixHolder | None = None
    ending: threading.Event | None = None


class StepPlan(Struct):
    """One step: what to compute, which requests it preempts, and what to fetch meanwhile.

    Only the scheduler changes it, while it decides. ``declined``: exports of other workers that need not be fetched,
    because all of it was found here. ``reused``: cached blocks that newly admitted requests found here. ``displaced``:
    full blocks held only by preempted requests, whose bytes stay until the step is computed; empty if no sink would
    keep them. ``num_tokens`` are computed, and ``num_drafted`` of drafts in addition; ``budget`` is the remainder of
    the step's tokens.
    """

    budget: int
    runs: list[ScheduledRun] = []
    preempted: list[RequestId] = []
    fetches: list[FetchWanted] = []
    declined: list[KvSource] = []
    reused: list[CommittedBlock] = []
    displaced: list[CommittedBlock] = []
    num_tokens: int = 0
    num_drafted: int = 0

    @property
    def work(self) -> StepWork:
        tokens = pairs = sequences = context = 0
        for run in self.runs:
            if run.num_tokens == 1 and run.samples:
                sequences, context = sequences + 1, context + run.start
            else:
                end = run.start + run.num_tokens
                tokens, pairs = tokens + run.num_tokens, pairs + end * end - run.start * run.start
        return StepWork(tokens, pairs, sequences, context)

    def add_hits(self, request: EngineRequest) -> None:
        """Note the blocks that the just admitted ``request`` found here; not its own: pulled, or from before."""
        if request.num_preemptions == 0 and request.ahead is None:
            found = zip(request.block_ids, request.sequence.block_hashes, strict=False)
            for index, (block, block_hash) in zip(range(request.num_committed_blocks), found, strict=False):
                self.reused.append(CommittedBlock(request.request_id, index, block, block_hash))

    def add_run(self, request: EngineRequest) -> None:
        """Plan as many of the pending tokens as the budget allows."""
        start, budget = request.num_computed, self.budget
        pending = len(request.sequence) - start
        count = pending if pending < budget else budget
        self.budget = budget - count
        self.num_tokens += count
        self.runs.append(ScheduledRun(request, start, count, count == pending))

    def add_draft(self, at: int, proposed: tuple[int, ...]) -> None:
        """Have run number ``at`` compute ``proposed`` after its own tokens."""
        self.budget -= len(proposed)
        self.num_drafted += len(proposed)
        self.runs[at] = structs.replace(self.runs[at], draft=proposed)

    def drop_runs(self, request: EngineRequest) -> None:
        """Take back the plan for ``request`` (a young decode, planned before an older prefill)."""
        dropped = sum(run.num_tokens for run in self.runs if run.request is request)
        self.budget += dropped
        self.num_tokens -= dropped
        self.runs = [run for run in self.runs if run.request is not request]


class CommittedBlock(Struct, frozen=True):
    """A block that became full and can be matched: number ``index`` of its request, new to this worker."""

    request_id: RequestId
    index: int
    block_id: int
    block_hash: BlockHash


def plan_fetch(request: EngineRequest, block_tokens: int) -> FetchWanted | None:
    """Plan the fetch of a just admitted request; None if nothing is missing or allowed.

    ``request.num_computed`` tokens (whole blocks) were found here. From a peer's export everything is fetched,
    including the partial last block; from the store whole blocks, and never the one with the last token, so that
    something remains to compute logits from; nor, from either, one with tokens whose logits are requested.
    """
    usable = request.most_reused // block_tokens
    if request.peer is not None:
        num_tokens = min(request.peer.num_tokens, request.num_tokens)
        if request.first_unscored is not None:
            num_tokens = min(num_tokens, block_tokens * usable)
    else:
        num_tokens = block_tokens * (usable if request.fetch_blocks is None else min(usable, request.fetch_blocks))
    start, end = request.num_computed // block_tokens, -(-num_tokens // block_tokens)
    if end <= start:
        return None
    return FetchWanted(
        request_id=request.request_id,
        first_block=start,
        block_ids=tuple(request.block_ids[start:end]),
        block_hashes=tuple(request.sequence.block_hashes[start : num_tokens // block_tokens]),
        num_tokens=num_tokens,
        peer=request.peer,
        holder=request.holder,
    )


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


@dataclass(frozen=True, slots=True, eq=False)
class PromptScoreArrays:
    """Log probabilities of the prompt tokens ``position .. position + n`` of a request, whose ids are ``targets``.

    That of token p comes from the logits of token p - 1. So a request for them from position s on has to compute
    everything from token s - 1 on, whatever is cached (`EngineRequest.most_reused`), and the run of tokens ``a .. b``
    of a step scores the positions ``a + 1 .. b``. Example: a prompt of 10 tokens, requested from 4 on, blocks of 2: two
    tokens are reused, the runs 2 .. 6 and 6 .. 10 score 4 .. 6 and 7 .. 9; the first new token is drawn from the logits
    of token 9. The code that computes the logits writes into the arrays.

    ``logprobs`` float32 [n]; ``ranks`` uint32 [n], 1 where no token was more likely; ``top_ids`` uint32 and
    ``top_logprobs`` float32 [n, num_top], best first; ``named_logprobs`` float32 [n, len(named)].
    """

    request_id: RequestId
    position: int
    targets: npt.NDArray[np.uint32]
    named: tuple[int, ...]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.uint32]
    top_ids: npt.NDArray[np.uint32]
    top_logprobs: npt.NDArray[np.float32]
    named_logprobs: npt.NDArray[np.float32]

    @classmethod
    def of(cls, run: ScheduledRun, vocab: int) -> Self | None:
        """Make room for the scores that ``run`` must compute; None if there are none."""
        request = run.request
        first_unscored = request.first_unscored
        if first_unscored is None or request.scoring is None:
            return None
        first, end = max(first_unscored, run.start + 1), min(run.start + run.num_tokens + 1, request.num_prompt_tokens)
        count = end - first
        if count <= 0:
            return None
        num_top, named = min(request.scoring.num_top, vocab), request.sampling.logprob_token_ids
        return cls(
            request.request_id,
            first,
            request.sequence.tokens[first:end],
            named,
            np.zeros(count, np.float32),
            np.zeros(count, np.uint32),
            np.zeros((count, num_top), np.uint32),
            np.zeros((count, num_top), np.float32),
            np.zeros((count, len(named)), np.float32),
        )

    @property
    def end(self) -> int:
        """Position after the last one."""
        return self.position + len(self.targets)

    @property
    def num_top(self) -> int:
        return int(self.top_ids.shape[1])

    def part(self, start: int, end: int) -> PromptScoreArrays:
        """Return the scores number ``start .. end`` of these; the arrays are shared."""
        return PromptScoreArrays(
            self.request_id,
            self.position + start,
            self.targets[start:end],
            self.named,
            self.logprobs[start:end],
            self.ranks[start:end],
            self.top_ids[start:end],
            self.top_logprobs[start:end],
            self.named_logprobs[start:end],
        )
