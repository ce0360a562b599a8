"""Workers in virtual time behind the real dispatcher: the engine's scheduler, block pool and mock timing; no I/O."""

from __future__ import annotations

import heapq
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import structs
from prometheus_client import CollectorRegistry

from tanghulu.conductor.dispatch.dispatcher import Dispatcher
from tanghulu.conductor.dispatch.entry import Limits
from tanghulu.conductor.dispatch.registry import RegisteredWorker
from tanghulu.conductor.dispatch.token_stream import Arrivals, TokenStream
from tanghulu.conductor.metrics import ConductorMetrics
from tanghulu.conductor.routing.overrides import RoutingPolicies, parse_weights
from tanghulu.conductor.routing.requests import GenerationRequest
from tanghulu.conductor.text.served_model import ServedModel
from tanghulu.discovery.base import Instance
from tanghulu.hashing import Tokens, TokenSequence, root_hash
from tanghulu.session.load import WorkerLoad
from tanghulu.session.messages import SessionWelcome, StepOutput
from tanghulu.session.model_card import ModelCard
from tanghulu.session.outputs import KvChange, KvLoad, KvSource, Output
from tanghulu.session.sampling import Sampling, StopRule
from tanghulu.session.speed import SpeedMeter
from tanghulu.types import Address, Fingerprint, InstanceId, RequestId, Role
from tanghulu.workers.engine.block_pool import BlockPool, KvEventKind
from tanghulu.workers.engine.exports import ExportState, KvExport
from tanghulu.workers.engine.requests import EngineRequest
from tanghulu.workers.engine.scheduler import EngineCoreConfig, Scheduler
from tanghulu.workers.engine.step import FetchWanted, Sampled, StepPlan
from tanghulu.workers.mock.runner import TIMINGS
from tests.conductor.fake_worker import TOKENIZER

BLOCK_TOKENS = 64
STEP_TOKENS = 8192
#: Seconds that a message takes, that a fetch takes, and that a step takes besides what its model says.
WIRE_S, FETCH_S, STEP_S = 0.003, 0.02, 0.007
SLOWNESS = 1.5

_CARD = ModelCard(
    "mock",
    Fingerprint(b"f" * 16),
    "xxh3_128",
    BLOCK_TOKENS,
    131_072,
    300,
    (),
    zlib.compress(TOKENIZER.to_str().encode()),
    "",
    "",
    "",
    False,
    BLOCK_TOKENS * 16,
)


class VirtualTime:
    """What happens when; also the dispatcher's clock."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def now_s(self) -> float:
        return self._now_s

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now_s + seconds, next(self._number), event))

    def run(self) -> None:
        while self._events:
            self._now_s, _, event = heapq.heappop(self._events)
            event()


class VirtualPull:
    """A pull at ``reader``, as far as its blocks are on their way."""

    def __init__(self, reader: VirtualWorker, wanted: FetchWanted) -> None:
        self._reader, self._wanted, self._num_sent = reader, wanted, 0

    def sees(self, num_shown: int) -> None:
        fresh = min(num_shown - self._wanted.first_block, len(self._wanted.block_ids)) - self._num_sent
        if fresh > 0:
            self._num_sent += fresh
            self._reader.pulled(self._wanted.request_id, fresh, ended=False)

    def end(self) -> None:
        self._reader.pulled(self._wanted.request_id, 0, ended=True)


class VirtualExport:
    """What is shown of a prompt, and who reads it."""

    def __init__(self, number: int, kv: KvExport) -> None:
        self.number, self.kv = number, kv
        self.pulls: list[VirtualPull] = []

    def show(self, kv: KvExport) -> None:
        self.kv = kv
        for pull in self.pulls:
            pull.sees(len(kv.block_ids))
            if kv.state is not ExportState.GROWING:
                pull.end()
        if kv.state is not ExportState.GROWING:
            self.pulls.clear()


class VirtualWorker:
    """A worker, of both roles if no other is named. The dispatcher takes it for a session."""

    counts_late = False
    #: The code of the error with which its fetches from caches end.
    fails = ""

    def __init__(
        self,
        name: str,
        num_blocks: int,
        cluster: VirtualCluster,
        role: Role = Role.BOTH,
        step_tokens: int = STEP_TOKENS,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(EngineCoreConfig(BLOCK_TOKENS, step_tokens, 32), self.pool, 131_072, can_fetch=True)
        self.num_hand_overs = self.num_pulled = 0
        self._numbers = itertools.count(10**9)
        self._cluster, self._time = cluster, cluster.time
        self._speed, self._timing = SpeedMeter(step_tokens, now_s=cluster.time.now_s), TIMINGS["gpu-8b"]
        self._busy, self._sequence = False, 0
        self._exports: dict[int, VirtualExport] = {}
        address = Address(name, 1)
        self.registered = RegisteredWorker(Instance(InstanceId(name), role, address))
        self.registered.card, self.registered.session = _CARD, self
        self.registered.model = cluster.model
        self.registered.load.block_tokens = BLOCK_TOKENS
        self.registered.load.reset(self._load())

    # --- the session

    def exactness(self, request) -> str:
        return "by_worker"

    def submit(self, request, to, tokens, holder=None, moved=False) -> None:
        source, ahead = to.source, to.ahead
        sequence = TokenSequence(root_hash(_CARD.fingerprint, request.salt), BLOCK_TOKENS, tokens)
        engine_request = EngineRequest(
            RequestId(to.wire_id),
            sequence,
            len(request.prompt),
            Sampling(),
            StopRule(request.stop.max_new_tokens, ignore_eos=True),
            hold_kv=to.hand_over,
            peer=source,
            holder=holder,
            moved=moved,
            ahead=RequestId(ahead) if ahead else None,
        )
        self.num_hand_overs += source is not None
        self._time.after(WIRE_S, lambda: self._add(engine_request))

    def pull(self, name, tokens, salt, source) -> None:
        sequence = TokenSequence(root_hash(_CARD.fingerprint, salt), BLOCK_TOKENS, tokens)
        holder = self._cluster.by_address[source.address]

        def begin() -> None:
            wanted = self.scheduler.pull_ahead(RequestId(name), sequence, source)
            if wanted is not None:
                holder.read_early(source.export_id, VirtualPull(self, wanted))

        self._time.after(WIRE_S, begin)

    def abort(self, wire_id: str) -> None:
        def abort() -> None:
            if not self.scheduler.abort(RequestId(wire_id)):
                self.scheduler.pulls.drop(RequestId(wire_id))
            self._show_exports()
            self._begin_step()

        self._time.after(WIRE_S, abort)

    def release(self, export_id: int) -> None:
        export = self._exports.get(export_id)  # by its reader, or by the conductor
        if export is not None and export.kv.state is ExportState.COMPLETE:
            del self._exports[export_id]
            self._time.after(WIRE_S, lambda: self.scheduler.exports.release(export.kv.name))

    def _add(self, request: EngineRequest) -> None:
        self.scheduler.add(request)
        self._report([])
        self._begin_step()

    # --- steps

    def _begin_step(self) -> None:
        if self._busy or not self.scheduler.has_work:
            return
        plan = self.scheduler.schedule()
        for wanted in plan.fetches:
            self._fetch(wanted)
        for peer in plan.declined:
            self._cluster.by_address[peer.address].release(peer.export_id)
        self._busy = bool(plan.runs)
        seconds = SLOWNESS * self._timing.step_seconds(plan) + STEP_S if plan.runs else 0.0
        if plan.runs:
            self._time.after(seconds, lambda: self._end_step(plan, seconds))
        else:
            self.scheduler.step_done(Sampled([], []))

    def _end_step(self, plan: StepPlan, seconds: float) -> None:
        num_samples = sum(run.samples for run in plan.runs)
        outcome = self.scheduler.step_done(Sampled([1] * num_samples, [None] * num_samples))
        self._busy = False
        self._speed.step(plan.num_tokens, len(plan.runs), seconds, plan.work)
        sources = self._show_exports()
        for output in outcome.outputs:
            output.source = sources.pop(output.request_id, None)
        begun = [Output(name, source=source) for name, source in sources.items()]
        self._report([*begun, *outcome.outputs])
        self._begin_step()

    def _show_exports(self) -> dict[RequestId, KvSource]:
        """Show readers what has changed; returns the sources of which conductors learn."""
        sources = {}
        for kv in self.scheduler.exports.take_changed():
            known = next((each for each in self._exports.values() if each.kv.name == kv.name), None)
            export = known or VirtualExport(next(self._numbers), kv)
            export.show(kv)
            if kv.state is ExportState.WITHDRAWN:
                self._exports.pop(export.number, None)
                self.scheduler.exports.release(kv.name)
                continue
            self._exports[export.number] = export
            if known is None or kv.state is ExportState.COMPLETE:
                address = str(self.registered.instance.address)
                sources[kv.request_id] = KvSource(self.registered.id, address, "", export.number, kv.num_tokens)
        return sources

    def read_early(self, number: int, pull: VirtualPull) -> None:
        export = self._exports.get(number)
        if export is None:
            pull.end()
        else:
            export.pulls.append(pull)
            export.show(export.kv)

    def pulled(self, name: RequestId, num_blocks: int, ended: bool) -> None:
        """After what a fetch takes, blocks have come, or the pull has ended."""

        def arrive() -> None:
            self.num_pulled += num_blocks
            self.scheduler.pulls.arrived(name, num_blocks)
            if ended:
                self.scheduler.pulls.done(name)
                self._begin_step()

        self._time.after(FETCH_S, arrive)

    def _fetch(self, wanted: FetchWanted) -> None:
        def arrive() -> None:
            num_ok, loads = 0, []
            if wanted.peer is not None:
                self._cluster.by_address[wanted.peer.address].release(wanted.peer.export_id)
                num_ok = len(wanted.block_ids)
            elif wanted.holder is not None:
                holder = self._cluster.by_address[wanted.holder.address]
                num_ok = 0 if self.fails else holder.pool.num_hits(wanted.block_hashes)
            num_ok = min(num_ok, len(wanted.block_ids))
            if wanted.peer is not None or wanted.holder is not None:
                loads = [KvLoad("peer", num_ok * BLOCK_TOKENS, self.fails)]
            self.scheduler.fetch_done(wanted.request_id, num_ok, loads)
            self._begin_step()

        self._time.after(FETCH_S, arrive)

    # --- what it tells

    def _report(self, outputs: list[Output]) -> None:
        changes = []
        for kind, events in itertools.groupby(self.pool.take_events(), key=lambda event: event.kind):
            hashes = tuple(event.block_hash for event in events)
            changes.append(KvChange(stored=hashes) if kind is KvEventKind.STORED else KvChange(removed=hashes))
        step = StepOutput(outputs, self._sequence, tuple(changes), self._load())
        self._sequence += len(changes)
        self._time.after(WIRE_S, lambda: self._cluster.dispatcher.worker_step(self.registered, step))

    def _load(self) -> WorkerLoad:
        scheduler = self.scheduler
        return structs.replace(
            self._speed.speeds,
            store_bytes_per_s=0.0,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + scheduler.num_fetching,
            blocks_total=self.pool.num_blocks,
            blocks_free=self.pool.num_available,
            prefill_tokens_waiting=scheduler.pending[0],
            prefill_pairs_waiting=scheduler.pending[1],
        )


class VirtualCluster:
    """A dispatcher with ``num_workers`` such workers; needs a running event loop, whose time stands still."""

    def __init__(
        self,
        policy: str,
        num_workers: int,
        num_blocks: int,
        roles: Sequence[Role] = (Role.BOTH,),
        step_tokens: int = STEP_TOKENS,
    ) -> None:
        self.time = VirtualTime()
        metrics = ConductorMetrics(CollectorRegistry())
        policies = RoutingPolicies(policy, parse_weights(""))
        self.dispatcher = Dispatcher("conductor", policies, metrics, Limits(), self.time)
        self.model = self.dispatcher.registry.models["mock"] = ServedModel(_CARD)
        self.workers = [
            VirtualWorker(f"worker-{n}", num_blocks, self, roles[n % len(roles)], step_tokens)
            for n in range(num_workers)
        ]
        self.by_address = {str(worker.registered.instance.address): worker for worker in self.workers}
        for worker in self.workers:
            self.dispatcher.registry.workers[worker.registered.id] = worker.registered
            self.dispatcher.worker_up(worker.registered, SessionWelcome(worker.registered.id, 1, (), 0, WorkerLoad()))

    def ask(
        self, number: int, prompt: Tokens, num_tokens: int, ended: Callable[[int], None], **fields: Any
    ) -> TokenStream:
        """Submit a prompt with further ``fields``; ``ended`` hears how many of its tokens were cached."""
        request = GenerationRequest(
            RequestId(f"r{number}"), "mock", prompt, Sampling(), StopRule(num_tokens, ignore_eos=True), **fields
        )
        stream = self.dispatcher.submit(request, self.model, Arrivals())
        told = stream.end

        def end(how) -> None:
            told(how)
            assert how.error is None, how
            self.time.after(WIRE_S, lambda: ended(stream.cached_tokens))

        stream.end = end
        return stream

    def check(self) -> None:
        self.dispatcher.check()
        for worker in self.workers:
            worker.scheduler.check()
