"""Replay's event loop: workers in virtual time, scheduled by one of the conductor's policies.

A request arrives and the policy chooses; a prefix may be fetched from another worker; the request waits its turn, is
prefilled (TTFT), its KV moves on unless it stays, and it decodes to its end. All randomness comes from one seed.
`PairSimulation` has workers for prefill and others for decode, `WholeSimulation` has workers that do both.

The policy gets the same views of workers and requests as live (`ClusterView`), and nothing more. In particular, the
length of an answer is unknown: it is estimated as the mean of the answers that have ended (`OutputEstimate`).
"""

from __future__ import annotations

import abc
import functools
import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tanghulu.conductor.dispatch.admission import Admission, forecast
from tanghulu.conductor.index.hot_prefixes import HotPrefixes
from tanghulu.conductor.replay.cluster_view import ClusterView, PairView, WholeView
from tanghulu.conductor.replay.decode import DecodeInstance
from tanghulu.conductor.replay.model import Job, LatencyModel
from tanghulu.conductor.replay.prefill import BlockCache, CachingInstance, PrefillInstance
from tanghulu.conductor.replay.trace import TraceRequest
from tanghulu.conductor.replay.whole import WholeInstance
from tanghulu.conductor.routing.expected_output import OutputEstimate
from tanghulu.conductor.routing.policies.base import PeerFetch, RoutingPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The simulated cluster: ``num_workers`` of both phases or, if that is 0, prefill and decode workers.

    ``worker_speeds``: relative speeds of the first workers of both phases; the others have 1.

    ``blocks``: cache of a worker that prefills, ``ssd_blocks``: those behind it on an SSD. ``fetch``: workers can fetch
    prefixes from each other, and do so when it pays unless the policy decides it. ``shared_cache``: the idealised pool,
    one cache for all at no cost. ``hot_prefix_rate``: fetches per second and holder above which a prefix is copied to
    another worker in advance. ``noise``: sigma of the lognormal factor between expected and real prefill time.
    """

    num_prefill: int = 8
    num_decode: int = 8
    num_workers: int = 0
    worker_speeds: tuple[float, ...] = ()
    blocks: int = 5859
    ssd_blocks: int = 0
    model: LatencyModel = field(default_factory=LatencyModel)
    fetch: bool = True
    in_flight: bool = True
    shared_cache: bool = False
    shortest_first: bool = False
    hot_prefix_rate: float = 0.0
    ageing: float = 0.1
    noise: float = 0.0
    seed: int = 0
    reject: bool = False
    ttft_slo_s: float = 30.0
    tbt_slo_s: float = 0.1


class Simulation(abc.ABC):
    """One run. ``run`` may be called once."""

    def __init__(
        self, config: ClusterConfig, policy: RoutingPolicy, prefills: Sequence[CachingInstance], view: ClusterView
    ) -> None:
        self.now_s = 0.0
        self.fetched_blocks = self.copied_blocks = 0
        self.prefills = prefills
        self._view = view
        self._hot: HotPrefixes[int] = HotPrefixes(config.hot_prefix_rate)
        self._config, self._policy = config, policy
        self._model, self._profile = config.model, config.model.profile
        self._random = random.Random(config.seed)
        self._output = OutputEstimate()
        self._admission = Admission(config.ttft_slo_s, config.tbt_slo_s)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()

    @abc.abstractmethod
    def _submit(self, job: Job) -> None:
        """Give a routed job to its workers."""

    @abc.abstractmethod
    def check(self) -> None:
        """Check the invariants of every worker."""

    def run(
        self,
        requests: Sequence[TraceRequest],
        progress: Callable[[int], None] = lambda done: None,
        check: bool = False,
    ) -> list[Job]:
        """Replay ``requests``; return the outcome of each, in order.

        ``progress`` is called at each arrival; ``check`` checks the invariants after each event.
        """
        jobs = [Job(request, number, self._factor()) for number, request in enumerate(requests)]
        for job in jobs:
            self._at(job.request.arrival_s, functools.partial(self._arrive, job, progress))
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
            if check:
                self.check()
        return jobs

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._sequence), event))

    # --- arrival

    def _arrive(self, job: Job, progress: Callable[[int], None]) -> None:
        progress(job.number)
        request = job.request
        views = self._view.workers(self.now_s, request)
        seen = self._view.request(request, self._output.tokens, self._output.of(request.blocks))
        decision = self._policy.choose(seen, views)
        assert decision is not None, "there are workers for both phases"
        if self._config.reject and self._admission.objection(forecast(seen, views, decision)):
            job.rejected = True
            return
        job.prefill = self._view.prefill_ids[decision.prefill]
        job.decode = self._view.decode_ids[decision.decode]
        target = self.prefills[job.prefill]
        match = self._match(target, request)
        fetch = decision.fetch or (self._fetch_that_pays(target, match, request) if self._config.fetch else None)
        hit_blocks = match
        if fetch is not None and fetch.num_blocks > match:
            self._fetch(job, target, fetch, match)
            hit_blocks = fetch.num_blocks
        self._load(job, target, match)
        target.cache.touch(request.blocks[:match])
        job.estimate_s = self._profile.seconds(request.num_tokens, hit_blocks * self._model.block_tokens)
        job.queued_tokens = request.num_tokens - min(request.num_tokens, match * self._model.block_tokens)
        job.expected_tokens = request.num_tokens + self._output.tokens
        self._submit(job)
        self._copy_ahead()

    def _match(self, worker: CachingInstance, request: TraceRequest) -> int:
        hit_blocks = worker.cache.leading(request.blocks)
        return worker.match(request.blocks, hit_blocks) if self._config.in_flight else hit_blocks

    def _fetch_that_pays(self, target: CachingInstance, match: int, request: TraceRequest) -> PeerFetch | None:
        """Return the fetch of the best remote prefix that a worker makes on its own, if that shortens TTFT."""
        held = [worker.cache.leading(request.blocks) for worker in self.prefills]
        most = max(held)
        holders = [worker for worker in self.prefills if held[worker.index] == most]
        source = min(holders, key=lambda worker: worker.send_free_s)
        if most <= match or source is target:
            return None
        wait_s = target.waiting_s(self.now_s)
        taken_s = max(0.0, source.send_free_s - self.now_s, target.receive_free_s - self.now_s)
        fetched_s = max(wait_s, taken_s + self._model.transfer_s(most - match))
        fetched_s += self._profile.seconds(request.num_tokens, most * self._model.block_tokens)
        own_s = wait_s + self._profile.seconds(request.num_tokens, match * self._model.block_tokens)
        return PeerFetch(self._view.prefill_id(source.index), most) if fetched_s < own_s else None

    def _fetch(self, job: Job, target: CachingInstance, fetch: PeerFetch, match: int) -> None:
        source = self.prefills[self._view.prefill_ids[fetch.source]]
        begin_s = max(self.now_s, source.send_free_s, target.receive_free_s)
        job.ready_s = begin_s + self._model.transfer_s(fetch.num_blocks - match)
        job.fetch_blocks = fetch.num_blocks
        source.send_free_s = target.receive_free_s = job.ready_s
        source.cache.touch(job.request.blocks[: fetch.num_blocks])
        self.fetched_blocks += fetch.num_blocks - match
        self._hot.fetched(b"", job.request.blocks, match, fetch.num_blocks, self.now_s)

    def _load(self, job: Job, target: CachingInstance, match: int) -> None:
        """Read the hit blocks that are on the worker's SSD; the job waits for them, and they for earlier ones."""
        num_blocks = target.cache.load(job.request.blocks[:match])
        if num_blocks:
            target.ssd_free_s = max(self.now_s, target.ssd_free_s) + self._model.load_s(num_blocks)
            job.ready_s = max(job.ready_s, target.ssd_free_s)

    # --- hot prefixes

    def _copy_ahead(self) -> None:
        """Copy hot prefixes to more holders, as the store does live, while no request waits for them.

        The least busy workers without it get each prefix, each from the holder whose NIC is free first.
        """
        for copies in self._hot.wanted(self.now_s, lambda blocks: len(self.prefills) - len(self._lacking(blocks))):
            lacking = sorted(self._lacking(copies.blocks), key=lambda worker: worker.waiting_s(self.now_s))
            holders = [w for w in self.prefills if w.cache.leading(copies.blocks) == len(copies.blocks)]
            num_missing = copies.num_holders - (len(self.prefills) - len(lacking))
            for target in lacking[: max(0, num_missing)] if holders else ():
                self._copy(copies.blocks, min(holders, key=lambda worker: worker.send_free_s), target)

    def _copy(self, blocks: Sequence[int], source: CachingInstance, target: CachingInstance) -> None:
        begin_s = max(self.now_s, source.send_free_s, target.receive_free_s)
        there_s = begin_s + self._model.transfer_s(len(blocks) - target.cache.leading(blocks))
        source.send_free_s = target.receive_free_s = there_s
        self.copied_blocks += len(blocks)
        self._at(there_s, functools.partial(target.cache.insert, blocks))

    def _lacking(self, blocks: Sequence[int]) -> list[CachingInstance]:
        """Return the workers that neither hold all of ``blocks`` nor will once their current work has ended."""
        return [worker for worker in self.prefills if worker.match(blocks) < len(blocks)]

    def _factor(self) -> float:
        """Draw a factor for each request in the trace's order, so that all policies meet the same luck."""
        sigma = self._config.noise
        return math.exp(self._random.gauss(-sigma * sigma / 2, sigma)) if sigma else 1.0


class PairSimulation(Simulation):
    """Prefill workers and decode workers."""

    def __init__(self, config: ClusterConfig, policy: RoutingPolicy) -> None:
        shared = BlockCache(config.blocks * config.num_prefill, config.ssd_blocks * config.num_prefill)
        self._prefillers = [
            PrefillInstance(index, shared if config.shared_cache else BlockCache(config.blocks, config.ssd_blocks))
            for index in range(config.num_prefill)
        ]
        self.decodes = [DecodeInstance(index, config.model) for index in range(config.num_decode)]
        view = PairView(self._prefillers, self.decodes, config.model, config.in_flight, config.fetch)
        super().__init__(config, policy, self._prefillers, view)

    def check(self) -> None:
        for prefill in self._prefillers:
            prefill.check()
        for decode in self.decodes:
            decode.check()

    def _submit(self, job: Job) -> None:
        target = self._prefillers[job.prefill]
        target.enqueue(job)
        self.decodes[job.decode].reserve(job)
        if target.current is None:
            self._start(target)

    # --- prefill

    def _start(self, worker: PrefillInstance) -> None:
        if not worker.queue:
            return
        job = worker.take(self._next_position(worker))
        worker.reuse(job)
        request = job.request
        job.begin_s = max(self.now_s, job.ready_s)
        job.planned_s = self._profile.seconds(request.num_tokens, job.hit_tokens)
        job.prefill_s = job.planned_s * job.slowness
        worker.busy_s += job.prefill_s
        self._at(job.begin_s + job.prefill_s, functools.partial(self._prefilled, worker))

    def _next_position(self, worker: PrefillInstance) -> int:
        """Return the next position: first come, first served; or shortest first with ageing."""
        if not self._config.shortest_first:
            return 0
        ageing, now_s = self._config.ageing, self.now_s
        left = [job.estimate_s - ageing * (now_s - job.request.arrival_s) for job in worker.queue]
        return left.index(min(left))

    def _prefilled(self, worker: PrefillInstance) -> None:
        job = worker.finish()
        job.first_s, job.ttft_s = self.now_s, self.now_s - job.request.arrival_s
        decode = self.decodes[job.decode]
        if job.num_decode_steps == 0:
            decode.release(job)
            self._output.ended(1, job.request.blocks)
        else:
            left_s = self._model.hand_over_s(job.request.num_tokens, job.hit_tokens, job.prefill_s)
            worker.send_free_s = max(self.now_s, worker.send_free_s) + left_s
            self._at(worker.send_free_s, functools.partial(self._decode, decode, job))
        self._start(worker)

    # --- decode

    def _decode(self, worker: DecodeInstance, job: Job) -> None:
        self._plan_leave(worker, worker.arrive(self.now_s, job))

    def _leave(self, worker: DecodeInstance, version: int) -> None:
        if version != worker.version:
            return
        ended, next_s = worker.leave(self.now_s)
        for job in ended:
            self._output.ended(job.request.output_tokens, job.request.blocks)
        self._plan_leave(worker, next_s)

    def _plan_leave(self, worker: DecodeInstance, time_s: float | None) -> None:
        if time_s is not None:
            self._at(time_s, functools.partial(self._leave, worker, worker.version))


class WholeSimulation(Simulation):
    """Workers that do both phases; an answer may still be decoded elsewhere."""

    def __init__(self, config: ClusterConfig, policy: RoutingPolicy) -> None:
        shared = BlockCache(config.blocks * config.num_workers, config.ssd_blocks * config.num_workers)
        speeds = (*config.worker_speeds, *(1.0,) * config.num_workers)
        self.workers = [
            WholeInstance(
                index,
                shared if config.shared_cache else BlockCache(config.blocks, config.ssd_blocks),
                config.model,
                speed,
            )
            for index, speed in enumerate(speeds[: config.num_workers])
        ]
        super().__init__(
            config, policy, self.workers, WholeView(self.workers, config.model, config.in_flight, config.fetch)
        )

    def check(self) -> None:
        for worker in self.workers:
            worker.check()

    def _submit(self, job: Job) -> None:
        worker = self.workers[job.prefill]
        worker.enqueue(job)
        self.workers[job.decode].reserve(job)
        if job.ready_s > self.now_s:
            self._at(job.ready_s, functools.partial(self._proceed, worker))
        self._proceed(worker)

    def _proceed(self, worker: WholeInstance) -> None:
        worker.interrupt(self.now_s)
        end_s = worker.plan(self.now_s)
        if end_s is not None:
            self._at(end_s, functools.partial(self._step_done, worker, worker.version))

    def _step_done(self, worker: WholeInstance, version: int) -> None:
        if version != worker.version:
            return
        done = worker.step_done(self.now_s)
        for job in done.prefilled:
            job.first_s, job.ttft_s = self.now_s, self.now_s - job.request.arrival_s
            self._continue(worker, job)
        for job in done.ended:
            self._output.ended(job.request.output_tokens, job.request.blocks)
            if job.request.answer_blocks:
                worker.cache.insert(job.request.blocks + job.request.answer_blocks)
        self._proceed(worker)

    def _continue(self, worker: WholeInstance, job: Job) -> None:
        """Let a prefilled job end with its first token, or move to the other worker that will decode it."""
        target = self.workers[job.decode]
        if job.num_decode_steps == 0:
            target.release(job)
            self._output.ended(1, job.request.blocks)
        elif target is not worker:
            held_tokens = target.cache.leading(job.request.blocks) * self._model.block_tokens
            left_s = self._model.hand_over_s(job.request.num_tokens, job.hit_tokens, job.prefill_s, held_tokens)
            worker.send_free_s = max(self.now_s, worker.send_free_s) + left_s
            self._at(worker.send_free_s, functools.partial(self._arrive_to_decode, target, job))

    def _arrive_to_decode(self, worker: WholeInstance, job: Job) -> None:
        worker.arrive(job)
        self._proceed(worker)


def make_simulation(config: ClusterConfig, policy: RoutingPolicy) -> PairSimulation | WholeSimulation:
    """Return the simulation of the cluster that ``config`` describes."""
    return WholeSimulation(config, policy) if config.num_workers else PairSimulation(config, policy)
