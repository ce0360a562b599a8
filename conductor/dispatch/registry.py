"""The live workers: found by Discovery, connected by one session each, described once.

Owns one task per worker: describe, connect, pass every step to the listener; when the stream breaks, report it and
reconnect while the worker is registered. Decides nothing about requests.

A worker lost by Discovery while its stream continues (a draining worker; a restarting master) gets no new requests but
finishes its current ones, unless its stream is silent for ``SILENCE_S`` or two of its promised beats; a hung worker is
lost after that.

A worker whose engine is silent for too long (`deadlines.py`) loses its session, and is probed in the next one before it
gets requests again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence, Set
from typing import Protocol

import structlog

from tanghulu.auth.cluster_secret import NO_SECRET, ClusterSecret
from tanghulu.auth.credentials import NOTHING_TO_SHOW, Credentials
from tanghulu.conductor.dispatch.deadlines import LOOKS, Liveness
from tanghulu.conductor.dispatch.worker_session import AnySession, OpenEngine, WorkerSession, no_engines
from tanghulu.conductor.routing.profiles import NO_FILE, ProfileFile
from tanghulu.conductor.routing.worker_state import LoadTracker
from tanghulu.conductor.routing.worker_views import WorkerViews
from tanghulu.conductor.text.served_model import ServedModel
from tanghulu.discovery.base import WHOLE_REQUESTS, Discovery, EventKind, Instance, InstanceEvent
from tanghulu.errors import ModelNotFound, NodeUnavailable, Overloaded, TanghuluError
from tanghulu.runtime.tasks import cancelled
from tanghulu.session.messages import SessionWelcome, StepOutput
from tanghulu.session.model_card import ModelCard
from tanghulu.types import InstanceId, Place, Role

_log = structlog.get_logger(__name__)
SILENCE_S = 1.0
#: Beats of silence allowed to a leaving worker that promises beats: one beat may come a little late.
_SILENT_BEATS = 2
_RETRY_FIRST_S = 0.05
_RETRY_MOST_S = 1.0


class RegisteredWorker:
    """One registered worker. ``session`` is None while it is not connected."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.card: ModelCard | None = None
        self.model: ServedModel | None = None
        self.session: AnySession | None = None
        self.load = LoadTracker()
        self.load.keeps_requests = self.takes_whole_requests
        self.leaving = False
        self.last_error = ""
        self.task: asyncio.Task[None] | None = None
        self.silence: asyncio.TimerHandle | None = None
        self.responded = False
        self.beat_s = 0.0
        self.liveness: Liveness | None = None
        #: Set when the engine was silent, until a probe has succeeded.
        self.suspect = False
        #: Ends the session at its time limit.
        self.patience: asyncio.Timeout | None = None

    def __repr__(self) -> str:
        what = "leaving" if self.leaving else "connected" if self.session else "not connected"
        return f"<Worker {self.id} {self.role.value} {what}>"

    @property
    def id(self) -> InstanceId:
        return self.instance.id

    @property
    def role(self) -> Role:
        return self.instance.role

    @property
    def place(self) -> Place:
        return self.instance.place

    @property
    def usable(self) -> bool:
        return self.session is not None and not self.leaving

    @property
    def takes_whole_requests(self) -> bool:
        """Whether a request prefilled here must also decode here."""
        return WHOLE_REQUESTS in self.instance.attributes


class WorkerListener(Protocol):
    """Listener to worker events. All calls are synchronous and come from the event loop."""

    def worker_up(self, worker: RegisteredWorker, welcome: SessionWelcome) -> None:
        """Accept a worker whose session is open, so that it may be used."""

    def worker_step(self, worker: RegisteredWorker, step: StepOutput) -> None:
        """Process a step of the worker. Raises a TanghuluError to have the session replaced."""

    def worker_snapshot(self, worker: RegisteredWorker, welcome: SessionWelcome) -> None:
        """Process a snapshot requested from the worker."""

    def worker_lost(self, worker: RegisteredWorker, error: TanghuluError) -> None:
        """Process the end of a session: all its requests are gone. A new session may follow."""

    def busy_workers(self) -> Set[InstanceId]:
        """Return the workers that have requests."""


class Registry:
    """All workers and the models they serve."""

    def __init__(
        self,
        conductor_id: str,
        listener: WorkerListener,
        profiles: ProfileFile = NO_FILE,
        worker_timeout_s: float = 0.0,
        credentials: Credentials = NOTHING_TO_SHOW,
        secret: ClusterSecret = NO_SECRET,
        open_engine: OpenEngine = no_engines,
    ) -> None:
        self.workers: dict[InstanceId, RegisteredWorker] = {}
        self.models: dict[str, ServedModel] = {}
        self.model_known = asyncio.Event()
        self.synced = False
        self._conductor_id = conductor_id
        self._listener = listener
        self._profiles = profiles
        self._worker_timeout_s = worker_timeout_s
        self._credentials = credentials
        self._secret = secret
        self._open_engine = open_engine
        self._ending: set[asyncio.Task[None]] = set()
        self._views: dict[str, WorkerViews[RegisteredWorker]] = {}
        self._least_context: dict[str, int] = {}

    async def follow(self, discovery: Discovery, namespace: str) -> None:
        """Follow the arrival and departure of workers until cancelled."""
        async for event in discovery.watch(Role.PREFILL, Role.DECODE, Role.BOTH, namespace=namespace):
            self.apply(event)

    async def watch_engines(self) -> None:
        """End the sessions of workers whose engines have been silent for too long, until cancelled."""
        while self._worker_timeout_s:
            await asyncio.sleep(self._worker_timeout_s / LOOKS)
            now_s, busy = asyncio.get_running_loop().time(), self._listener.busy_workers()
            for worker in list(self.workers.values()):
                if worker.liveness is not None and worker.liveness.look(now_s, worker.id in busy):
                    worker.suspect, worker.liveness = True, None
                    assert worker.patience is not None
                    worker.patience.reschedule(now_s)

    def apply(self, event: InstanceEvent) -> None:
        if event.kind is EventKind.SYNCED:
            self.synced = True
        elif event.instance is not None and event.kind is EventKind.PUT:
            self._put(event.instance)
        elif event.instance is not None:
            self._leave(event.instance.id)

    def serves(self, model: ServedModel) -> bool:
        """Return False once other workers serve another model under its name; its requests cannot continue there."""
        return self.models.get(model.card.model) is model

    def usable(self, model: ServedModel) -> Sequence[RegisteredWorker]:
        """Return the workers that serve ``model`` itself, not another of the same name, and accept requests."""
        return self.views(model).workers

    def views(self, model: ServedModel) -> WorkerViews[RegisteredWorker]:
        """Return ``usable`` with their views; cached until a worker comes or goes, as it is requested every time."""
        if not self.serves(model):
            return WorkerViews([])
        views = self._views.get(model.card.model)
        if views is None:
            views = self._views[model.card.model] = WorkerViews(self._find_usable(model))
        return views

    def too_short(self, model: ServedModel, num_tokens: int) -> Set[InstanceId]:
        """Return the workers of ``model`` whose own context cannot hold ``num_tokens`` and one more."""
        if num_tokens < self._least_context.get(model.card.model, 0):
            return frozenset()
        return {w.id for w in self.usable(model) if w.card is not None and num_tokens >= w.card.context_length}

    def find_model(self, name: str | None) -> ServedModel:
        """Return the model called ``name``, or the first one served if None.

        Raises ModelNotFound, or NodeUnavailable while no model is known at all.
        """
        if not self.models:
            raise NodeUnavailable("no worker has registered a model yet; start one")
        if name in self.models:
            return self.models[name]
        served = self.served() or list(self.models.values())
        if name is None:
            return served[0]
        names = ", ".join(model.card.model for model in served)
        raise ModelNotFound(f"the model {name!r} does not exist; this cluster serves {names}")

    def served(self) -> list[ServedModel]:
        """Return the models served by at least one registered worker; others are kept for requests in progress."""
        served = {worker.model for worker in self.workers.values()}
        return [model for model in self.models.values() if model in served]

    async def drop_caches(self) -> int:
        """Have every connected worker drop its cache; return the number of blocks. Raises NodeUnavailable."""
        sessions = [w.session for w in self.workers.values() if w.session is not None]
        return sum(await asyncio.gather(*(session.drop_cache() for session in sessions)))

    def request_snapshots(self) -> None:
        for worker in self.workers.values():
            if worker.session is not None:
                with contextlib.suppress(Overloaded):  # it takes no messages now; retried next time
                    worker.session.request_snapshot()

    async def close(self) -> None:
        tasks = [w.task for w in self.workers.values() if w.task is not None] + list(self._ending)
        for worker in self.workers.values():
            self._calm(worker)
        self.workers.clear()
        self._views.clear()
        await cancelled(*tasks)

    def check(self) -> None:
        for name, views in self._views.items():
            assert views.workers == self._find_usable(self.models[name])
            views.check()
        for worker_id, worker in self.workers.items():
            assert worker.id == worker_id
            assert worker.session is None or (worker.card is not None and worker.model is not None)
            worker.load.check()

    def _find_usable(self, model: ServedModel) -> list[RegisteredWorker]:
        return [w for w in self.workers.values() if w.usable and w.model is model]

    def _changed(self) -> None:
        """Drop everything derived from the set of usable workers, and recompute the models' contexts."""
        self._views.clear()
        for name, model in self.models.items():
            contexts = [w.card.context_length for w in self._find_usable(model) if w.card is not None]
            if contexts:
                self._least_context[name] = min(contexts)
                model.set_context_length(max(contexts))

    # --- arrival and departure

    def _put(self, instance: Instance) -> None:
        known = self.workers.get(instance.id)
        if known is not None and known.instance.address == instance.address:
            if known.leaving:
                _log.info("worker.registered_again", worker=instance.id)
            known.instance, known.leaving = instance, False
            known.load.renew()
            self._changed()
            self._calm(known)
            return
        if known is not None:
            self._end(known)
        worker = self.workers[instance.id] = RegisteredWorker(instance)
        worker.task = asyncio.create_task(self._serve(worker), name=f"worker {instance.id}")

    def _leave(self, worker_id: InstanceId) -> None:
        worker = self.workers.get(worker_id)
        if worker is None:
            return
        if worker.session is None or worker_id not in self._listener.busy_workers():
            self._end(worker)
            return
        _log.info("worker.leaving", worker=worker_id)
        worker.leaving, worker.responded = True, False
        self._changed()
        self._watch_silence(worker)

    def _watch_silence(self, worker: RegisteredWorker) -> None:
        self._calm(worker)
        patience_s = max(SILENCE_S, _SILENT_BEATS * worker.beat_s)
        worker.silence = asyncio.get_running_loop().call_later(patience_s, self._after_silence, worker)

    def _after_silence(self, worker: RegisteredWorker) -> None:
        is_busy = worker.id in self._listener.busy_workers()
        if worker.responded and is_busy:
            worker.responded = False
            self._watch_silence(worker)
        else:
            worker.suspect = is_busy
            self._end(worker)

    def _calm(self, worker: RegisteredWorker) -> None:
        if worker.silence is not None:
            worker.silence.cancel()
            worker.silence = None

    def _end(self, worker: RegisteredWorker) -> None:
        """Forget the worker; its task notifies the listener when it ends."""
        self._calm(worker)
        worker.leaving = True
        self.workers.pop(worker.id, None)
        self._changed()
        if worker.task is not None:
            self._ending.add(worker.task)
            worker.task.add_done_callback(self._ending.discard)
            worker.task.cancel()

    # --- one worker's task

    async def _serve(self, worker: RegisteredWorker) -> None:
        retry_s = _RETRY_FIRST_S
        while True:
            try:
                error = await self._one_session(worker)
            except Exception as broken:  # noqa: BLE001 - must not leave the worker without a session for ever
                _log.exception("worker.session_broken", worker=worker.id)
                error = NodeUnavailable(f"the conductor could not go on with the session: {broken!r}")
            retry_s = _RETRY_FIRST_S if worker.responded else min(2 * retry_s, _RETRY_MOST_S)
            worker.responded = False
            if error.message != worker.last_error:
                _log.warning("worker.session_ended", worker=worker.id, code=error.code, error=error.message)
            worker.last_error = error.message
            if worker.leaving:
                self._calm(worker)
                self.workers.pop(worker.id, None)
                return
            await asyncio.sleep(retry_s)

    async def _one_session(self, worker: RegisteredWorker) -> TanghuluError:
        """Connect and listen until the session ends; return the reason."""
        session = self._open_engine(worker.instance) or self._open(worker.instance)
        error: TanghuluError = NodeUnavailable(f"worker {worker.id} is no longer registered")
        try:
            await self._describe(worker, session)
            welcome = await session.connect()
            if worker.suspect:
                await session.probe(self._worker_timeout_s)
                worker.suspect = False
            self._begin(worker, session, welcome)
            error = await self._listen(worker, session)
        except TanghuluError as caught:
            error = caught
        except Exception as caught:
            error = NodeUnavailable(f"the conductor could not go on with the session of {worker.id}: {caught!r}")
            raise
        finally:
            try:
                worker.liveness = None
                if worker.session is not None:
                    worker.session = None
                    self._changed()
                    self._listener.worker_lost(worker, error)
            finally:
                await session.close()
        return error

    def _open(self, instance: Instance) -> AnySession:
        return WorkerSession(instance.address, self._conductor_id, self._credentials)

    async def _listen(self, worker: RegisteredWorker, session: AnySession) -> TanghuluError:
        """Pass on the worker's messages until its engine is silent for too long. Raises any other end of session."""
        loop, liveness = asyncio.get_running_loop(), worker.liveness
        try:
            async with asyncio.timeout(None) as worker.patience, contextlib.aclosing(session.steps()) as steps:
                async for message in steps:
                    worker.responded = True
                    if liveness is not None:
                        liveness.on_step(loop.time())
                    if isinstance(message, SessionWelcome):
                        self._listener.worker_snapshot(worker, message)
                    else:
                        self._listener.worker_step(worker, message)
        except TimeoutError:
            assert liveness is not None, "nobody else ends its patience"
            _log.warning("worker.silent", worker=worker.id, seconds=liveness.limit_s)
        return NodeUnavailable(
            f"worker {worker.id} sent no step for {self._worker_timeout_s:g} s; if its steps take that long, raise "
            "--worker-timeout-s"
        )

    def _begin(self, worker: RegisteredWorker, session: AnySession, welcome: SessionWelcome) -> None:
        if welcome.instance_id != worker.id:
            raise NodeUnavailable(
                f"worker {welcome.instance_id} answers at {worker.instance.address}, where {worker.id} is registered"
            )
        worker.session, worker.last_error, worker.beat_s = session, "", welcome.beat_s
        if self._worker_timeout_s:
            now_s = asyncio.get_running_loop().time()
            worker.liveness = Liveness(self._worker_timeout_s, welcome.beat_s, now_s)
        self._changed()
        worker.load.reset(welcome.load)
        _log.info("worker.connected", worker=worker.id, role=worker.role.value, blocks=len(welcome.cached_blocks))
        self._listener.worker_up(worker, welcome)

    async def _describe(self, worker: RegisteredWorker, session: AnySession) -> None:
        """Fetch the worker's current model card.

        Raises NodeUnavailable if other workers serve a different model under its name, or if its cluster secret differs
        from this conductor's: the two would give each block different names.
        """
        card = await session.describe()
        if card.secret_check != self._secret.check_value:
            theirs = "another cluster secret than" if card.secret_check else "no cluster secret, unlike"
            theirs = theirs if self._secret else "a cluster secret, unlike"
            raise NodeUnavailable(
                f"worker {worker.id} has {theirs} this conductor: start both with the same --cluster-secret"
            )
        worker.card, worker.model = card, await self._model_of(worker, card)
        worker.load.known, worker.load.block_tokens = self._profiles.of(card.model), card.block_tokens

    async def _model_of(self, worker: RegisteredWorker, card: ModelCard) -> ServedModel:
        """Return the model described by ``card``: an existing one, or a new one where no other worker serves it."""
        made: ServedModel | None = None
        while True:
            known = self.models.get(card.model)
            if known is not None and not await self._differs(worker, card, known):
                return known
            if made is None:  # a large tokenizer takes a second to load: check again afterwards
                made = await asyncio.to_thread(ServedModel, card, self._secret.naming_key)
            elif self.models.get(card.model) is known:
                self.models[card.model] = made
                self._changed()
                self.model_known.set()
                if known is not None:
                    _log.warning("model.replaced", model=card.model, worker=worker.id)
                return made

    async def _differs(self, worker: RegisteredWorker, card: ModelCard, known: ServedModel) -> bool:
        """Return whether ``card`` describes another model than ``known``, which no other worker serves any more.

        Raises NodeUnavailable if others do: KV, tokens and text of two models must never be mixed.
        """
        differences = await asyncio.to_thread(known.differences, card) if card != known.card else []
        others = [w.id for w in self.usable(known) if w is not worker]
        if differences and others:
            raise NodeUnavailable(
                f"worker {worker.id} serves {card.model} with another {', '.join(differences)} than {', '.join(others)}"
            )
        return bool(differences)
