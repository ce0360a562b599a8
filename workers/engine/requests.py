"""A request inside the engine: what was asked, how far it is, and the states it passes through.

Knows nothing of scheduling order, tensors or sockets.

    WAITING --admit--> RUNNING --finish--> FINISHED
       |                ^   | \\--abort--> ABORTED
       |--fetch--> FETCHING |
       |             | \\--abort--> DRAINING --fetched--> ABORTED
       |             '--fetched--> RUNNING
    PREEMPTED <--preempt-- RUNNING            (from PREEMPTED everything that WAITING can do)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from msgspec import Struct

from tanghulu.errors import InvalidRequest
from tanghulu.hashing import TokenSequence
from tanghulu.types import RequestId

if TYPE_CHECKING:
    from tanghulu.workers.engine.grammar import Grammar

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
_MAX_WEIGHT = 1e6
MAX_LOGPROB_TOKEN_IDS = 128


class EngineRequestState(Enum):
    """Where a request is."""

    WAITING = "holds no blocks; stands in the queue"
    FETCHING = "holds all its prompt's blocks; a transfer writes the leading missing ones"
    RUNNING = "holds its blocks; every step may compute some of its tokens"
    PREEMPTED = "gave its blocks back to older requests; stands in the queue with its old arrival"
    DRAINING = "aborted while a transfer writes its blocks; keeps them until the transfer ends"
    FINISHED = "ended by itself; its blocks are released or exported"
    ABORTED = "ended from outside; its blocks are released"


class EngineRequestEvent(Enum):
    """What can happen to a request."""

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


class EngineFinishReason(Enum):
    """Why a request ended; the value is what the wire says."""

    STOP = "stop"
    LENGTH = "length"
    HANDED_OVER = "handed_over"
    ABORTED = "aborted"
    GRAMMAR_FAILED = "grammar_failed"


class SamplingParams(Struct, frozen=True):
    """How the next token is drawn. Applied in the order of the fields.

    ``temperature`` 0 is the exact argmax after penalties and bias. ``top_k`` 0 and ``top_p`` 1 and ``min_p`` 0
    are off. ``seed`` names the random stream; equal seeds give equal text whatever else is in the batch.
    ``logprobs`` None is off, 0 the chosen token only, n the n most likely too, and then ``logprob_token_ids``.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require(self.temperature >= 0, f"temperature is {self.temperature}; it must be 0 or more")
        _require(self.top_k >= 0, f"top_k is {self.top_k}; it must be 0 (off) or more")
        _require(0 < self.top_p <= 1, f"top_p is {self.top_p}; it must be above 0 and at most 1")
        _require(0 <= self.min_p <= 1, f"min_p is {self.min_p}; it must be between 0 and 1")
        _require(self.repetition_penalty > 0, f"repetition_penalty is {self.repetition_penalty}; it must be above 0")
        _require(len(self.logit_bias) <= MAX_LOGIT_BIAS, f"logit_bias has more than {MAX_LOGIT_BIAS} entries")
        logprobs = self.logprobs
        _require(logprobs is None or 0 <= logprobs <= MAX_LOGPROBS, f"logprobs is {logprobs}; at most {MAX_LOGPROBS}")
        asked, most = len(self.logprob_token_ids), MAX_LOGPROB_TOKEN_IDS
        _require(asked <= most, f"logprob_token_ids has {asked} tokens; at most {most} are told of")

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class StopParams(Struct, frozen=True):
    """When generation ends. Counts are of tokens generated beyond the original prompt, wherever it was.

    ``eos_ids`` end the text unless ``ignore_eos``; ``stop_token_ids`` always do. Neither is drawn before
    ``min_tokens`` tokens exist. (Stop strings are the conductor's: the worker sees no text.) A text under a grammar
    ends with the first of either that is drawn, whatever else is said here: nothing may follow the end of a grammar.
    """

    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0

    def __post_init__(self) -> None:
        _require(self.max_new_tokens >= 1, f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        _require(self.min_tokens >= 0, f"min_tokens is {self.min_tokens}; it must be 0 or more")

    @property
    def ending_ids(self) -> frozenset[int]:
        """Every token that ends the text."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | self.eos_ids

    def banned_ids(self, num_generated: int) -> frozenset[int]:
        """Tokens that must not be drawn as the next one, of which ``num_generated`` exist already."""
        return self.ending_ids if num_generated < self.min_tokens else frozenset()


class PromptScoring(Struct, frozen=True):
    """The prompt's own log probabilities that a request wants: from position ``start`` on, which is at least 1."""

    start: int
    num_top: int = 0

    def __post_init__(self) -> None:
        _require(self.start >= 1, "the first token of a prompt has no log probability: start from position 1")
        top = self.num_top
        _require(0 <= top <= MAX_LOGPROBS, f"{top} most likely tokens beside each of a prompt; at most {MAX_LOGPROBS}")


class PeerExport(Struct, frozen=True):
    """KV that another worker keeps for this request: its first ``num_tokens`` tokens, partial last block included.

    ``instance`` and ``export_id`` are opaque here; the connector resolves them.
    """

    instance: str
    export_id: str
    num_tokens: int


class PeerPrefix(Struct, frozen=True):
    """A worker whose prefix cache had the prompt's first ``num_blocks`` blocks; ``instance`` as in `PeerExport`."""

    instance: str
    num_blocks: int


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request and its progress. The scheduler alone changes the fields below ``arrival``.

    ``sequence`` holds all tokens so far; the first ``num_prompt_tokens`` are the original prompt, further ones
    were generated, here or elsewhere before the request was resubmitted. ``hold_kv`` ends the request after
    its first sampled token and keeps its blocks for a decode worker. ``fetch_blocks`` bounds how many leading
    blocks may be looked for outside (None: all, 0: none); ``holder`` is asked before the store. ``grammar`` bounds
    what may be generated. ``scoring`` asks for log probabilities of the prompt, of which those in front of position
    ``num_scored`` have been computed. ``client`` is who takes turns with others, ``weight`` of them for each of
    another's. A request that was ``moved`` from a lost worker goes ahead of new ones. ``ahead`` names the pull that has
    brought some of its KV already.
    """

    request_id: RequestId
    sequence: TokenSequence
    num_prompt_tokens: int
    sampling: SamplingParams
    stop: StopParams
    hold_kv: bool = False
    priority: int = 0
    fetch_blocks: int | None = None
    peer: PeerExport | None = None
    holder: PeerPrefix | None = None
    grammar: Grammar | None = None
    client: str = ""
    moved: bool = False
    ahead: RequestId | None = None
    weight: float = 1.0
    scoring: PromptScoring | None = None

    arrival: int = -1
    turn: float = 0.0
    state: EngineRequestState = EngineRequestState.WAITING
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_committed_blocks: int = 0
    num_hit_tokens: int | None = None
    num_fetched_tokens: int = 0
    num_preemptions: int = 0
    num_scored: int = 0
    ending_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.ending_ids = self.stop.ending_ids  # looked at for every token
        _require(len(self.sequence) > 0, f"request {self.request_id} has no tokens")
        _require(
            0 < self.num_prompt_tokens <= len(self.sequence),
            f"request {self.request_id} says {self.num_prompt_tokens} prompt tokens of {len(self.sequence)}",
        )
        _require(0 < self.weight <= _MAX_WEIGHT, f"request {self.request_id} has a client of weight {self.weight}")

    def on(self, event: EngineRequestEvent) -> None:
        """Move along the table; asserts that the pair is in it."""
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
    def num_pending(self) -> int:
        """Tokens whose KV is not computed yet; 1 while decoding."""
        return len(self.sequence) - self.num_computed

    @property
    def owed_position(self) -> int | None:
        """The first position of the prompt whose log probability is still to be computed; None if there is none."""
        if self.scoring is None:
            return None
        position = max(self.scoring.start, self.num_scored)
        return position if position < self.num_prompt_tokens else None

    @property
    def most_reused(self) -> int:
        """Leading tokens whose KV need not be computed here: their logits are not needed."""
        owed = self.owed_position
        return self.num_tokens - 1 if owed is None else owed - 1

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that this worker did not have to compute: found here at first admission, or fetched."""
        return (self.num_hit_tokens or 0) + self.num_fetched_tokens

    @property
    def order(self) -> tuple[int, bool, float, int]:
        """Smaller goes first: higher priority, then what was moved, then the client's turn, then earlier arrival."""
        return (-self.priority, not self.moved, self.turn, self.arrival)

    def finish_reason(self, max_tokens: int) -> EngineFinishReason | None:
        """Whether the last, generated token ends the request; ``max_tokens`` bounds the whole sequence."""
        stop = self.stop
        last, num_tokens = self.sequence.last, len(self.sequence)
        num_generated = num_tokens - self.num_prompt_tokens
        if self.grammar is not None:
            if self.grammar.failure is not None:
                return EngineFinishReason.GRAMMAR_FAILED
            ended = last in stop.eos_ids | stop.stop_token_ids
        else:
            ended = last in self.ending_ids and num_generated > stop.min_tokens
        if ended:
            return EngineFinishReason.STOP
        if num_generated >= stop.max_new_tokens or num_tokens >= max_tokens:
            return EngineFinishReason.LENGTH
        return EngineFinishReason.HANDED_OVER if self.hold_kv else None

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
