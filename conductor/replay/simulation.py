"""Replay's event loop: P prefill and D decode workers in virtual time, scheduled by one of the conductor's policies.

A request arrives and the policy chooses; a prefix may be fetched from another worker; the request waits its turn, is
prefilled (TTFT), its KV moves on, and it decodes to its end. All randomness comes from one seed.

The policy gets the same views of workers and requests as live (`ClusterView`), and nothing more. In particular, the
length of an answer is unknown: it is estimated as the mean of the answers that have ended (`OutputEstimate`).
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tanghulu.conductor.dispatch.admission import Admission, forecast
from tanghulu.conductor.index.hot_prefixes import HotPrefixes
from tanghulu.conductor.replay.decode import DecodeInstance
from tanghulu.conductor.replay.model import Job, LatencyModel
from tanghulu.conductor.replay.prefill import BlockCache, PrefillInstance
from tanghulu.conductor.replay.trace import BLOCK_TOKENS, TraceRequest
from tanghulu.conductor.routing.expected_output import OutputEstimate
from tanghulu.conductor.routing.policies.base import PeerFetch, RequestView, RoutingPolicy, WorkerView
from tanghulu.types import InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The simulated cluster. ``blocks``: cache of one prefill worker. ``fetch``: workers can fetch prefixes from each
    other, and do so when it pays unless the policy decides it. ``shared_cache``: the idealised pool, one cache for all
    at no cost. ``hot_prefix_rate``: fetches per second and holder above which a prefix is copied to another worker in
    advance. ``noise``: sigma of the lognormal factor between expected and real prefill time.
    """

    num_prefill: int = 8
    num_decode: int = 8
    blocks: int = 5859
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


class Simulation:
    """One run. ``run`` may be called once."""

    def __init__(self, config: ClusterConfig, policy: RoutingPolicy, check: bool = False) -> None:
        self.now_s = 0.0
        self.fetched_blocks = self.copied_blocks = 0
        self._hot: HotPrefixes[int] = HotPrefixes(config.hot_prefix_rate)
        self._config, self._policy, self._check = config, policy, check
        self._model, self._profile = config.model, config.model.profile
        self._random = random.Random(config.seed)
        self.prefills = _prefill_instances(config)
        self.decodes = [DecodeInstance(index, config.model) for index in range(config.num_decode)]
        self._view = ClusterView(self.prefills, self.decodes, config.model, config.in_flight, config.fetch)
        self._output = OutputEstimate()
        self._admission = Admission(config.ttft_slo_s, config.tbt_slo_s)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()

    def run(self, requests: Sequence[TraceRequest], progress: Callable[[int], None] = lambda done: None) -> list[Job]:
        """Replay ``requests``; return the outcome of each, in order. ``progress`` is called at each arrival."""
        jobs = [Job(request, number, self._factor()) for number, request in enumerate(requests)]
        for job in jobs:
            self._at(job.request.arrival_s, functools.partial(self._arrive, job, progress))
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
            if self._check:
                self.check()
        return jobs

    def check(self) -> None:
        for prefill in self.prefills:
            prefill.check()
        for decode in self.decodes:
            decode.check()

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._sequence), event))

    # --- arrival

    def _arrive(self, job: Job, progress: Callable[[int], None]) -> None:
        progress(job.number)
        request = job.request
        views = self._view.workers(self.now_s, request)
        seen = self._view.request(request, self._output.tokens)
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
        target.cache.touch(request.blocks[:match])
        job.estimate_s = self._profile.seconds(request.num_tokens, hit_blocks * BLOCK_TOKENS)
        job.queued_tokens = request.num_tokens - min(request.num_tokens, match * BLOCK_TOKENS)
        job.expected_tokens = request.num_tokens + self._output.tokens
        target.enqueue(job)
        self.decodes[job.decode].reserve(job)
        self._copy_ahead()
        if target.current is None:
            self._start(target)

    def _match(self, worker: PrefillInstance, request: TraceRequest) -> int:
        hit_blocks = worker.cache.leading(request.blocks)
        return worker.match(request.blocks, hit_blocks) if self._config.in_flight else hit_blocks

    def _fetch_that_pays(self, target: PrefillInstance, match: int, request: TraceRequest) -> PeerFetch | None:
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
        fetched_s += self._profile.seconds(request.num_tokens, most * BLOCK_TOKENS)
        own_s = wait_s + self._profile.seconds(request.num_tokens, match * BLOCK_TOKENS)
        return PeerFetch(self._view.prefill_id(source.index), most) if fetched_s < own_s else None

    def _fetch(self, job: Job, target: PrefillInstance, fetch: PeerFetch, match: int) -> None:
        source = self.prefills[self._view.prefill_ids[fetch.source]]
        begin_s = max(self.now_s, source.send_free_s, target.receive_free_s)
        job.ready_s = begin_s + self._model.transfer_s(fetch.num_blocks - match)
        job.fetch_blocks = fetch.num_blocks
        source.send_free_s = target.receive_free_s = job.ready_s
        source.cache.touch(job.request.blocks[: fetch.num_blocks])
        self.fetched_blocks += fetch.num_blocks - match
        self._hot.fetched(b"", job.request.blocks, match, fetch.num_blocks, self.now_s)

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

    def _copy(self, blocks: Sequence[int], source: PrefillInstance, target: PrefillInstance) -> None:
        begin_s = max(self.now_s, source.send_free_s, target.receive_free_s)
        there_s = begin_s + self._model.transfer_s(len(blocks) - target.cache.leading(blocks))
        source.send_free_s = target.receive_free_s = there_s
        self.copied_blocks += len(blocks)
        self._at(there_s, functools.partial(target.cache.insert, blocks))

    def _lacking(self, blocks: Sequence[int]) -> list[PrefillInstance]:
        """Return the workers that neither hold all of ``blocks`` nor will once their current work has ended."""
        return [worker for worker in self.prefills if worker.match(blocks) < len(blocks)]

    # --- prefill

    def _start(self, worker: PrefillInstance) -> None:
        if not worker.queue:
            return
        job = worker.take(self._next_position(worker))
        request = job.request
        # Fetched blocks count as held: they were sent, and are used from where they arrived.
        held = worker.cache.leading(request.blocks)
        if job.fetch_blocks > held:
            held = job.fetch_blocks + worker.cache.leading(request.blocks[job.fetch_blocks :])
        job.hit_tokens = min(held * BLOCK_TOKENS, request.num_tokens - 1)
        worker.cache.touch(request.blocks[:held])
        job.queued_tokens = request.num_tokens - job.hit_tokens
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

    def _factor(self) -> float:
        """Draw a factor for each request in the trace's order, so that all policies meet the same luck."""
        sigma = self._config.noise
        return math.exp(self._random.gauss(-sigma * sigma / 2, sigma)) if sigma else 1.0

    def _prefilled(self, worker: PrefillInstance) -> None:
        job = worker.finish()
        job.first_s, job.ttft_s = self.now_s, self.now_s - job.request.arrival_s
        decode = self.decodes[job.decode]
        if job.num_decode_steps == 0:
            decode.release(job)
            self._output.ended(1)
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
            self._output.ended(job.request.output_tokens)
        self._plan_leave(worker, next_s)

    def _plan_leave(self, worker: DecodeInstance, time_s: float | None) -> None:
        if time_s is not None:
            self._at(time_s, functools.partial(self._leave, worker, worker.version))


def _prefill_instances(config: ClusterConfig) -> list[PrefillInstance]:
    shared = BlockCache(config.blocks * config.num_prefill)
    indexes = range(config.num_prefill)
    return [PrefillInstance(i, shared if config.shared_cache else BlockCache(config.blocks)) for i in indexes]


class ClusterView:
    """Builds views. ``in_flight``: whether blocks being computed count as coming."""

    def __init__(
        self,
        prefills: Sequence[PrefillInstance],
        decodes: Sequence[DecodeInstance],
        model: LatencyModel,
        in_flight: bool,
        fetch: bool,
    ) -> None:
        self.prefill_ids = {InstanceId(f"prefill-{p.index:04d}"): p.index for p in prefills}
        self.decode_ids = {InstanceId(f"decode-{d.index:04d}"): d.index for d in decodes}
        self._names = list(self.prefill_ids)
        self._prefills, self._decodes = prefills, decodes
        self._model, self._profile, self._decode_profile = model, model.profile, model.decode_profile
        self._in_flight = in_flight
        self._peer_bytes_per_s = model.nic if fetch else 0.0
        self._block_bytes = round(BLOCK_TOKENS * model.kv_token_bytes)

    def prefill_id(self, index: int) -> InstanceId:
        """Return the name of the prefill worker with that index."""
        return self._names[index]

    def request(self, request: TraceRequest, expected_output: float) -> RequestView:
        named = len(request.blocks)
        return RequestView(
            request.num_tokens,
            BLOCK_TOKENS,
            self._block_bytes,
            session=request.session,
            named_blocks=named,
            expected_output=expected_output,
        )

    def workers(self, now_s: float, request: TraceRequest) -> list[WorkerView]:
        """Return all workers, as seen by ``request``."""
        prefills = zip(self.prefill_ids, self._prefills, strict=True)
        decodes = zip(self.decode_ids, self._decodes, strict=True)
        return [self._prefill(id, p, now_s, request) for id, p in prefills] + [self._decode(id, d) for id, d in decodes]

    def _prefill(self, id: InstanceId, worker: PrefillInstance, now_s: float, request: TraceRequest) -> WorkerView:
        blocks, coming = request.blocks, worker.coming
        hit_blocks = worker.cache.leading(blocks)
        return WorkerView(
            id=id,
            can_prefill=True,
            can_decode=False,
            queue_tokens=worker.waiting_tokens,
            num_requests=worker.num_jobs,
            blocks_free=worker.cache.capacity_blocks,
            blocks_total=worker.cache.capacity_blocks,
            hit_blocks=hit_blocks,
            coming_blocks=worker.match(blocks, hit_blocks) if self._in_flight else 0,
            active_blocks=len(coming),
            active_hit_blocks=sum(1 for block in blocks if block in coming),
            queue_s=worker.waiting_s(now_s),
            profile=self._profile,
            peer_bytes_per_s=self._peer_bytes_per_s,
            send_wait_s=worker.send_free_s - now_s,
            receive_wait_s=worker.receive_free_s - now_s,
        )

    def _decode(self, id: InstanceId, worker: DecodeInstance) -> WorkerView:
        total = int(self._model.kv_tokens) // BLOCK_TOKENS
        return WorkerView(
            id=id,
            can_prefill=False,
            can_decode=True,
            num_requests=worker.num_jobs,
            coming_requests=worker.num_coming,
            blocks_free=max(0, total - int(worker.reserved_tokens) // BLOCK_TOKENS),
            blocks_total=total,
            decode_step_s=worker.step_length_s,
            decode_profile=self._decode_profile,
            context_tokens=int(worker.reserved_tokens),
        )
