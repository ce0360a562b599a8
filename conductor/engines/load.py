"""The load of one engine server: our own requests at it exactly, those of others from its metrics; and its speed.

Our requests are counted from their submission, so that no report lags behind the dispatcher. What the server's metrics
show beyond them belongs to other clients: with 5 running there and 3 of ours at that moment, 2 are others'.

Speed is measured from outside: the time to a request's first token, from when nothing of ours was ahead of it, and the
gaps between tokens while nothing is prefilled (the shapes of `session.speed`).
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from tanghulu.session.load import WorkerLoad
from tanghulu.session.speed import SpeedMeter, StepWork

#: Prompts are measured whole: their fixed part is not one of steps.
_WHOLE_PROMPTS = 1 << 30
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
        self._free_s = 0.0  # when the last prefill of ours ended
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
        if not one.last_s:
            began_s = max(one.sent_s, self._free_s)
            work = StepWork(one.rest_tokens, one.pairs, num, context)
            self._meter.step(one.rest_tokens + num, 1 + num, now_s - began_s, work)
            self._free_s = now_s
            self._num_started += 1
            self._context += one.num_tokens
        elif num == len(self._ours) and (name == self._pace or self._pace not in self._ours):
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
