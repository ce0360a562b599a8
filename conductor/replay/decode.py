"""A simulated decode worker: continuous batching, modelled as fluid between sequences joining and leaving.

All sequences of a batch step together, so one step counter is enough: a sequence that joins at step 100 with 20 tokens
left leaves at step 120. Between two changes all steps have the same length. Example: with steps of 20 ms and the next
departure 20 steps ahead, the next change is 0.4 s away; a join after 0.1 s finds 5 steps done.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import deque

from tanghulu.conductor.replay.model import Job, LatencyModel

_EPSILON = 1e-6
#: A request's TBT is the mean of this share of its gaps, the longest ones.
WORST_SHARE = 0.1


class StepHistory:
    """Lengths of past steps, in periods of equal length, to judge the gaps between an answer's tokens."""

    def __init__(self) -> None:
        self.step = 0.0
        self._starts: list[float] = []
        self._lengths_s: list[float] = []

    def add(self, num_steps: float, length_s: float) -> None:
        """Record ``num_steps`` steps of ``length_s`` each."""
        self._starts.append(self.step)
        self._lengths_s.append(length_s)
        self.step += num_steps

    def judge(self, job: Job, now_s: float) -> None:
        """Record the job's mean gap between tokens, and that of its longest tenth (including the hand-over)."""
        job.tbt_s = (now_s - job.first_s) / job.num_decode_steps
        gaps = self._periods_since(job.join_step)
        gaps.append((job.join_s - job.first_s + (gaps[0][0] if gaps else 0.0), 1.0))
        gaps.sort(reverse=True)
        wanted = left = max(1.0, math.ceil(WORST_SHARE * job.num_decode_steps))
        total_s = 0.0
        for gap_s, count in gaps:
            total_s += gap_s * min(count, left)
            left -= min(count, left)
            if left <= 0:
                break
        job.worst_tbt_s = total_s / (wanted - left)

    def _periods_since(self, step: float) -> list[tuple[float, float]]:
        """Return (step length, number of steps) of every period since ``step``."""
        starts, lengths_s = self._starts, self._lengths_s
        periods = []
        for index in range(max(0, bisect.bisect_right(starts, step) - 1), len(starts)):
            end = starts[index + 1] if index + 1 < len(starts) else self.step
            count = end - max(starts[index], step)
            if count > 0:
                periods.append((lengths_s[index], count))
        return periods


class DecodeInstance:
    """One decode worker. ``reserved_tokens``: context tokens needed by requests on their way to it."""

    def __init__(self, index: int, model: LatencyModel) -> None:
        self.index = index
        self.step_length_s = 0.0
        self.batch = 0
        self.context_tokens = 0.0
        self.num_coming = 0
        self.reserved_tokens = 0.0
        self.version = 0
        self._model = model
        self._history = StepHistory()
        self._now_s = 0.0
        self._leaving: list[tuple[float, int, Job]] = []
        self._waiting: deque[Job] = deque()

    @property
    def num_jobs(self) -> int:
        """Number of sequences decoding, waiting, or on their way."""
        return self.batch + self.num_coming

    def reserve(self, job: Job) -> None:
        """Reserve room for a job that will arrive after its prefill."""
        self.num_coming += 1
        self.reserved_tokens += job.expected_tokens

    def release(self, job: Job) -> None:
        """Release the room of a job that ended with its first token."""
        self.num_coming -= 1
        self.reserved_tokens -= job.expected_tokens

    def arrive(self, now_s: float, job: Job) -> float | None:
        """Accept a job whose KV has arrived; return the time at which the next sequence leaves."""
        self._advance(now_s)
        self._waiting.append(job)
        self._admit()
        return self._plan()

    def leave(self, now_s: float) -> tuple[list[Job], float | None]:
        """Remove the sequences that have ended at the planned time; return them and the time of the next end."""
        self._advance(now_s)
        self._history.step = max(self._history.step, self._leaving[0][0])
        ended = []
        while self._leaving and self._leaving[0][0] <= self._history.step + _EPSILON:
            job = heapq.heappop(self._leaving)[2]
            self.batch -= 1
            self.context_tokens -= job.request.num_tokens + job.num_decode_steps
            self.reserved_tokens -= job.expected_tokens
            self._history.judge(job, self._now_s)
            ended.append(job)
        self._admit()
        return ended, self._plan()

    def check(self) -> None:
        assert self.batch == len(self._leaving) <= self._model.max_batch
        assert self.num_coming >= len(self._waiting)
        assert self.batch or not self._waiting

    def _advance(self, now_s: float) -> None:
        steps = (now_s - self._now_s) / self.step_length_s if self.batch else 0.0
        if steps > 0:
            self._history.add(steps, self.step_length_s)
            self.context_tokens += steps * self.batch
        self._now_s = now_s

    def _admit(self) -> None:
        while self._waiting and self._has_room(self._waiting[0]):
            job = self._waiting.popleft()
            job.join_step, job.join_s = self._history.step, self._now_s
            self.batch += 1
            self.num_coming -= 1
            self.context_tokens += job.request.num_tokens
            heapq.heappush(self._leaving, (self._history.step + job.num_decode_steps, job.number, job))

    def _has_room(self, job: Job) -> bool:
        if not self.batch:
            return True
        wanted = self.context_tokens + job.request.num_tokens + job.request.output_tokens
        return self.batch < self._model.max_batch and wanted <= self._model.kv_tokens

    def _plan(self) -> float | None:
        self.version += 1
        self.step_length_s = self._model.step_s(self.batch, self.context_tokens)
        if not self._leaving:
            return None
        return self._now_s + max(0.0, self._leaving[0][0] - self._history.step) * self.step_length_s
