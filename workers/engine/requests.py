"""A request inside the engine: its parameters, its progress, and its states.

Independent of scheduling order, tensors and sockets.

    WAITING --admit--> RUNNING --finish--> FINISHED
       |                ^   | \\--abort--> ABORTED
       |--fetch--> FETCHING |
       |             | \\--abort--> DRAINING --fetched--> ABORTED
       |             '--fetched--> RUNNING
    PREEMPTED <--preempt-- RUNNING            (from PREEMPTED every transition of WAITING)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from tanghulu.errors import InvalidRequest
from tanghulu.hashing import TokenSequence
from tanghulu.session.outputs import FinishReason, KvLoad, KvSource, PrefixHolder
from tanghulu.session.sampling import PromptScoring, Sampling, StopRule
from tanghulu.types import RequestId

if TYPE_CHECKING:
    from tanghulu.workers.engine.grammar import Grammar

_MAX_WEIGHT = 1e6


class EngineRequestState(Enum):
    """State of a request."""

    WAITING = "holds no blocks; stands in the queue"
    FETCHING = "holds all its prompt's blocks; a transfer writes the leading missing ones"
    RUNNING = "holds its blocks; every step may compute some of its tokens"
    PREEMPTED = "gave its blocks back to older requests; stands in the queue with its old arrival"
    DRAINING = "aborted while a transfer writes its blocks; keeps them until the transfer ends"
    FINISHED = "ended by itself; its blocks are released or exported"
    ABORTED = "ended from outside; its blocks are released"


class EngineRequestEvent(Enum):
    """Event of a request."""

    ADMIT = "got its blocks and has something to compute"
    FETCH = "got its blocks and waits for a transfer"
    FETCHED = "the transfer ended, with as many blocks as arrived"
    PREEMPT = "an older request needs the blocks"
    FINISH = "a stop condition holds"
    ABORT = "the caller no longer wants it"


_S, _E = EngineRequestState, EngineRequestEvent
TRANSITIONS: dict[tuple[EngineRequestState, EngineRequestEvent], EngineRequestState] = {
    (_S.WAITING, _E.ADMIT): _S.RUNNING,
    (_S.WAITING, _E.FETCH): _S.FETCHING,
    (_S.WAITING, _E.ABORT): _S.ABORTED,
    (_S.FETCHING, _E.FETCHED): _S.RUNNING,
    (_S.FETCHING, _E.ABORT): _S.DRAINING,
    (_S.DRAINING, _E.FETCHED): _S.ABORTED,
    (_S.RUNNING, _E.PREEMPT): _S.PREEMPTED,
    (_S.RUNNING, _E.FINISH): _S.FINISHED,
    (_S.RUNNING, _E.ABORT): _S.ABORTED,
    (_S.PREEMPTED, _E.ADMIT): _S.RUNNING,
    (_S.PREEMPTED, _E.FETCH): _S.FETCHING,
    (_S.PREEMPTED, _E.ABORT): _S.ABORTED,
}


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request and its progress. The scheduler alone changes the fields below ``arrival``.

    ``sequence`` holds all tokens so far; the first ``num_prompt_tokens`` are the original prompt, further ones were
    generated, here or elsewhere before the request was resubmitted. ``hold_kv`` ends the request after its first
    sampled token and keeps its blocks for a decode worker. ``fetch_blocks`` bounds the leading blocks to look for
    outside (None: all, 0: none); ``holder`` is tried before the store. ``grammar`` bounds what may be generated.
    ``scoring`` requests log probabilities of the prompt, of which those before position ``num_scored`` have been
    computed. ``client`` takes turns with others, ``weight`` of them for each of another's. A request ``moved`` from a
    lost worker precedes new ones. ``ahead`` names the pull that has already fetched some of its KV; then, or
    with a ``peer``, it was ``handed_over``. ``eos_ids`` end a text, ``ending_ids`` are all tokens that end this one.
    """

    request_id: RequestId
    sequence: TokenSequence
    num_prompt_tokens: int
    sampling: Sampling
    stop: StopRule
    hold_kv: bool = False
    priority: int = 0
    fetch_blocks: int | None = None
    peer: KvSource | None = None
    holder: PrefixHolder | None = None
    grammar: Grammar | None = None
    client: str = ""
    moved: bool = False
    ahead: RequestId | None = None
    weight: float = 1.0
    scoring: PromptScoring | None = None
    eos_ids: frozenset[int] = frozenset()

    arrival: int = -1
    turn: float = 0.0
    state: EngineRequestState = EngineRequestState.WAITING
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_committed_blocks: int = 0
    num_hit_tokens: int | None = None
    num_fetched_tokens: int = 0
    loads: list[KvLoad] = field(default_factory=list)
    num_preemptions: int = 0
    num_scored: int = 0
    ending_ids: frozenset[int] = frozenset()
    handed_over: bool = False

    def __post_init__(self) -> None:
        self.handed_over = self.peer is not None or self.ahead is not None
        self.sampling.validate()
        self.stop.validate()
        if self.scoring is not None:
            self.scoring.validate()
        stop_ids = frozenset(self.stop.stop_token_ids)
        self.ending_ids = stop_ids if self.stop.ignore_eos else stop_ids | self.eos_ids
        _require(len(self.sequence) > 0, f"request {self.request_id} has no tokens")
        _require(
            0 < self.num_prompt_tokens <= len(self.sequence),
            f"request {self.request_id} claims {self.num_prompt_tokens} prompt tokens but has {len(self.sequence)}",
        )
        _require(
            0 < self.weight <= _MAX_WEIGHT,
            f"request {self.request_id} has client weight {self.weight}; at most {_MAX_WEIGHT:g}",
        )

    def on(self, event: EngineRequestEvent) -> None:
        """Apply an event by the table; asserts that the pair is in it."""
        following = TRANSITIONS.get((self.state, event))
        assert following is not None, f"request {self.request_id}: {event.name} in state {self.state.name}"
        self.state = following

    @property
    def num_tokens(self) -> int:
        return len(self.sequence)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, here and before."""
        return len(self.sequence) - self.num_prompt_tokens

    @property
    def first_unscored(self) -> int | None:
        """First position of the prompt whose log probability is still to be computed; None if there is none."""
        if self.scoring is None:
            return None
        position = max(self.scoring.start, self.num_scored)
        return position if position < self.num_prompt_tokens else None

    @property
    def most_reused(self) -> int:
        """Leading tokens whose KV need not be computed here: their logits are not needed."""
        unscored = self.first_unscored
        return self.num_tokens - 1 if unscored is None else unscored - 1

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that this worker did not have to compute: found here at first admission, or fetched."""
        return (self.num_hit_tokens or 0) + self.num_fetched_tokens

    @property
    def order(self) -> tuple[bool, float, int, int]:
        """Smaller goes first: moved requests, then the client's turn, then higher priority, then earlier arrival."""
        return (not self.moved, self.turn, -self.priority, self.arrival)

    def banned_ids(self, num_generated: int) -> frozenset[int]:
        """Return tokens that must not be drawn as the next one, after ``num_generated`` existing ones."""
        return self.ending_ids if num_generated < self.stop.min_tokens else frozenset()

    def finish_reason(self, max_tokens: int) -> FinishReason | None:
        """Return why the last, generated token ends the request, or None; ``max_tokens`` bounds the whole sequence."""
        stop = self.stop
        last, num_tokens = self.sequence.last, len(self.sequence)
        num_generated = num_tokens - self.num_prompt_tokens
        if self.grammar is not None:
            if self.grammar.failure is not None:
                return FinishReason.ERROR
            ended = last in self.eos_ids or last in stop.stop_token_ids
        else:
            ended = last in self.ending_ids and num_generated > stop.min_tokens
        if ended:
            return FinishReason.STOP
        if num_generated >= stop.max_new_tokens or num_tokens >= max_tokens:
            return FinishReason.LENGTH
        return FinishReason.HANDED_OVER if self.hold_kv else None

    def check(self, block_tokens: int) -> None:
        if self.state in (EngineRequestState.WAITING, EngineRequestState.PREEMPTED):
            assert not self.block_ids
            assert self.num_computed == 0
            return
        assert 0 <= self.num_computed < self.num_tokens
        assert self.num_computed <= len(self.block_ids) * block_tokens
        assert self.num_committed_blocks == self.num_computed // block_tokens
        assert len(set(self.block_ids)) == len(self.block_ids)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequest(message)
