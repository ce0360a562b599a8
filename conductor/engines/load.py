"""The load of one engine server: our own requests at it exactly, those of others from its metrics; and its speed.

Our requests are counted from their submission, so that no report lags behind the dispatcher. What the server's metrics
show beyond them belongs to other clients: with 5 running there and 3 of ours at that moment, 2 are others'.

Speed is measured from outside: the time to a request's first token, from when nothing of ours was ahead of it, and the
gaps between tokens while nothing is prefilled (the shapes of `session.speed`). Prompts computed in one step have their
first tokens together, and that time is one of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from tanghulu.session.load import WorkerLoad
from tanghulu.session.speed import SpeedMeter, StepWork

#: Prompts are measured whole: their fixed part is not one of steps.
_WHOLE_PROMPTS = 1 << 30
#: First tokens this soon after another's, as a share of its time, were computed in the same step.
_SAME_STEP = 0.1
#: Free blocks of a server that does not state how many it has.
_UNKNOWN_BLOCKS = 1 << 31


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """A server's metrics: requests, the share of its cache in use, and ``progress``, which changes with its steps."""

    num_running: int = 0
    num_waiting: int = 0
    usage: float = 0.0
    progress: object = None


@dataclass(slots=True)
class Submitted:
    """One of our requests: ``rest_tokens`` of ``num_tokens`` are to be computed."""

    num_tokens: int
    rest_tokens: int
    sent_s: float
    last_s: float = 0.0  # of its last tokens; 0 before the first

    @property
    def pairs(self) -> int:
        """Pairs of tokens that attend to each other in the computed part."""
        return self.num_tokens**2 - (self.num_tokens - self.rest_tokens) ** 2


@dataclass(slots=True)
class _Prefills:
    """Prompts computed from ``began_s`` to ``ended_s``, beside ``num`` requests with ``context`` tokens in all."""

    began_s: float
    ended_s: float
    num: int
    context: int
    num_prompts: int = 0
    rest_tokens: int = 0
    pairs: int = 0

    def lasts(self, now_s: float) -> bool:
        """Return whether a first token at ``now_s`` belongs to them."""
        return now_s - self.ended_s <= _SAME_STEP * (self.ended_s - self.began_s)

    def measured(self, meter: SpeedMeter) -> None:
        """Feed the measurement to ``meter``."""
        work = StepWork(self.rest_tokens, self.pairs, self.num, self.context)
        num = self.num_prompts + self.num
        meter.step(self.rest_tokens + self.num, num, self.ended_s - self.began_s, work)


class EngineBook:
    """Requests in progress, and the last figures."""

    def __init__(self, num_blocks: int, block_tokens: int, max_num_seqs: int = 0) -> None:
        self.num_submits = 0
        self._num_blocks, self._block_tokens, self._max_num_seqs = num_blocks, block_tokens, max_num_seqs
        self._ours: dict[str, Submitted] = {}
        self._usage = 0.0
        self._others_running = self._others_waiting = 0
        self._num_started = self._context = 0  # requests with tokens, and all their tokens
        self._pace = ""
        self._prefills = _Prefills(0.0, 0.0, 0, 0)  # the last ones of ours
        self._meter = SpeedMeter(_WHOLE_PROMPTS, reads_peers=False)

    def __len__(self) -> int:
        return len(self._ours)

    def add(self, name: str, num_tokens: int, rest_tokens: int, now_s: float) -> int:
        """Add a request; return its number."""
        self._ours[name] = Submitted(num_tokens, max(1, rest_tokens), now_s)
        self.num_submits += 1
        return self.num_submits

    def tokens(self, name: str, num_tokens: int, now_s: float) -> None:
        """Note new tokens of a request."""
        one = self._ours.get(name)
        if one is None:
            return
        num, context = self._num_started, self._context
        before = self._prefills
        if before.num_prompts and not (before.lasts(now_s) and (one.last_s or one.sent_s < before.ended_s)):
            before.measured(self._meter)
            before.num_prompts = 0
        if not one.last_s:
            if not before.num_prompts:
                self._prefills = _Prefills(max(one.sent_s, before.ended_s), now_s, num, context)
            self._prefills.num_prompts += 1
            self._prefills.rest_tokens += one.rest_tokens
            self._prefills.pairs += one.pairs
            self._num_started += 1
            self._context += one.num_tokens
        elif (
            num == len(self._ours)  # no prompt is computed, and none was since the last token
            and one.last_s >= self._prefills.ended_s
            and (name == self._pace or self._pace not in self._ours)
        ):
            self._pace = name  # one of them is the pace of all
            gap_s = (now_s - one.last_s) / num_tokens
            self._meter.step(num, num, gap_s, StepWork(decode_sequences=num, decode_context=context))
        one.last_s = now_s
        one.num_tokens += num_tokens
        self._context += num_tokens

    def end(self, name: str) -> None:
        """Note the end of a request; no error if it has ended."""
        one = self._ours.pop(name, None)
        if one is not None and one.last_s:
            self._num_started -= 1
            self._context -= one.num_tokens

    def figures(self, seen: EngineFigures) -> None:
        """Note the server's own figures."""
        self._usage = min(max(seen.usage, 0.0), 1.0)
        others = max(0, seen.num_running + seen.num_waiting - len(self))
        self._others_running = min(others, max(0, seen.num_running - self._num_started))
        self._others_waiting = others - self._others_running

    def load(self) -> WorkerLoad:
        """Return the load, which includes all submissions so far."""
        waiting = [each for each in self._ours.values() if not each.last_s]
        ours = sum(each.num_tokens for each in self._ours.values()) // self._block_tokens
        in_use = min(max(round(self._num_blocks * self._usage), ours), self._num_blocks)
        return structs.replace(
            self._meter.speeds,
            num_running=len(self._ours) - len(waiting) + self._others_running,
            num_waiting=len(waiting) + self._others_waiting,
            blocks_total=self._num_blocks,
            blocks_free=self._num_blocks - in_use if self._num_blocks else _UNKNOWN_BLOCKS,
            prefill_tokens_waiting=sum(each.rest_tokens for each in waiting),
            prefill_pairs_waiting=sum(each.pairs for each in waiting),
            max_num_seqs=self._max_num_seqs,
        )

    def check(self) -> None:
        started = [each for each in self._ours.values() if each.last_s]
        assert self._num_started == len(started)
        assert self._context == sum(each.num_tokens for each in started)
