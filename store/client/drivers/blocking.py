"""The blocking driver: runs the client's logic with blocking sockets, in the caller's own thread.

Every calling thread takes a connection of its own from the pool of its peer and puts it back, so threads do not wait
for each other. Calls to one peer are pipelined; several peers are called in parallel, each by a thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate

from tanghulu.errors import (
    InvalidRequest,
    NodeUnavailable,
    TanghuluError,
)
from tanghulu.rpc.fast_client import FastConnection, SentCall
from tanghulu.rpc.greeting import greet_blocking
from tanghulu.store.client.drivers.connections import (
    OtherNode,
    Target,
    late_replies,
    warn_unclosed,
)
from tanghulu.store.client.drivers.driver import Driver, Outcome, P, T
from tanghulu.store.client.drivers.late_leases import LateLeases
from tanghulu.store.client.logic import messages
from tanghulu.store.client.logic.context import Context, no_flush
from tanghulu.store.client.logic.effects import (
    MASTER,
    CallPeers,
    Deadline,
    Effect,
    Logic,
    NodeLink,
    Notify,
    OpenSegment,
    PeerId,
    Sleep,
    Transfer,
    is_master,
)
from tanghulu.store.client.logic.messages import AnyCall
from tanghulu.store.client.settings import Settings
from tanghulu.store.protocol.messages import Welcome
from tanghulu.transfer_engine.engine import TransferBatch, TransferEngine, TransferRequest

#: Connections kept open to one peer; further threads open and close their own.
MAX_IDLE = 16
_MAX_THREADS = 16
#: Broken connections kept for their late replies; beyond it the oldest is closed, and leases granted by it
#: last until this client's session ends.
MAX_LATE_CONNECTIONS = 256
#: Time for a connection even after the deadline; 0 would mean that it must not wait at all.
MIN_CONNECT_S = 0.001


@dataclass(slots=True)
class _Begun:
    """A call that was sent, or the reason why it was not."""

    peer: PeerId
    pending: SentCall[Any] | TanghuluError


class BlockingDriver(Driver):
    """Performs effects. Every method may be called from any thread."""

    connect = "tanghulu.connect"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.context.flush = self.flush
        self._idle: dict[PeerId, deque[FastConnection]] = {}
        self._late: deque[tuple[PeerId, FastConnection]] = deque()  # from which late replies are expected
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def perform(
        self,
        seconds: float | None,
        operation: Callable[Concatenate[Context, Deadline, P], Logic[T]],
        *args: P.args,
        **named: P.kwargs,
    ) -> T:
        """Run ``operation`` with a deadline of ``seconds``."""
        deadline = self.deadline(seconds)
        return self.run(operation(self.context, deadline, *args, **named), deadline)

    def run(self, logic: Logic[T], deadline: Deadline) -> T:
        """Drive ``logic`` to its end; return its result or raise its error."""
        if self._closed:
            self._refuse_closed()
        if self._late:
            self._take_late()
        if self.context.leases.dropped or self.context.reads.due:
            self.flush(deadline.remaining_s())
        try:
            effect = next(logic)
            while True:
                effect = logic.send(self._perform(effect, deadline))
        except StopIteration as end:
            result: T = end.value
            return result
        except BaseException:
            logic.close()  # the logic releases what it has taken after an interrupt, too
            raise
        finally:
            if self.context.leases.dropped:
                self.flush(deadline.remaining_s())
            if self.context.departed:
                self._leave_departed()

    def _leave_departed(self) -> None:
        """Close connections and segments of departed nodes."""
        for peer in self._sessions.take_departed():
            for connection in self._idle.pop(peer, ()):
                self._hang_up(peer, connection)

    def deadline(self, seconds: float | None) -> Deadline:
        """Return the deadline of an operation that begins now."""
        return Deadline(time.monotonic() + self.settings.deadline_of(seconds), time.monotonic)

    def flush(self, deadline_s: float | None = None) -> None:
        """Return unneeded leases; unreachable nodes find out by themselves."""
        deadline_s = self.settings.deadline_s if deadline_s is None else deadline_s
        while calls := self._due_notices():
            self._notify(calls, deadline_s)

    def _due_notices(self) -> Sequence[tuple[PeerId, AnyCall]]:
        """Return the notices due now; a node that did not answer, and would need a greeting, can wait for its own."""
        if self._closed:
            return ()
        nodes, now_s = self.context.nodes, self.context.clock.now_s()
        due: list[tuple[PeerId, AnyCall]] = []
        for peer, call in self.context.take_notices():
            if nodes.is_avoided(peer, now_s) and not self._idle.get(peer):
                self.context.requeue([(peer, call)])
            else:
                due.append((peer, call))
        return due

    def close(self) -> None:
        """Close all connections and segments. Does nothing in a forked child, which has none."""
        if self._closed:
            return
        if self.context.reads.noted or self.context.leases.dropped:
            self.flush()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = [connection for pool in self._idle.values() for connection in pool]
            idle += [connection for _, connection in self._late]
            self._idle.clear()
            self._late.clear()
            threads, self._threads = self._threads, None
        until_s = time.monotonic() + self.settings.deadline_s
        for connection in idle:
            connection.finish(_left_s(until_s))
        if threads is not None:
            threads.shutdown(wait=True)
        LateLeases(self.settings, self.context, self._sessions).watch()
        self.context.close()
        self._sessions.close()
        self._engine.close()

    def dropped(self, client: object) -> None:
        """Handle the loss of the last reference to ``client``: warn if it was not closed, and disconnect silently."""
        if self._closed:
            return
        self._closed = True
        for pool in self._idle.values():
            for connection in pool:
                connection.close()
        self.context.flush = no_flush
        LateLeases(self.settings, self.context, self._sessions).watch()
        self._engine.close()
        warn_unclosed(client)

    # --- effects

    def _perform(self, effect: Effect, deadline: Deadline) -> Any:
        left_s = deadline.remaining_s()
        if type(effect) is CallPeers:  # by far the most frequent
            calls = effect.calls
            if effect.meanwhile is not None:
                return [self._call_meanwhile(*calls[0], left_s, effect.meanwhile)]
            if effect.within_s is not None and effect.within_s < left_s:
                left_s = effect.within_s
            if calls and is_master(calls[0][0]):
                return self._drive(self._masters.call(calls, left_s, waits=effect.waits))
            return self._call(calls, left_s)
        match effect:
            case Notify(calls):
                return self._notify(calls, left_s)
            case Transfer():
                return self._transfer(effect, left_s)
            case OpenSegment(node, copies):
                return self._open_segment(node, copies)
            case Sleep(seconds):
                return time.sleep(seconds)

    def _drive(self, logic: Logic[T]) -> T:
        """Run logic that only calls masters and pauses between calls."""
        try:
            effect = next(logic)
            while True:
                outcomes: list[Outcome] | None = None
                if isinstance(effect, CallPeers):
                    outcomes = self._call(effect.calls, effect.within_s or 0.0)
                else:
                    assert isinstance(effect, Sleep)
                    time.sleep(effect.seconds)
                effect = logic.send(outcomes)
        except StopIteration as end:
            result: T = end.value
            return result

    def _call(self, calls: Sequence[tuple[PeerId, AnyCall]], deadline_s: float) -> list[Outcome]:
        """Return the answer to each of ``calls``; a peer's error, or its connection's failure, takes its place."""
        if len(calls) == 1:
            return self._exchange(calls[0][0], [calls[0][1]], deadline_s)
        if not calls:
            return []
        by_peer: dict[PeerId, list[AnyCall]] = {}
        for peer, call in calls:
            by_peer.setdefault(peer, []).append(call)
        if len(by_peer) == 1:
            return self._exchange(*by_peer.popitem(), deadline_s)
        if is_master(calls[0][0]):
            return self._call_side_by_side(calls, deadline_s)
        executor = self._executor()
        futures = {peer: executor.submit(self._exchange, peer, own, deadline_s) for peer, own in by_peer.items()}
        try:
            outcomes = {peer: iter(future.result()) for peer, future in futures.items()}
        except BaseException:  # an interrupt: leases that these peers grant, now or later, are returned; re-raised
            for peer, future in futures.items():
                future.add_done_callback(partial(self._abandoned, peer))
            raise
        return [next(outcomes[peer]) for peer, _ in calls]

    def _abandoned(self, peer: PeerId, future: Future[list[Outcome]]) -> None:
        for outcome in () if future.cancelled() or future.exception() is not None else future.result():
            if not isinstance(outcome, TanghuluError) and isinstance(outcome.message, messages.GRANTING):
                self.context.return_granted(peer, outcome.message)

    def _take_late(self) -> None:
        """Collect late replies, if any: their leases are returned with the next notice."""
        for _ in range(len(self._late)):
            try:
                peer, connection = self._late.popleft()
            except IndexError:  # another thread was faster
                return
            if connection.take_late():
                self._late.append((peer, connection))

    def _call_meanwhile(self, node: PeerId, call: AnyCall, deadline_s: float, meanwhile: Callable[[], None]) -> Outcome:
        begun = self._begin(node, call, deadline_s)
        try:
            if isinstance(begun.pending, SentCall):
                meanwhile()
            return self._answer(begun)
        finally:
            self._end(begun)

    def _call_side_by_side(self, calls: Sequence[tuple[PeerId, AnyCall]], deadline_s: float) -> list[Outcome]:
        """Send every call before waiting for the first answer."""
        begun: list[_Begun] = []
        try:
            for peer, call in calls:
                begun.append(self._begin(peer, call, deadline_s))
            return [self._answer(each) for each in begun]
        finally:
            for each in begun:
                self._end(each)

    def _transfer(self, wanted: Transfer, deadline_s: float) -> tuple[list[TanghuluError | None], list[Outcome]]:
        begun: list[_Begun] = []
        sent_s = time.monotonic()
        try:
            for peer, call in wanted.calls:
                begun.append(self._begin(peer, call, self._masters.limit_s(peer, wanted.within_s)))
            errors = _move(self._engine, wanted.requests, deadline_s)
            answers = [self._answer(each) for each in begun]
        finally:
            for each in begun:
                self._end(each)
        return errors, self._drive(self._masters.accepted(wanted.calls, answers, sent_s, sent_s + wanted.within_s))

    def _begin(self, peer: PeerId, call: AnyCall, deadline_s: float) -> _Begun:
        """Send ``call`` without waiting for its answer; end with ``_end``."""
        until_s = time.monotonic() + deadline_s
        try:
            connection = self._take(peer, until_s)
        except TanghuluError as error:
            return _Begun(peer, error)
        try:
            return _Begun(peer, connection.begin(call, deadline_s=_left_s(until_s)))
        except TanghuluError as error:
            self._put_back(peer, connection)
            return _Begun(peer, error)
        except BaseException:  # an interrupt: re-raised
            self._put_back(peer, connection)
            raise

    def _answer(self, begun: _Begun) -> Outcome:
        outcome = begun.pending.end() if isinstance(begun.pending, SentCall) else begun.pending
        if isinstance(outcome, NodeUnavailable):
            self._forget_idle(begun.peer)
        return outcome

    def _end(self, begun: _Begun) -> None:
        """Finish a call started by ``_begin``."""
        if isinstance(begun.pending, SentCall):
            begun.pending.close()
            self._put_back(begun.peer, begun.pending.connection)

    def _notify(self, calls: Sequence[tuple[PeerId, AnyCall]], deadline_s: float) -> None:
        until_s = time.monotonic() + deadline_s
        for position, (peer, call) in enumerate(calls):
            try:
                connection = self._take(peer, until_s, probes=False)
                try:
                    connection.post(call, deadline_s=_left_s(until_s))
                finally:
                    self._put_back(peer, connection)
            except TanghuluError:
                if self.context.nodes.is_suspect(peer):
                    self.context.requeue([(peer, call)])
                continue
            except BaseException:  # an interrupt: re-raised
                self.context.requeue(calls[position:])
                raise

    def _exchange(self, peer: PeerId, calls: list[AnyCall], deadline_s: float) -> list[Outcome]:
        """Send all of ``calls`` on one connection, then receive their answers."""
        until_s = time.monotonic() + deadline_s
        try:
            connection = self._take(peer, until_s)
        except TanghuluError as error:
            return [error] * len(calls)
        try:
            if len(calls) == 1:
                return [connection.call_one(calls[0], deadline_s=_left_s(until_s))]
            return connection.call_many(calls, deadline_s=_left_s(until_s))
        except TanghuluError as error:
            if isinstance(error, NodeUnavailable):
                self._forget_idle(peer)
            return [error] * len(calls)
        finally:
            self._put_back(peer, connection)

    def _open_segment(self, node: PeerId, copies: bool) -> NodeLink | TanghuluError:
        known = self._sessions.link(node, copies)
        if not isinstance(known, Welcome):
            return known
        try:
            remote = self._engine.open_segment(known.segment, known.session, self.settings.carrier(copies))
        except TanghuluError as error:
            return error
        return self._sessions.opened(known, copies, remote)

    # --- connections

    def _take(self, peer: PeerId, until_s: float, *, probes: bool = True) -> FastConnection:
        """Return a connection for the exclusive use of this thread; raises typed errors.

        ``probes``: a suspect node gets a new connection, which it has to greet before anything waits for it.
        """
        pool = None if probes and self.context.nodes.is_suspect(peer) else self._idle.get(peer)
        while pool:
            try:
                connection = pool.pop()
            except IndexError:  # another thread was faster
                break
            if not connection.closed and (peer or self._masters.is_current(connection.peer)):
                return connection
            self._hang_up(peer, connection)
        if peer == MASTER:
            target = Target(self._masters.finder.find_blocking(), None, self.settings.uses_unix)
        else:
            target = self._sessions.target(peer)
        try:
            return self._connect(peer, target, until_s)
        except OtherNode:
            return self._connect(peer, self._sessions.target(peer), until_s)

    def _forget_idle(self, peer: PeerId) -> None:
        """Close the idle connections to a master that is gone or was restarted: they are dead, too."""
        if is_master(peer):
            for connection in self._idle.pop(peer, ()):
                connection.close()

    def _connect(self, peer: PeerId, target: Target, until_s: float) -> FastConnection:
        timeout_s = max(_left_s(until_s), MIN_CONNECT_S)
        try:
            connection = FastConnection(
                target.address,
                target.unix_path,
                timeout_s,
                shortcut=target.shortcut,
                tls=self._sessions.tls(peer),
                on_late=late_replies(self.context, peer, lambda: None),
            )
        except TanghuluError as error:
            self._sessions.unreachable(peer, error)
            raise
        try:
            if is_master(peer):
                greet_blocking(connection, self.settings.master.credentials_for(target.address), timeout_s)
                self._masters.has_met_master |= peer == MASTER
            else:
                self._greet(peer, target, connection, self._sessions.patience_s(peer, _left_s(until_s)))
        except TanghuluError as error:
            connection.close()
            raise self._sessions.ungreeted(peer, error) from None
        return connection

    def _greet(self, peer: PeerId, target: Target, connection: FastConnection, deadline_s: float) -> None:
        call = self._sessions.hello(peer, target)
        reply = connection.call(call.method, call.request, call.reply_type, deadline_s=deadline_s)
        welcome = self._sessions.greeted(peer, target, reply)
        if target.unix_path is not None:
            link = self._open_segment(peer, False)
            if isinstance(link, NodeLink):
                self.context.opened(peer, link, welcome)

    def _hang_up(self, peer: PeerId, connection: FastConnection) -> None:
        """Close the connection; notices that the peer may not have read are sent again."""
        connection.close()
        self.context.requeue([(peer, call) for call in connection.unanswered])

    def _put_back(self, peer: PeerId, connection: FastConnection) -> None:
        if connection.closed:
            if connection.timed_out and not is_master(peer):
                self.context.nodes.suspect(peer, self.context.clock.now_s())
            self.context.requeue([(peer, call) for call in connection.unanswered])
            if connection.has_late_replies:
                self._late.append((peer, connection))
                if len(self._late) > MAX_LATE_CONNECTIONS:
                    self._late.popleft()[1].close()
            return
        if peer != MASTER and not self.context.is_known(peer):  # it left meanwhile
            self._hang_up(peer, connection)
            return
        with self._lock:
            pool = self._idle.get(peer)
            if pool is None:
                pool = self._idle[peer] = deque()
            if not self._closed and len(pool) < MAX_IDLE:
                pool.append(connection)
                return
        connection.finish(self.settings.deadline_s)

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._closed:
                raise InvalidRequest("the client is closed")
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="tanghulu-client")
            return self._threads


def _left_s(until_s: float) -> float:
    return max(until_s - time.monotonic(), 0.0)


def _move(engine: TransferEngine, requests: Sequence[TransferRequest], deadline_s: float) -> list[TanghuluError | None]:
    """Move the requests and return one outcome each; each moves at most twice."""
    until_s = time.monotonic() + deadline_s
    try:
        engine.transfer(requests, deadline_s)
        return [None] * len(requests)
    except TanghuluError as error:
        if len(requests) == 1:
            return [error]
    try:  # again, to find the failing ones: the same bytes to the same places
        left_s = max(until_s - time.monotonic(), 0.0)
        return list(engine.submit(TransferBatch(requests)).wait(left_s).errors)
    except TanghuluError as error:
        return [error] * len(requests)
