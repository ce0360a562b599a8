"""The life of a request, decided without I/O: events go in, instructions come out.

    QUEUED --submit--> PREFILLING --first token-----------------> DECODING --finish--> FINISHED
      ^                    |                                        ^ |
      |                    '--handed over--> HANDING_OVER --first---' |
      '------------------------- worker lost -------------------------'

A request carries its tokens so far. When its worker is lost, it returns to QUEUED and is submitted elsewhere with
prompt + generated tokens, where the store supplies most of the KV; so the client sees one unbroken stream. Example: a
prompt of 100 tokens has generated 7 when its decode worker dies. The next submission has 107 tokens with
``num_prompt_tokens`` 100, so ``max_new_tokens``, counted from 100, still ends it at the same place, and its usage is
still 100 + n. Submissions are numbered (``<request>.<n>``) so that late output of an old worker matches no request.

Only consecutive moves are bounded: a new token resets the count, so a long stream outlives any number of workers. Not
every move counts (``Loss``): one caused by a worker's orderly shutdown or refusal is not the request's fault. A request
under which MAX_KILLS workers died in a row is refused, as it would probably kill the next one too. One refused by all
workers waits in the queue like any other, within the queue's time limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np
from msgspec import Struct, field, structs

from tanghulu.conductor.routing.requests import GenerationRequest, PromptLogprobs
from tanghulu.errors import NodeUnavailable, Overloaded, RequestKillsWorkers, TanghuluError
from tanghulu.hashing import Tokens, TokenSequence
from tanghulu.session.outputs import FinishReason, KvLoad, KvSource, Output, TokenLogprobs
from tanghulu.session.sampling import PromptScoring
from tanghulu.types import BlockHash, InstanceId

#: Workers that may die in a row under a request that generates no token.
MAX_KILLS: Final = 3


class Loss(Enum):
    """Ways in which a request loses its worker."""

    DEATH = "the session broke: the worker died, or sends nothing"
    SILENCE = "the engine stands still"
    ORDERLY = "the worker drained and is ending"
    REFUSED = "the worker did not take the request: it is full, or about to end"
    TROUBLE = "the worker is alive and cannot go on with this request"


@dataclass(frozen=True, slots=True)
class MoveLimits:
    """``in_a_row``: moves without a new token; ``max_tokens``: a longer sequence is not moved, 0 means no limit."""

    in_a_row: int = 3
    max_tokens: int = 0


class FlightState(Enum):
    """States of a request."""

    QUEUED = "waits for a free place and a living worker; holds nothing at any worker"
    PREFILLING = "submitted; no token of this submission has come yet, or its hand-over is still to come"
    HANDING_OVER = "its KV is held at the prefill worker; a decode worker was instructed to fetch it and to go on"
    DECODING = "tokens arrive from one worker"
    FINISHED = "ended by a stop condition; the client has everything"
    FAILED = "ended by a typed error"
    ABORTED = "ended by the client"


class FlightEvent(Enum):
    """Events of a request."""

    SUBMITTED = "a worker was chosen and has the request"
    FIRST_TOKEN = "the worker that will decode sent the submission's first token"
    HANDED_OVER = "the prefill worker sent its token and holds the KV"
    FINISH = "a stop condition holds: at the worker, or a stop string in the text"
    WORKER_LOST = "its worker went away or cannot go on, and may be replaced"
    GIVE_UP = "an error that another worker would not mend, too many losses, or waited too long"
    ABORT = "the client hung up or asked for its end"


#: Losses that count as consecutive moves.
_COUNTED = frozenset({Loss.DEATH, Loss.SILENCE, Loss.TROUBLE})
_S, _E = FlightState, FlightEvent
#: Ends of a submission that do not end its request.
_TROUBLE = frozenset({FinishReason.ERROR, FinishReason.ABORTED})
_LIVE = (_S.PREFILLING, _S.HANDING_OVER, _S.DECODING)
_BEFORE_DECODE = (_S.QUEUED, _S.PREFILLING, _S.HANDING_OVER)
TRANSITIONS: dict[tuple[FlightState, FlightEvent], FlightState] = {
    (_S.QUEUED, _E.SUBMITTED): _S.PREFILLING,
    (_S.QUEUED, _E.GIVE_UP): _S.FAILED,
    (_S.QUEUED, _E.ABORT): _S.ABORTED,
    (_S.PREFILLING, _E.FIRST_TOKEN): _S.DECODING,
    (_S.PREFILLING, _E.HANDED_OVER): _S.HANDING_OVER,
    (_S.HANDING_OVER, _E.FIRST_TOKEN): _S.DECODING,
    **{(state, _E.FINISH): _S.FINISHED for state in _LIVE},
    **{(state, _E.WORKER_LOST): _S.QUEUED for state in _LIVE},
    **{(state, _E.GIVE_UP): _S.FAILED for state in _LIVE},
    **{(state, _E.ABORT): _S.ABORTED for state in _LIVE},
}
ENDED = frozenset({FlightState.FINISHED, FlightState.FAILED, FlightState.ABORTED})


def next_state(state: FlightState, event: FlightEvent) -> FlightState:
    """Return the state after ``event``; an unknown pair is a programming error and fails an assertion."""
    following = TRANSITIONS.get((state, event))
    assert following is not None, f"{event.name} cannot happen to a request that is {state.name}"
    return following


class SubmitTo(Struct, frozen=True):
    """Send the request with all its tokens to ``worker`` under ``wire_id``; ``ahead`` has already pulled KV there."""

    worker: InstanceId
    wire_id: str
    hand_over: bool
    source: KvSource | None = None
    ahead: str = ""


class AbortAt(Struct, frozen=True):
    """Have ``worker`` end ``wire_id``, a submission or a pull."""

    worker: InstanceId
    wire_id: str


class Release(Struct, frozen=True):
    """Notify ``worker`` that its export will not be fetched."""

    worker: InstanceId
    export_id: int


class PickPull(Struct, frozen=True):
    """Choose the decode worker to pull from ``source`` during the prefill, if any may; then call ``pull_at``."""

    source: KvSource


class PullTo(Struct, frozen=True):
    """Have ``worker`` pull the tokens' KV from ``source`` under ``name``."""

    worker: InstanceId
    name: str
    source: KvSource


class PickDecode(Struct, frozen=True):
    """Choose a decode worker for the held KV, then call ``decode_at``."""


class Requeue(Struct, frozen=True):
    """Put the request at the front of the queue; its worker was lost for ``reason``, in the way ``loss``."""

    reason: TanghuluError
    loss: Loss


class DeliverTokens(Struct, frozen=True):
    """New tokens for the client. With ``ends_in_stop_token``, the last one counts but is not text."""

    tokens: Sequence[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ends_in_stop_token: bool = False


class DeliverScores(Struct, frozen=True):
    """Log probabilities of further tokens of the prompt."""

    scores: PromptLogprobs


class End(Struct, frozen=True):
    """The request has ended; ``error`` if it failed, ``stop_token`` if a token ended it."""

    reason: FinishReason | None
    error: TanghuluError | None = None
    stop_token: int | None = None


Instruction = (
    SubmitTo | AbortAt | Release | PickPull | PullTo | PickDecode | Requeue | DeliverTokens | DeliverScores | End
)


class Flight:
    """One request in progress: its state, its tokens and its workers."""

    def __init__(self, request: GenerationRequest, limits: MoveLimits) -> None:
        self.request = request
        self.state = FlightState.QUEUED
        self.generated: list[int] = []
        self.worker: InstanceId | None = None
        self.wire_id = ""
        self.source: KvSource | None = None
        self.cached_tokens: int | None = None
        #: What was loaded of the prompt, after that which its first worker had.
        self.loads: Sequence[KvLoad] = ()
        #: Whether its worker knows the cached tokens at the end only; before, it estimates them.
        self.counts_late = False
        #: Counted moves, and deaths of workers, since the last token.
        self.num_moves = 0
        self.num_kills = 0
        self.was_moved = False
        #: Its tokens when it lost its worker; None if none was lost, or tokens have come since.
        self.lost_at: int | None = None
        self.num_submissions = 0
        #: The worker pulling the KV during the prefill, and the pull's name there; it outlives the prefill worker.
        self.ahead: tuple[InstanceId, str] | None = None
        #: First position of the prompt whose log probability has not arrived yet.
        self.num_scored = 0
        self.avoid: frozenset[InstanceId] = frozenset()
        self._limits = limits
        self._hand_over = False
        self._sequence: TokenSequence | None = None

    def __repr__(self) -> str:
        return f"<Flight {self.request.id} {self.state.name} at {self.worker} +{len(self.generated)}>"

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.generated)

    def all_tokens(self) -> Tokens:
        """Return prompt and generated tokens, all of which a new worker needs."""
        if not self.generated:
            return self.request.prompt
        return np.concatenate((self.request.prompt, np.asarray(self.generated, dtype=np.uint32)))

    def sequence(self, empty: Callable[[], TokenSequence]) -> TokenSequence:
        """Return the block hashes of all tokens so far. ``empty`` creates the model's and tenant's empty sequence."""
        if self._sequence is None:
            self._sequence = empty()
        sequence, prompt = self._sequence, self.request.prompt
        if len(sequence) < len(prompt):
            sequence.append(prompt[len(sequence) :])
        if len(sequence) < self.num_tokens:
            sequence.append(self.generated[len(sequence) - len(prompt) :])
        return sequence

    @property
    def known_blocks(self) -> Sequence[BlockHash]:
        """Hashes of the leading blocks, of as many as routing has needed so far."""
        return self._sequence.block_hashes if self._sequence is not None else ()

    def submit(self, prefill: InstanceId, decode: InstanceId) -> list[Instruction]:
        """Send the request to the workers chosen for its phases, maybe the same. A single token needs no hand-over."""
        self._step(FlightEvent.SUBMITTED)
        remaining = self.request.stop.max_new_tokens - len(self.generated)
        self._hand_over = prefill != decode and remaining > 1
        submit = self._submit_to(prefill, self._hand_over, None)
        return [submit] if self._hand_over else [submit, *self._cancel_pull()]

    def on_export(self, source: KvSource) -> list[Instruction]:
        """Have the KV pulled while it is computed, if it will be needed elsewhere."""
        return [PickPull(source)] if self._hand_over else []

    def pull_at(self, worker: InstanceId, source: KvSource) -> list[Instruction]:
        """Have ``worker`` pull the KV computed by the prefill so far, and all that follows.

        KV brought there by an earlier pull from a lost worker is found before that pull is given up.
        """
        assert self.state is FlightState.PREFILLING
        before = self._cancel_pull()
        self.ahead = worker, f"{self.request.id}.{self.num_submissions}.pull"
        return [PullTo(*self.ahead, source), *before]

    def decode_at(self, worker: InstanceId) -> list[Instruction]:
        """Send the request to its decode worker; the prefill worker itself can decode from its own cache."""
        assert self.state is FlightState.HANDING_OVER
        assert self.source is not None
        source, own = self.source, self.source.instance_id == worker
        release: list[Instruction] = self._release() if own else []
        return [self._submit_to(worker, False, None if own else source), *release, *self._cancel_pull()]

    def on_output(self, output: Output) -> list[Instruction]:
        assert output.request_id == self.wire_id
        assert self.state in _LIVE
        finish, source = output.finish, output.source
        is_handed_over = finish is FinishReason.HANDED_OVER
        if finish in _TROUBLE or (is_handed_over and (source is None or not self._hand_over)):
            return self._on_trouble(output)
        if output.tokens and self.scoring is not None:
            return self.fail(NodeUnavailable(f"worker {self.worker} gives no log probabilities of prompts"))
        is_late = finish is not None and (self.counts_late or output.loads) and self.num_submissions == 1
        if is_late or (self.cached_tokens is None and (output.tokens or finish is not None)):
            self.cached_tokens, self.loads = output.cached_tokens, output.loads
        instructions = self._take(output)
        if is_handed_over:
            return instructions + self._on_handed_over(source)
        if output.tokens and self.state is not FlightState.DECODING and not self._hand_over:
            self._step(FlightEvent.FIRST_TOKEN)
            self.source = None
        if finish is not None:
            stop_token = output.stop_token if finish is FinishReason.STOP else None
            end = self._end(FlightEvent.FINISH, finish, stop_token=stop_token)
            return [*instructions, *self._let_go(), end]
        return instructions

    @property
    def scoring(self) -> PromptScoring | None:
        """Part of the prompt's own log probabilities that the next worker must still return."""
        wanted = self.request.scoring
        if wanted is None:
            return None
        start = max(wanted.start, self.num_scored)
        return PromptScoring(start, wanted.num_top) if start < len(self.request.prompt) else None

    @property
    def remainder(self) -> GenerationRequest:
        """The request, with scoring reduced to the log probabilities still missing."""
        return self.request if self.request.scoring is None else structs.replace(self.request, scoring=self.scoring)

    def on_scores(self, scores: PromptLogprobs) -> list[Instruction]:
        """Accept a part of the prompt's log probabilities; parts come in order, before the submission's first token."""
        assert self.state in _LIVE
        if (wanted := self.scoring) is None or scores.position != wanted.start:
            late = f"log probabilities from position {scores.position} on, where {wanted} are expected"
            return self.fail(NodeUnavailable(f"worker {self.worker} gave {late}"))
        self.num_scored = scores.end
        return [DeliverScores(scores)]

    def on_stop_string(self) -> list[Instruction]:
        return self._end_from_here(FlightEvent.FINISH, FinishReason.STOP)

    def abort(self) -> list[Instruction]:
        return self._end_from_here(FlightEvent.ABORT, FinishReason.ABORTED)

    def fail(self, error: TanghuluError) -> list[Instruction]:
        """End the request with an error: it waited too long, or the conductor is shutting down."""
        return [*self._leave(), self._end(FlightEvent.GIVE_UP, None, error)]

    def on_worker_lost(self, error: TanghuluError, loss: Loss) -> list[Instruction]:
        """Try another worker, a bounded number of times: the current one is gone or cannot continue."""
        release = self._release()
        if self.worker is not None:
            self.avoid = self.avoid | {self.worker}
        self.worker, self.wire_id, self._hand_over = None, "", False
        if len(self.generated) >= self.request.stop.max_new_tokens:
            return [*release, *self._cancel_pull(), self._end(FlightEvent.FINISH, FinishReason.LENGTH)]
        self.num_kills += loss is Loss.DEATH
        if loss is not Loss.REFUSED:
            self.lost_at = len(self.generated)
        if (objection := self._objection(error, loss)) is not None:
            return [*release, *self._cancel_pull(), self._end(FlightEvent.GIVE_UP, None, objection)]
        self.num_moves += loss in _COUNTED
        self.was_moved = self.was_moved or loss is not Loss.REFUSED
        self._step(FlightEvent.WORKER_LOST)
        return [*release, Requeue(error, loss)]

    def check(self) -> None:
        assert (self.worker is not None) == (self.state in _LIVE), self
        assert (self.wire_id != "") == (self.worker is not None), self
        assert self.source is None or self.state is FlightState.HANDING_OVER, self
        assert self.ahead is None or self.state in _BEFORE_DECODE, self
        assert len(self.generated) <= self.request.stop.max_new_tokens, self
        assert self.num_moves <= self._limits.in_a_row, self
        assert self.num_kills < MAX_KILLS or self.ended, self
        assert not self._hand_over or self.state is FlightState.PREFILLING, self

    def _step(self, event: FlightEvent) -> None:
        self.state = next_state(self.state, event)

    def _submit_to(self, worker: InstanceId, hand_over: bool, source: KvSource | None) -> SubmitTo:
        self.num_submissions += 1
        self.worker = worker
        self.wire_id = f"{self.request.id}.{self.num_submissions}"
        ahead = ""
        if self.ahead is not None and self.ahead[0] == worker:
            ahead, self.ahead = self.ahead[1], None
        return SubmitTo(worker, self.wire_id, hand_over, source, ahead)

    def _take(self, output: Output) -> list[Instruction]:
        if not output.tokens:
            return []
        self.generated.extend(output.tokens)
        self.lost_at = None
        if not self._hand_over:  # a prefill's single token is no evidence about the requests that are to decode
            self.num_moves = self.num_kills = 0
        hidden = output.finish is FinishReason.STOP and output.tokens[-1] == output.stop_token
        return [DeliverTokens(output.tokens, output.logprobs, hidden)]

    def _on_handed_over(self, source: KvSource | None) -> list[Instruction]:
        self._step(FlightEvent.HANDED_OVER)
        self.source, self._hand_over = source, False
        return [PickDecode()]

    def _on_trouble(self, output: Output) -> list[Instruction]:
        error: TanghuluError = NodeUnavailable(f"worker {self.worker} gave the request up: {output.finish}")
        if output.failure is not None:
            error = output.failure.error
        if error.retryable:
            return self.on_worker_lost(error, Loss.REFUSED if isinstance(error, Overloaded) else Loss.TROUBLE)
        return [*self._let_go(), self._end(FlightEvent.GIVE_UP, None, error)]

    def _objection(self, error: TanghuluError, loss: Loss) -> TanghuluError | None:
        """Return the reason not to move the request any more, if any."""
        if loss is Loss.REFUSED:
            return None
        if self.num_kills >= MAX_KILLS:
            return RequestKillsWorkers(f"{self.num_kills} workers in a row died under the request: {error.message}")
        if loss in _COUNTED and self.num_moves >= self._limits.in_a_row:
            message = f"the request was moved {self.num_moves} times without a new token and failed again"
            return NodeUnavailable(f"{message}: {error.message}")
        if self._limits.max_tokens and self.num_tokens > self._limits.max_tokens:
            longest = (
                f"{self.num_tokens} tokens, more than the {self._limits.max_tokens} up to which requests are moved"
            )
            return NodeUnavailable(f"the request has {longest}: {error.message}")
        return None

    def _release(self) -> list[Instruction]:
        source, self.source = self.source, None
        return [Release(source.instance_id, source.export_id)] if source is not None else []

    def _cancel_pull(self) -> list[Instruction]:
        """End the pull; nothing will continue from it."""
        ahead, self.ahead = self.ahead, None
        return [AbortAt(*ahead)] if ahead is not None else []

    def _let_go(self) -> list[Instruction]:
        return [*self._release(), *self._cancel_pull()]

    def _leave(self) -> list[Instruction]:
        """Release everything the request holds at workers."""
        aborts: list[Instruction] = [AbortAt(self.worker, self.wire_id)] if self.worker is not None else []
        return aborts + self._let_go()

    def _end_from_here(self, event: FlightEvent, reason: FinishReason) -> list[Instruction]:
        return [] if self.ended else [*self._leave(), self._end(event, reason)]

    def _end(
        self,
        event: FlightEvent,
        reason: FinishReason | None,
        error: TanghuluError | None = None,
        stop_token: int | None = None,
    ) -> End:
        self._step(event)
        self.worker, self.wire_id, self._hand_over = None, "", False
        return End(reason, error, stop_token)
