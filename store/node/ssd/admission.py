"""Admission of evicted chunks to the SSD: a pure decision, based on evictions and the results of writes.

Not everything is worth a write: flash wears out, and a queue that falls behind must not slow puts down. A chunk is
dropped instead of written for the reasons below; the first one that applies counts. After a failed write (disk full,
I/O error) nothing is written for a while, 1 s at first, twice as long after each further failure, at most 30 s; one
success ends that.

``reused`` admits chunks that were read while in memory, or whose key was evicted before and is still remembered (the
last 65,536 keys): prompts used once never reach the disk.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from tanghulu.types import ChunkKey

MODES = ("all", "reused")
MAX_REMEMBERED = 1 << 16
#: A chunk that ends sooner than this is not worth a write.
MIN_LEFT_S = 1.0
_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 30.0
#: Seconds of the write rate that may be used at once.
_BURST_S = 1.0


class Demotion(Enum):
    """The outcome for an evicted chunk; the values are the label of a metric."""

    ADMIT = "admitted"
    TOO_LARGE = "too_large"
    ENDS_SOON = "ends_soon"
    PAUSED = "paused"
    NOT_REUSED = "not_reused"
    QUEUE_FULL = "queue_full"
    OVER_RATE = "over_rate"
    NO_ROOM = "no_room"

    __hash__ = object.__hash__  # see Pin


@dataclass(frozen=True, slots=True)
class EvictedChunk:
    """A chunk that leaves memory. ``left_s`` None: it has no end; ``queue_bytes``: the largest write that fits now.

    ``pinned``: hard; it leaves memory only because the node stops, and neither its use nor the rate of writes counts.
    """

    key: ChunkKey
    record_bytes: int
    num_hits: int
    left_s: float | None
    queue_bytes: int
    pinned: bool = False


class TierAdmission:
    """``decide`` for each evicted chunk, ``write_ended`` for each write. Times are the caller's, monotonic seconds."""

    def __init__(self, mode: str, max_record_bytes: int, write_bytes_per_s: int = 0) -> None:
        assert mode in MODES, f"{mode} is none of {MODES}"
        self.max_record_bytes = max_record_bytes
        self._mode = mode
        self._rate = write_bytes_per_s
        self._allowance = write_bytes_per_s * _BURST_S
        self._filled_s: float | None = None
        self._paused_until_s = float("-inf")
        self._pause_s = 0.0
        self._remembered: OrderedDict[ChunkKey, None] = OrderedDict()

    def decide(self, chunk: EvictedChunk, now_s: float) -> Demotion:
        """Return whether to write ``chunk``; ADMIT uses up the rate's allowance."""
        seen_before = self._remember(chunk.key) if self._mode == "reused" else True
        if chunk.record_bytes > self.max_record_bytes:
            return Demotion.TOO_LARGE
        if chunk.left_s is not None and chunk.left_s < MIN_LEFT_S:
            return Demotion.ENDS_SOON
        if now_s < self._paused_until_s:
            return Demotion.PAUSED
        if not (seen_before or chunk.num_hits or chunk.pinned):
            return Demotion.NOT_REUSED
        if chunk.record_bytes > chunk.queue_bytes:
            return Demotion.QUEUE_FULL
        return Demotion.ADMIT if chunk.pinned or self._spend(chunk.record_bytes, now_s) else Demotion.OVER_RATE

    def write_ended(self, ok: bool, now_s: float) -> None:
        """Record the end of a write."""
        if ok:
            self._pause_s = 0.0
        elif now_s >= self._paused_until_s:  # of concurrent writes the first counts
            self._pause_s = min(max(self._pause_s * 2, _FIRST_PAUSE_S), _MAX_PAUSE_S)
            self._paused_until_s = now_s + self._pause_s

    def _remember(self, key: ChunkKey) -> bool:
        known = key in self._remembered
        self._remembered[key] = None
        self._remembered.move_to_end(key)
        if len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)
        return known

    def _spend(self, num_bytes: int, now_s: float) -> bool:
        """Spend the rate's allowance; debt of one record is allowed, so that one larger than a burst is written."""
        if not self._rate:
            return True
        if self._filled_s is not None:
            self._allowance = min(self._allowance + (now_s - self._filled_s) * self._rate, self._rate * _BURST_S)
        self._filled_s = now_s
        if self._allowance <= 0:
            return False
        self._allowance -= num_bytes
        return True

    def check(self) -> None:
        """Assert the bounds."""
        assert len(self._remembered) <= MAX_REMEMBERED
        assert 0 <= self._pause_s <= _MAX_PAUSE_S
        assert self._allowance <= self._rate * _BURST_S
        assert self._allowance > -self.max_record_bytes or not self._rate

    def __repr__(self) -> str:
        return f"TierAdmission({self._mode}, {len(self._remembered)} remembered, pause {self._pause_s} s)"
