"""A simulated worker of both phases: one engine whose steps decode every running sequence and prefill some tokens.

A step computes one token of each decoding sequence and, with the rest of ``chunk_tokens``, prompts in their order:

    step = c + sum(A n + B pairs) over pieces of prompts + d * sequences + e * context tokens

Requests are admitted in order while a seat (``max_batch``) and room for their context (``kv_tokens``) are free. So a
prefill delays every answer, long answers delay prefills, and a full batch delays both. Example with the default model:
40 sequences at 8,000 tokens step in 20 + 4 + 9.3 = 33 ms; with 472 tokens of a prompt beside them, in 33 + 45 = 78 ms.

Steps without prompts are taken in runs of up to RUN_STEPS of equal length, cut short when a request arrives.
"""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from dataclasses import dataclass, field

from tanghulu.conductor.replay.decode import StepHistory
from tanghulu.conductor.replay.model import Job, LatencyModel
from tanghulu.conductor.replay.prefill import BlockCache, CachingInstance
from tanghulu.session.load import BusyShare, DecodeProfile, PrefillProfile

#: Most decode steps simulated at once; within them the context grows by less than 1 % as a rule.
RUN_STEPS = 16


@dataclass(slots=True)
class _Prefill:
    """A prompt being computed: ``done_tokens`` of it have their KV, ``piece_tokens`` more after the current step."""

    job: Job
    done_tokens: int
    piece_tokens: int = 0

    @property
    def left_tokens(self) -> int:
        return self.job.request.num_tokens - self.done_tokens


@dataclass(slots=True)
class StepEnd:
    """Outcome of the steps since the last plan: jobs with their first token, and jobs with their last one."""

    prefilled: list[Job] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)


class WholeInstance(CachingInstance):
    """One worker. Call `plan` after every change and `step_done` at the time that it returned."""

    def __init__(self, index: int, cache: BlockCache, model: LatencyModel, speed: float = 1.0) -> None:
        super().__init__(index, cache)
        #: Changes with each plan, so that an older plan's end can be recognised.
        self.version = 0
        self.reserved_tokens = 0.0
        self.num_coming = 0
        self.batch = 0
        self.context_tokens = 0.0
        self.step_length_s = 0.0
        self.prefilling = BusyShare()
        self._model, self._profile, self._speed = model, model.profile, speed
        token_s = self._profile.token_s + model.c / model.chunk_tokens
        #: What the worker would report, fitted to its own steps.
        self.prefill_profile = PrefillProfile(
            model.c / speed, token_s / speed, self._profile.pair_s / speed, self._profile.load_s / speed
        )
        self.decode_profile = DecodeProfile(model.c / speed, model.d / speed, model.e / speed)
        self._arrived: deque[Job] = deque()
        self._prefills: list[_Prefill] = []
        self._decoding: list[tuple[float, int, Job]] = []
        self._history = StepHistory()
        self._num_steps = 0
        self._begin_s = 0.0
        self._running = False
        self._used_tokens = 0.0

    # --- for views

    @property
    def num_jobs(self) -> int:
        """Number of requests here or on their way here."""
        return len(self.queue) + len(self._prefills) + self.batch + self.num_coming

    @property
    def num_prompts(self) -> int:
        """Number of prompts not yet computed."""
        return len(self.queue) + len(self._prefills)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens still to be computed, as far as the conductor knows."""
        return sum(job.queued_tokens for job in self.queue) + sum(p.left_tokens for p in self._prefills)

    @property
    def waiting_pairs(self) -> int:
        """Pairs of tokens that the waiting prompts have still to attend to."""
        queued = sum(_pairs(job.request.num_tokens, job.queued_tokens) for job in self.queue)
        return queued + sum(_pairs(p.job.request.num_tokens, p.left_tokens) for p in self._prefills)

    def check(self) -> None:
        self._check_coming([*self.queue, *(p.job for p in self._prefills)])
        assert self.batch == len(self._decoding)
        assert self.batch + len(self._prefills) <= self._model.max_batch
        assert self.num_coming >= len(self._arrived)
        assert self._running or not (self._decoding or self._prefills)

    def waiting_s(self, now_s: float) -> float:
        """Estimate the seconds until every prompt here is computed."""
        del now_s
        return self.prefill_profile.queue_seconds(self.num_prompts, self.waiting_tokens, self.waiting_pairs)

    # --- events

    def enqueue(self, job: Job) -> None:
        """Accept a prompt; its blocks count as coming from now on."""
        self.queue.append(job)
        self.coming.update(job.request.blocks)

    def reserve(self, job: Job) -> None:
        """Count room for an answer that will be decoded here; it is on its way if prefilled elsewhere."""
        self.reserved_tokens += job.expected_tokens
        self.num_coming += job.prefill != self.index

    def release(self, job: Job) -> None:
        """Give back the room of an answer of one token, which is not decoded."""
        self.reserved_tokens -= job.expected_tokens
        self.num_coming -= job.prefill != self.index

    def arrive(self, job: Job) -> None:
        """Accept a job whose KV has arrived from the worker that prefilled it, which keeps it, too."""
        self._arrived.append(job)
        self.cache.insert_copies(job.request.blocks)

    def interrupt(self, now_s: float) -> None:
        """Cut a run of decode steps at the end of the current one."""
        if self._running and self._num_steps > 1:
            done = int((now_s - self._begin_s) / self.step_length_s) + 1
            if done < self._num_steps:
                self._num_steps = done

    def plan(self, now_s: float) -> float | None:
        """Begin the next steps unless some are running; return when the current ones end, None without work."""
        if not self._running:
            self._admit(now_s)
            if not (self._prefills or self._decoding):
                return None
            self._begin(now_s)
        self.version += 1
        return self._begin_s + self._num_steps * self.step_length_s

    def step_done(self, now_s: float) -> StepEnd:
        """End the current steps."""
        self._running = False
        found = StepEnd()
        steps = self._num_steps
        self._history.add(steps, self.step_length_s)
        self.context_tokens += steps * self.batch
        if any(prefill.piece_tokens for prefill in self._prefills):
            self.busy_s += self.step_length_s
            self.prefilling.add(self.step_length_s, now_s)
        for prefill in list(self._prefills):
            prefill.done_tokens += prefill.piece_tokens
            if not prefill.left_tokens:
                self._prefills.remove(prefill)
                self._finish_prefill(prefill.job, now_s, found)
        while self._decoding and self._decoding[0][0] <= self._history.step:
            job = heapq.heappop(self._decoding)[2]
            self._leave(job, now_s)
            found.ended.append(job)
        return found

    # --- inside

    def _admit(self, now_s: float) -> None:
        """Admit handed-over answers, then prompts, while there are seats, room and tokens left in the step."""
        while self._arrived and self._has_room(self._arrived[0]):
            job = self._arrived.popleft()
            self.num_coming -= 1
            self._used_tokens += job.request.num_tokens + job.request.output_tokens
            self._join(job, now_s)
        budget = self._model.chunk_tokens - self.batch
        while (position := self._next_position(now_s)) is not None and self._has_room(self.queue[position]):
            number = self.queue[position].number
            # An earlier request that waited for a fetch goes before later ones.
            if sum(p.left_tokens for p in self._prefills if p.job.number < number) >= budget:
                break
            job = self.queue.pop(position)
            self.reuse(job)
            self._used_tokens += job.request.num_tokens + job.request.output_tokens
            job.begin_s = now_s
            bisect.insort(self._prefills, _Prefill(job, job.hit_tokens), key=_order)
        for prefill in self._prefills:
            prefill.piece_tokens = max(0, min(prefill.left_tokens, budget))
            budget -= prefill.piece_tokens

    def _next_position(self, now_s: float) -> int | None:
        """Return the place of the first prompt that waits for no fetch."""
        for position, job in enumerate(self.queue):
            if job.ready_s <= now_s:
                return position
        return None

    def _has_room(self, job: Job) -> bool:
        num_running = self.batch + len(self._prefills)
        if not num_running:
            return True
        wanted = self._used_tokens + job.request.num_tokens + job.request.output_tokens
        return num_running < self._model.max_batch and wanted <= self._model.kv_tokens

    def _begin(self, now_s: float) -> None:
        self._running, self._begin_s, self._num_steps = True, now_s, 1
        model = self._model
        decode_s = model.d * self.batch + model.e * self.context_tokens
        prefill_s = sum(self._piece_s(prefill) for prefill in self._prefills if prefill.piece_tokens)
        if not prefill_s:
            left = int(self._decoding[0][0] - self._history.step + 0.5)
            self._num_steps = max(1, min(RUN_STEPS, left))
            decode_s += model.e * self.batch * (self._num_steps - 1) / 2
        self.step_length_s = (model.c + prefill_s + decode_s) / self._speed

    def _piece_s(self, prefill: _Prefill) -> float:
        job, end = prefill.job, prefill.done_tokens + prefill.piece_tokens
        profile = self._profile
        compute_s = profile.token_s * prefill.piece_tokens + profile.pair_s * (end * end - prefill.done_tokens**2)
        share = prefill.piece_tokens / (job.request.num_tokens - job.hit_tokens)
        return max(compute_s * job.slowness, profile.load_s * job.hit_tokens * share)

    def _finish_prefill(self, job: Job, now_s: float, found: StepEnd) -> None:
        self._computed(job)
        job.prefill_s = now_s - job.begin_s
        found.prefilled.append(job)
        if job.num_decode_steps and job.decode == self.index:
            self._join(job, now_s)
        else:
            self._used_tokens -= job.request.num_tokens + job.request.output_tokens

    def _join(self, job: Job, now_s: float) -> None:
        job.join_step, job.join_s = self._history.step, now_s
        self.batch += 1
        self.context_tokens += job.request.num_tokens
        heapq.heappush(self._decoding, (self._history.step + job.num_decode_steps, job.number, job))

    def _leave(self, job: Job, now_s: float) -> None:
        self.batch -= 1
        self.context_tokens -= job.request.num_tokens + job.num_decode_steps
        self.reserved_tokens -= job.expected_tokens
        self._used_tokens -= job.request.num_tokens + job.request.output_tokens
        self._history.judge(job, now_s)


def _order(prefill: _Prefill) -> int:
    return prefill.job.number


def _pairs(num_tokens: int, rest_tokens: int) -> int:
    return num_tokens * num_tokens - (num_tokens - rest_tokens) ** 2
