"""Driver of lifecycle and policy: carries out their instructions at the workers, and feeds back the results.

Owns the requests in progress: the queue, its deadline, and the mapping of submissions to requests. Only synchronous
calls; everything runs in the event loop between two awaits, so no state is ever seen half changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from typing import Any

import structlog

from tanghulu.auth.cluster_secret import NO_SECRET, ClusterSecret
from tanghulu.auth.credentials import NOTHING_TO_SHOW, Credentials
from tanghulu.conductor.dispatch.admission import forecast
from tanghulu.conductor.dispatch.deadlines import Deadlines
from tanghulu.conductor.dispatch.entry import Limits, PromptExplainer, RequestEntry
from tanghulu.conductor.dispatch.lifecycle import (
    AbortAt,
    DeliverScores,
    DeliverTokens,
    End,
    Flight,
    FlightState,
    Instruction,
    Loss,
    PickDecode,
    PickPull,
    PullTo,
    Release,
    Requeue,
    SubmitTo,
)
from tanghulu.conductor.dispatch.queue import WaitingQueue
from tanghulu.conductor.dispatch.registry import RegisteredWorker, Registry
from tanghulu.conductor.dispatch.request_counts import NOTHING_TO_CONTINUE, RequestCounts, status_of
from tanghulu.conductor.dispatch.router import RoutedRequest, Router
from tanghulu.conductor.dispatch.token_stream import Arrivals, TokenStream
from tanghulu.conductor.dispatch.worker_session import OpenEngine, no_engines
from tanghulu.conductor.index.events import CacheMirror
from tanghulu.conductor.index.hot_prefixes import HotPrefixes
from tanghulu.conductor.metrics import ConductorMetrics
from tanghulu.conductor.peers.inbox import PeerRequests
from tanghulu.conductor.peers.outbox import NOBODY, Begun, OwnRequests
from tanghulu.conductor.routing.overrides import RoutingPolicies
from tanghulu.conductor.routing.requests import GenerationRequest, PromptLogprobs
from tanghulu.conductor.routing.worker_state import LoadTracker
from tanghulu.conductor.stories.book import StoryBook
from tanghulu.conductor.stories.recorder import EndedRequest
from tanghulu.conductor.text.served_model import ServedModel
from tanghulu.errors import DeadlineExceeded, NodeUnavailable, Overloaded, TanghuluError
from tanghulu.runtime.clock import Clock
from tanghulu.session.messages import SessionWelcome, StepOutput
from tanghulu.session.outputs import FinishReason, KvSource, Output
from tanghulu.types import InstanceId, Place, RequestId

_log = structlog.get_logger(__name__)
#: Pause before resending a request that was refused more than once.
_REFUSED_PAUSE_S = 0.1


class Dispatcher:
    """Accepts requests and returns token streams. Also the registry's listener."""

    def __init__(
        self,
        conductor_id: str,
        policies: RoutingPolicies,
        metrics: ConductorMetrics,
        limits: Limits,
        clock: Clock,
        place: Place = Place(),
        credentials: Credentials = NOTHING_TO_SHOW,
        *,
        secret: ClusterSecret = NO_SECRET,
        open_engine: OpenEngine = no_engines,
    ) -> None:
        timeout_s = limits.worker_timeout_s
        self.registry = Registry(conductor_id, self, limits.profiles, timeout_s, credentials, secret, open_engine)
        self.mirror = CacheMirror()
        self.router = Router(self.registry, self.mirror, policies, place, HotPrefixes(limits.hot_prefix_rate))
        self.own = OwnRequests()
        self.peers = PeerRequests(self.router.in_flight, self._load_of)
        self.stories = StoryBook(metrics.phases)
        self.explainer: PromptExplainer | None = None
        #: Called with each request that has ended.
        self.when_ended: list[Callable[[EndedRequest], object]] = []
        self._metrics = metrics
        self._limits = limits
        self.clock = clock
        self._entries: dict[RequestId, RequestEntry] = {}
        self._queue: WaitingQueue[RequestEntry] = WaitingQueue(limits.order)
        self._submissions: dict[str, RequestEntry] = {}

    # --- called by the HTTP layer

    @property
    def num_requests(self) -> int:
        return len(self._entries)

    @property
    def num_waiting(self) -> int:
        """Number of requests in the conductor's own queue."""
        return len(self._queue)

    def flights(self) -> list[dict[str, Any]]:
        """Return the requests in progress, for people, oldest first."""
        now_s = self.clock.now_s()
        return [entry.shown(now_s) for entry in self._entries.values()]

    def submit(self, request: GenerationRequest, model: ServedModel, arrivals: Arrivals, name: str = "") -> TokenStream:
        """Submit ``request``, named ``name`` by its client; return its token stream, which signals ``arrivals``.

        Unless this raises, the caller ends the request's story once the answer has been sent.

        Raises Overloaded if the queue is full, InvalidRequest for routing overrides that cannot be met.
        """
        assert request.id not in self._entries, f"request id {request.id} is in use"
        self.router.check_overrides(request.routing)
        now_s, timeouts = self.clock.now_s(), request.timeouts.within(self._limits.timeouts)
        flight = Flight(request, self._limits.moves)
        served = model.card.model
        story = self.stories.begin(request.id, name, served, len(request.prompt), now_s, request.origin)
        counts = RequestCounts(self._metrics, flight, served, now_s)
        entry = RequestEntry(
            flight, model, TokenStream(arrivals, story), story, counts, now_s, Deadlines(timeouts, now_s)
        )
        self._entries[request.id] = entry
        self._watch(entry)
        with self._alone(entry):
            self._enqueue(entry, front=False)
        self._pump()
        if len(self._queue) > self._limits.max_queued and request.id in self._queue:
            error = Overloaded(f"{len(self._queue) - 1} requests are waiting already; try again later")
            self._perform(entry, flight.fail(error))
            self.stories.over(story, self.clock.now_s())
            raise error
        return entry.stream

    def abort(self, request_id: RequestId) -> bool:
        """End a request on demand; False if it is not, or no longer, in progress."""
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        self._perform(entry, entry.flight.abort())
        self._pump()
        return True

    def finish_at_stop_string(self, request_id: RequestId) -> None:
        """End a request whose text contains a stop string; no error if it has already ended."""
        entry = self._entries.get(request_id)
        if entry is not None:
            self._perform(entry, entry.flight.on_stop_string())
            self._pump()

    def fail_all(self, error: TanghuluError) -> None:
        for entry in list(self._entries.values()):
            with self._alone(entry):
                self._perform(entry, entry.flight.fail(error))

    # --- events from workers (WorkerListener)

    def worker_up(self, worker: RegisteredWorker, welcome: SessionWelcome) -> None:
        """Copy the worker's cache contents from its welcome, and send requests waiting for a worker."""
        self.mirror.welcome(worker.id, welcome)
        if self.explainer is not None:
            self.explainer.joined(welcome.cached_blocks)
        self._metrics.workers.labels(worker.role.value).inc()
        self._pump()

    def worker_step(self, worker: RegisteredWorker, step: StepOutput) -> None:
        """Hand each request its part of the step."""
        now_s = self.clock.now_s()
        for output in step.outputs:
            if output.source is not None and output.finish is None:  # the prefill continues
                self._pass_on(output.request_id, partial(Flight.on_export, source=output.source))
                continue
            worker.load.on_report(output.request_id)
            self.router.on_tokens(output.request_id, len(output.tokens))
            self.own.prefilled(output.request_id)
            entry = self._submissions.get(output.request_id)
            if entry is not None:
                if output.tokens or output.phases is not None:
                    self._observe(entry, output, now_s)
                with self._alone(entry):
                    self._perform(entry, entry.flight.on_output(output))
            elif output.source is not None:  # the request ended while the hand-over was in transit
                self._release(worker.id, output.source.export_id)
        for scores in step.scores:
            self._pass_on(scores.request_id, partial(Flight.on_scores, scores=PromptLogprobs.of(scores)))
        if step.load is not None:
            worker.load.report(step.load, step.submits_taken)
            self.router.note_reads(worker, step.load.reads)
        if step.kv_events and not self.mirror.worker_events(worker.id, step.event_sequence, step.kv_events):
            assert worker.session is not None, "it has just spoken"
            worker.session.request_snapshot()
        if self._queue:
            self._pump()

    def _pass_on(self, wire_id: str, on_flight: Callable[[Flight], Sequence[Instruction]]) -> None:
        entry = self._submissions.get(wire_id)
        if entry is not None:
            with self._alone(entry):
                self._perform(entry, on_flight(entry.flight))

    def worker_snapshot(self, worker: RegisteredWorker, welcome: SessionWelcome) -> None:
        self.mirror.snapshot(worker.id, welcome)

    def worker_lost(self, worker: RegisteredWorker, error: TanghuluError) -> None:
        """Move all requests of the worker to other workers."""
        self._metrics.workers.labels(worker.role.value).dec()
        self.mirror.worker_gone(worker.id)
        loss = Loss.SILENCE if worker.suspect else Loss.ORDERLY if worker.leaving else Loss.DEATH
        for entry in [e for e in self._submissions.values() if e.flight.worker == worker.id]:
            with self._alone(entry):
                self._perform(entry, entry.flight.on_worker_lost(error, loss))
        self._pump()

    def busy_workers(self) -> Set[InstanceId]:
        return {e.flight.worker for e in self._submissions.values() if e.flight.worker is not None}

    def check(self) -> None:
        for request_id, entry in self._entries.items():
            entry.flight.check()
            assert entry.flight.request.id == request_id
            assert not entry.flight.ended
            assert (request_id in self._queue) == (entry.flight.state is FlightState.QUEUED)
            assert (entry.deadline is not None) == (request_id in self._queue)
        live = {e.flight.wire_id: e for e in self._entries.values() if e.flight.wire_id}
        assert live == self._submissions
        assert all(e.wire_id == wire_id for wire_id, e in self._submissions.items())
        self._queue.check()
        self.registry.check()
        self.mirror.check()
        self.router.check()
        self.own.check()
        self.peers.check()
        self.stories.check()
        assert len(self.own) == len(self._submissions)
        assert len(self.router.in_flight) <= len(self._submissions) + len(self.peers)

    def observe(self) -> None:
        self._metrics.index_blocks.labels("workers").set(self.mirror.workers.num_blocks)
        self._metrics.index_blocks.labels("store").set(self.mirror.store.num_blocks)
        self._metrics.index_lag.set(self.mirror.events.waiting_blocks)
        self._metrics.queued.set(len(self._queue))
        self._metrics.in_flight.set(len(self._submissions))
        self._metrics.peer_requests.set(len(self.peers))

    # --- the queue

    def _enqueue(self, entry: RequestEntry, front: bool) -> None:
        request, sjf = entry.flight.request, self._limits.order.name == "sjf"
        prefill_s = self.router.rest_s(entry.flight, entry.model) if sjf and not front else 0.0
        client = None if front else request.client
        self._queue.push(request.id, entry, entry.arrived_s, request.priority, prefill_s, client, request.weight)
        waited_s = self.clock.now_s() - entry.refused_s if entry.refused_s is not None else 0.0
        wait_s = max(0.0, self._limits.queue_timeout_s - waited_s)
        entry.deadline = asyncio.get_running_loop().call_later(wait_s, self._expire, entry)

    def _leave_queue(self, entry: RequestEntry) -> None:
        self._queue.discard(entry.flight.request.id)
        if entry.deadline is not None:
            entry.deadline.cancel()
            entry.deadline = None

    def _expire(self, entry: RequestEntry) -> None:
        model, waited_s = entry.model, self._limits.queue_timeout_s
        error: TanghuluError = Overloaded(f"no place became free within {waited_s:g} s; try again later")
        if not self.registry.usable(model):
            error = NodeUnavailable(f"no worker that serves {model.card.model} was there for {waited_s:g} s; start one")
        self._perform(entry, entry.flight.fail(error))

    def _watch(self, entry: RequestEntry) -> None:
        """Check the request again at its next deadline. Further tokens move deadlines, but not the timer."""
        if entry.alarm is not None:
            entry.alarm.cancel()
            entry.alarm = None
        due_s = entry.deadlines.due_s
        if not math.isinf(due_s):
            wait_s = due_s - self.clock.now_s()
            entry.alarm = asyncio.get_running_loop().call_later(wait_s, self._look_at_deadlines, entry)

    def _look_at_deadlines(self, entry: RequestEntry) -> None:
        entry.alarm = None
        if missed := entry.deadlines.missed(self.clock.now_s()):
            self._perform(entry, entry.flight.fail(DeadlineExceeded(missed)))
            self._pump()
        else:
            self._watch(entry)

    def _pump(self) -> None:
        """Submit all eligible requests in queue order. A model without workers does not hold up the others."""
        if len(self._submissions) >= self._limits.max_in_flight:
            return
        now_s = self.clock.now_s()
        for entry in self._queue:
            if len(self._submissions) >= self._limits.max_in_flight:
                return
            if entry.flight.state is FlightState.QUEUED and entry.not_before_s <= now_s:
                with self._alone(entry):
                    self._dispatch(entry)

    def _dispatch(self, entry: RequestEntry) -> None:
        flight = entry.flight
        if not self.registry.serves(entry.model):
            name = entry.model.card.model
            error = NodeUnavailable(f"{name} was replaced by another model of that name; send the request again")
            self._perform(entry, flight.fail(error))
            return
        if not self.registry.usable(entry.model):
            return
        began_s = self.clock.now_s()
        route = self.router.choose(flight, entry.model)
        if route.decision is None:
            return
        entry.story.routed(began_s)
        self._queue.take(flight.request.id)
        self._leave_queue(entry)
        prefill, decode = route.decision.prefill, route.decision.decode
        _log.debug("request.dispatched", request=flight.request.id, prefill=prefill, decode=decode)
        if not flight.generated and (objection := self._objection(entry, route)):
            self._perform(entry, flight.fail(Overloaded(f"{objection}; try again later")))
            return
        if self.explainer is not None and not flight.generated:
            entry.asked = self.explainer.routed(entry.asked, flight, entry.model, route)
        entry.rest_tokens, entry.num_blocks = route.rest_tokens, route.request.num_blocks
        entry.holder, entry.holders = self.router.holder_of(route), route.hits.workers
        self.router.note_fetch(route, flight, entry.model, self.clock.now_s())
        if decode != prefill:
            self.registry.workers[decode].load.reserve_decode(flight.request.id, entry.num_blocks)
            entry.reserved = decode
        self._perform(entry, flight.submit(prefill, decode))

    def _objection(self, entry: RequestEntry, route: RoutedRequest) -> str:
        """Return the reason to refuse a request that has not started yet, or "" if it may be sent."""
        assert route.decision is not None
        if not self._limits.admission:
            return ""
        seen = forecast(route.request, route.workers, route.decision)
        return self._limits.admission.objection(seen, self.clock.now_s() - entry.arrived_s)

    # --- carrying out instructions

    @contextlib.contextmanager
    def _alone(self, entry: RequestEntry) -> Iterator[None]:
        """Fail only this request if the block raises: the caller acts for another client, or for a worker."""
        try:
            yield
        except Exception as raised:  # noqa: BLE001 - passed to the client; untyped ones are logged
            flight = entry.flight
            error = raised if isinstance(raised, TanghuluError) else TanghuluError(f"the conductor failed: {raised!r}")
            if error is not raised:
                _log.exception("request.broken", request=flight.request.id, state=flight.state.name)
            if flight.request.id in self._entries:
                self._perform(entry, [End(None, error)] if flight.ended else flight.fail(error))

    def _perform(self, entry: RequestEntry, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case DeliverTokens():
                    entry.stream.deliver(instruction)
                case DeliverScores(scores):
                    entry.stream.deliver_scores(scores)
                case SubmitTo():
                    self._submit_to(entry, instruction)
                case PickPull(source):
                    self._pick_pull(entry, source)
                case PickDecode():
                    self._pick_decode(entry)
                case AbortAt() | Release() | PullTo():
                    self._tell(entry, instruction)
                case Requeue():
                    self._requeue(entry, instruction)
                case End():
                    self._end(entry, instruction)

    def _tell(self, entry: RequestEntry, what: AbortAt | Release | PullTo) -> None:
        match what:
            case AbortAt(worker, wire_id):
                self._abort_at(worker, wire_id)
            case Release(worker, export_id):
                self._release(worker, export_id)
            case PullTo():
                self._pull_to(entry, what)

    def _submit_to(self, entry: RequestEntry, to: SubmitTo) -> None:
        flight, worker = entry.flight, self.registry.workers[to.worker]
        assert worker.session is not None, "a policy only sees connected workers"
        self._untrack(entry)
        self._submissions[to.wire_id] = entry
        entry.wire_id = to.wire_id
        entry.story.sent(worker.id, self.clock.now_s())
        flight.counts_late = worker.session.counts_late
        entry.counts.exactness = worker.session.exactness(flight.request) if flight.generated else NOTHING_TO_CONTINUE
        worker.load.sent(to.wire_id, entry.rest_tokens, entry.num_blocks)
        hashes = self.router.sent(to.wire_id, worker, flight, entry.model, to.hand_over)
        decode = entry.reserved or NOBODY
        self.own.began(Begun(to.wire_id, worker.id, entry.rest_tokens, entry.num_blocks, hashes, decode))
        try:
            tokens = flight.all_tokens()
            number = worker.session.submit(flight.remainder, to, tokens, entry.holder, flight.was_moved)
            worker.load.numbered(to.wire_id, number)
        except Overloaded as error:
            worker.load.on_report(to.wire_id)
            if to.ahead:
                self._abort_at(to.worker, to.ahead)
            self._perform(entry, flight.on_worker_lost(error, Loss.REFUSED))

    def _pick_pull(self, entry: RequestEntry, source: KvSource) -> None:
        """Start the pull at the worker reserved for the request, which continues there if the worker is still up."""
        worker = self.registry.workers.get(entry.reserved) if entry.reserved is not None else None
        if worker is not None and worker.usable:
            self._perform(entry, entry.flight.pull_at(worker.id, source))

    def _pull_to(self, entry: RequestEntry, to: PullTo) -> None:
        flight, session = entry.flight, self.registry.workers[to.worker].session
        assert session is not None, "it was usable a moment ago"
        with contextlib.suppress(Overloaded):  # the KV is fetched at hand-over
            session.pull(to.name, flight.all_tokens(), flight.request.salt, to.source)

    def _pick_decode(self, entry: RequestEntry) -> None:
        self._metrics.hand_overs.inc()
        entry.story.handed_over(self.clock.now_s())
        reserved = entry.reserved
        self._withdraw(entry)
        worker, entry.holder = self.router.decode_worker(entry.flight, entry.model, reserved, entry.holders)
        if worker is None:
            lost = NodeUnavailable("no worker is left that could decode")
            self._perform(entry, entry.flight.on_worker_lost(lost, Loss.TROUBLE))
            return
        entry.rest_tokens = 1
        self._perform(entry, entry.flight.decode_at(worker))

    def _abort_at(self, worker_id: InstanceId, wire_id: str) -> None:
        worker = self.registry.workers.get(worker_id)
        if worker is not None and worker.session is not None:
            worker.load.on_report(wire_id)
            with contextlib.suppress(Overloaded):  # a worker that takes no messages keeps computing, to no effect
                worker.session.abort(wire_id)

    def _release(self, worker_id: InstanceId, export_id: int) -> None:
        worker = self.registry.workers.get(worker_id)
        if worker is not None and worker.session is not None:
            with contextlib.suppress(Overloaded):  # the worker drops an export by itself, after a while
                worker.session.release(export_id)

    def _requeue(self, entry: RequestEntry, why: Requeue) -> None:
        flight, now_s, reason = entry.flight, self.clock.now_s(), why.reason
        _log.info(
            "request.redispatched",
            request=flight.request.id,
            loss=why.loss.name.lower(),
            reason=reason.message,
            tokens=len(flight.generated),
        )
        entry.story.lost(now_s)
        self._untrack(entry)
        self._withdraw(entry)
        if why.loss is Loss.REFUSED:
            self._postpone(entry, now_s)
        else:
            entry.counts.lost(now_s)
            entry.refused_s, entry.num_refusals, entry.not_before_s = None, 0, 0.0
        self._enqueue(entry, front=True)

    def _postpone(self, entry: RequestEntry, now_s: float) -> None:
        """Send a refused request again: at once while another worker is left to try, else after a pause."""
        if entry.refused_s is None:
            entry.refused_s = now_s
        entry.num_refusals += 1
        pause_s = _REFUSED_PAUSE_S if entry.num_refusals > 1 else 0.0
        entry.not_before_s = now_s + pause_s
        asyncio.get_running_loop().call_later(pause_s, self._pump)

    def _end(self, entry: RequestEntry, end: End) -> None:
        flight, story, now_s = entry.flight, entry.story, self.clock.now_s()
        self._leave_queue(entry)
        if entry.alarm is not None:
            entry.alarm.cancel()
            entry.alarm = None
        self._untrack(entry)
        self._withdraw(entry)
        if flight.generated:
            self.router.output.ended(len(flight.generated), flight.known_blocks)
        self._entries.pop(flight.request.id, None)
        entry.stream.cached_tokens = flight.cached_tokens or 0
        entry.stream.end(end)
        if self.when_ended and flight.num_submissions:
            ended = entry.as_ended(now_s)
            for listener in self.when_ended:
                listener(ended)
        entry.counts.ended(end, now_s)
        if self.explainer is not None and entry.asked is not None:
            failed = status_of(end).name.lower() if end.error or end.reason is FinishReason.ABORTED else ""
            story.explanation = self.explainer.ended(entry.asked, flight, entry.model, failed)
        story.cached_tokens, story.generated_tokens = flight.cached_tokens or 0, len(flight.generated)
        story.ended(status_of(end), now_s, end.error.code.lower() if end.error is not None else "")
        _log.debug("request.ended", request=flight.request.id, state=flight.state.name, tokens=len(flight.generated))

    def _withdraw(self, entry: RequestEntry) -> None:
        """Release the decode slot reserved for the request: another worker is chosen, or none is needed."""
        worker = self.registry.workers.get(entry.reserved) if entry.reserved is not None else None
        if worker is not None:
            worker.load.release_decode(entry.flight.request.id)
        entry.reserved = None

    def _untrack(self, entry: RequestEntry) -> None:
        self._submissions.pop(entry.wire_id, None)
        self.router.ended(entry.wire_id)
        self.own.freed(entry.wire_id)
        entry.wire_id = ""

    def _observe(self, entry: RequestEntry, output: Output, now_s: float) -> None:
        entry.story.report(now_s, output.phases)
        if not output.tokens:
            return
        is_first = entry.counts.tokens(len(output.tokens), now_s)
        entry.deadlines.came(now_s)
        entry.refused_s, entry.num_refusals = None, 0
        if is_first:  # the next deadline may be earlier now
            self._watch(entry)

    def _load_of(self, worker_id: InstanceId) -> LoadTracker | None:
        worker = self.registry.workers.get(worker_id)
        return worker.load if worker is not None else None
