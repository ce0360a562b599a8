"""The blocking driver: runs the client's logic with blocking sockets, in the caller's own thread.

Every thread that calls takes a connection of its own from the pool of its peer and puts it back, so threads do not
wait for each other. Calls to one peer are pipelined; several peers are asked side by side, each by a thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tanghulu.auth import certificate_roles
from tanghulu.auth.certificate_roles import NODE
from tanghulu.discovery.masters import ATTEMPT_S, MasterFinder, Seeking
from tanghulu.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KeysMoved,
    MasterUnavailable,
    NodeUnavailable,
    PeerSilent,
    TanghuluError,
)
from tanghulu.rpc.fast_client import Asking, FastConnection
from tanghulu.rpc.greeting import greet_blocking
from tanghulu.runtime.clock import SystemClock
from tanghulu.runtime.fork import tell_in_children
from tanghulu.store.client.drivers.connections import (
    NodeSessions,
    OtherNode,
    Target,
    is_proven,
    late_replies,
    make_context,
    master_failure,
    obeyed,
    refuse_closed,
    take_proof,
    unproven,
    warn_unclosed,
)
from tanghulu.store.client.drivers.late_leases import LateLeases
from tanghulu.store.client.drivers.transfers import move
from tanghulu.store.client.logic import messages
from tanghulu.store.client.logic.effects import (
    MASTER,
    OWNER,
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
    is_owner,
    owner_address,
)
from tanghulu.store.client.logic.messages import AnyCall, AnyReply
from tanghulu.store.client.settings import Settings
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.messages import ProveRequest, Welcome
from tanghulu.transfer_engine.core.config import EngineConfig
from tanghulu.transfer_engine.engine import Buffer, TransferEngine

T = TypeVar("T")
Outcome = AnyReply | TanghuluError

#: Connections that are kept open to one peer; more threads than that open and close their own.
MAX_IDLE = 16
_MAX_THREADS = 16
#: Broken connections that are kept for their late replies; beyond it the oldest is closed, and what it was granted
#: stays so until this client's session ends.
MAX_OWING = 256
#: What a connection may take even if the deadline has come; 0 would mean that it must not wait at all.
MIN_CONNECT_S = 0.001


@dataclass(slots=True)
class _Asked:
    """A call to a master that was sent at ``sent_s``, or why it was not, and until when its answer is waited for."""

    peer: PeerId
    asking: Asking[Any] | TanghuluError
    sent_s: float
    until_s: float


class BlockingDriver:
    """Performs effects. Every method may be called from any thread."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        clock = SystemClock()
        self.context = make_context(settings, clock)
        self._engine = TransferEngine(
            transports=settings.engine_transports,
            host_id=settings.host_id,
            clock=clock,
            config=EngineConfig(tls=settings.master.credentials.tls.to(NODE)),
        )
        self._masters = MasterFinder(settings.master)
        self._several = settings.master.several
        self._has_met_master = False
        self._idle: dict[PeerId, deque[FastConnection]] = {}
        self._owing: deque[tuple[PeerId, FastConnection]] = deque()  # that late replies are to come from
        self._sessions = NodeSessions(settings, self.context)
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False
        self._pid = os.getpid()
        tell_in_children(self)

    def run(self, logic: Logic[T], deadline: Deadline) -> T:
        """Drive ``logic`` to its end; returns its result or raises its error."""
        if self._closed:
            refuse_closed(self._pid, "tanghulu.connect")
        if self._owing:
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
            logic.close()  # an interrupt, too, has the logic give up what it has taken
            raise
        finally:
            if self.context.leases.dropped:
                self.flush(deadline.remaining_s())
            if self.context.departed:
                self._leave_departed()

    def _leave_departed(self) -> None:
        """Close what is open to nodes that are gone."""
        for peer in self._sessions.take_departed():
            for connection in self._idle.pop(peer, ()):
                self._hang_up(peer, connection)

    def deadline(self, seconds: float | None) -> Deadline:
        """The end of an operation that begins now."""
        return Deadline(time.monotonic() + self.settings.deadline_of(seconds), time.monotonic)

    def flush(self, deadline_s: float | None = None) -> None:
        """Give back the leases that nobody needs any more; nodes that cannot be told find out by themselves."""
        deadline_s = self.settings.deadline_s if deadline_s is None else deadline_s
        while calls := self._due_notices():
            self._notify(calls, deadline_s)

    def _due_notices(self) -> Sequence[tuple[PeerId, AnyCall]]:
        """What is to be given back now; a node that did not answer, and would have to be greeted, can wait for it."""
        if self._closed:
            return ()
        nodes, now_s = self.context.nodes, self.context.clock.now_s()
        due: list[tuple[PeerId, AnyCall]] = []
        for peer, call in self.context.given_back():
            if nodes.is_avoided(peer, now_s) and not self._idle.get(peer):
                self.context.untold([(peer, call)])
            else:
                due.append((peer, call))
        return due

    def register(self, buffer: Any) -> Buffer:
        """See TransferEngine.register."""
        if self._closed:
            refuse_closed(self._pid, "tanghulu.connect")
        return self._engine.register(buffer)

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
            idle += [connection for _, connection in self._owing]
            self._idle.clear()
            self._owing.clear()
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
        """Nobody refers to ``client`` any more: warn if it was not closed, and close what is open without a word."""
        if self._closed:
            return
        self._closed = True
        for pool in self._idle.values():
            for connection in pool:
                connection.close()
        LateLeases(self.settings, self.context, self._sessions).watch()
        self._engine.close()
        warn_unclosed(client)

    def forget_in_child(self) -> None:
        """Refuse all calls: connections, leases and mapped memory are the parent's."""
        self._closed = True

    # --- effects

    def _perform(self, effect: Effect, deadline: Deadline) -> Any:
        left_s = deadline.remaining_s()
        if type(effect) is CallPeers:  # by far the commonest
            within_s = effect.within_s
            if effect.meanwhile is not None:
                return [self._call_meanwhile(*effect.calls[0], left_s, effect.meanwhile)]
            return self._call_peers(effect.calls, left_s if within_s is None else min(within_s, left_s), effect.waits)
        match effect:
            case Notify(calls):
                return self._notify(calls, left_s)
            case Transfer():
                return self._transfer(effect, left_s)
            case OpenSegment(node, copies):
                return self._open_segment(node, copies)
            case Sleep(seconds):
                return time.sleep(seconds)

    def _call_peers(
        self, calls: Sequence[tuple[PeerId, AnyCall]], deadline_s: float, waits: bool = True
    ) -> list[Outcome]:
        if len(calls) == 1:
            peer, call = calls[0]
            pool = self._idle.get(peer)
            is_direct = peer[0] != OWNER and not self.context.nodes.is_suspect(peer) if peer else not self._several
            if pool and is_direct:  # the commonest: a connection is open
                until_s = time.monotonic() + deadline_s
                outcome = self._exchange_one(peer, pool, call, deadline_s, waits)
                if outcome is not None:
                    return [outcome]
                deadline_s = _left_s(until_s)
            return self._exchange(peer, [call], deadline_s, waits)
        by_peer: dict[PeerId, list[AnyCall]] = {}
        for peer, call in calls:
            by_peer.setdefault(peer, []).append(call)
        if len(by_peer) == 1:
            return self._exchange(*by_peer.popitem(), deadline_s, waits)
        if calls and is_owner(calls[0][0]):
            return self._ask_owners(calls, deadline_s)
        executor = self._executor()
        asked = {peer: executor.submit(self._exchange, peer, own, deadline_s, waits) for peer, own in by_peer.items()}
        try:
            outcomes = {peer: iter(future.result()) for peer, future in asked.items()}
        except BaseException:  # an interrupt: what these peers granted, or will grant, goes back; it is raised on
            for peer, future in asked.items():
                future.add_done_callback(partial(self._abandoned, peer))
            raise
        return [next(outcomes[peer]) for peer, _ in calls]

    def _abandoned(self, peer: PeerId, future: Future[list[Outcome]]) -> None:
        for outcome in () if future.cancelled() or future.exception() is not None else future.result():
            if not isinstance(outcome, TanghuluError) and isinstance(outcome.message, messages.GRANTING):
                self.context.granted_late(peer, outcome.message)

    def _take_late(self) -> None:
        """Look whether late replies have come: their leases are given back with the next notice."""
        for _ in range(len(self._owing)):
            try:
                peer, connection = self._owing.popleft()
            except IndexError:  # another thread was faster
                return
            if connection.take_late():
                self._owing.append((peer, connection))

    def _call_meanwhile(self, node: PeerId, call: AnyCall, deadline_s: float, meanwhile: Callable[[], None]) -> Outcome:
        asked = self._begin(node, call, deadline_s)
        try:
            if not isinstance(asked.asking, Asking):
                return asked.asking
            meanwhile()
            return asked.asking.end()
        finally:
            self._end(asked)

    def _begin(self, peer: PeerId, call: AnyCall, deadline_s: float) -> _Asked:
        """Send ``call`` without waiting for its answer; end with ``_end``."""
        if not peer:
            deadline_s = min(deadline_s, self.settings.master_answer_s)
        elif is_owner(peer):  # one that stands still is not waited for longer than one of several masters
            deadline_s = min(deadline_s, self.settings.master_answer_s, ATTEMPT_S)
        until_s = time.monotonic() + deadline_s
        try:
            connection, _ = self._take(peer, until_s, fresh=False)
        except TanghuluError as error:
            return _Asked(peer, error, until_s, until_s)
        sent_s = time.monotonic()
        try:
            return _Asked(peer, connection.begin(call, deadline_s=deadline_s), sent_s, until_s)
        except TanghuluError as error:
            self._put_back(peer, connection)
            return _Asked(peer, error, sent_s, until_s)
        except BaseException:  # an interrupt: raised on
            self._put_back(peer, connection)
            raise

    def _answer_of_master(self, asked: _Asked) -> Outcome:
        """What the leader or an owner answered, if it can prove that it still is that."""
        asking = asked.asking
        if not isinstance(asking, Asking):
            return asking
        outcome = obeyed(self.context, asking.end(), asked.sent_s, asked.peer)
        if is_proven(self.context, outcome, asked.peer):
            return outcome
        try:
            self._prove(asking.connection, asked.until_s, asked.peer)
        except TanghuluError as error:
            return error
        return outcome if is_proven(self.context, outcome, asked.peer) else unproven()

    def _end(self, asked: _Asked | None) -> None:
        """What was begun is over."""
        if asked is not None and isinstance(asked.asking, Asking):
            asked.asking.close()
            self._put_back(asked.peer, asked.asking.connection)

    def _ask_owners(self, calls: Sequence[tuple[PeerId, AnyCall]], deadline_s: float) -> list[Outcome]:
        """Send every call before the first answer is waited for."""
        begun: list[_Asked] = []
        try:
            for peer, call in calls:
                begun.append(self._begin(peer, call, deadline_s))
            return [self._of_owner(asked.peer, self._answer_of_master(asked)) for asked in begun]
        finally:
            for asked in begun:
                self._end(asked)

    def _of_owner(self, peer: PeerId, outcome: Outcome) -> Outcome:
        if isinstance(outcome, NodeUnavailable):  # it is gone, or was restarted: other connections to it are dead, too
            for connection in self._idle.pop(peer, ()):
                connection.close()
        return master_failure(owner_address(peer), outcome) if isinstance(outcome, TanghuluError) else outcome

    def _transfer(self, wanted: Transfer, deadline_s: float) -> tuple[list[TanghuluError | None], list[Outcome]]:
        begun: list[_Asked] = []
        try:
            for peer, call in wanted.calls:
                begun.append(self._begin(peer, call, wanted.within_s))
            errors = move(self._engine, wanted.requests, deadline_s)
            return errors, [self._answer_of_master(asked) for asked in begun]
        finally:
            for asked in begun:
                self._end(asked)

    def _notify(self, calls: Sequence[tuple[PeerId, AnyCall]], deadline_s: float) -> None:
        until_s = time.monotonic() + deadline_s
        for position, (peer, call) in enumerate(calls):
            try:
                connection, _ = self._take(peer, until_s, fresh=False, probes=False)
                try:
                    connection.post(call, deadline_s=_left_s(until_s))
                finally:
                    self._put_back(peer, connection)
            except TanghuluError:
                if self.context.nodes.is_suspect(peer):
                    self.context.untold([(peer, call)])
                continue
            except BaseException:  # an interrupt: raised on
                self.context.untold(calls[position:])
                raise

    def _exchange_one(
        self, peer: PeerId, pool: deque[FastConnection], call: AnyCall, deadline_s: float, waits: bool
    ) -> Outcome | None:
        """The answer on a connection that is open; None if it is to be asked for once more."""
        try:
            connection = pool.pop()
        except IndexError:  # another thread was faster
            return None
        if connection.closed:
            return None
        try:
            deadline_s = deadline_s if peer else min(deadline_s, self.settings.master_answer_s)
            outcome = connection.call_one(call, deadline_s=deadline_s)
            if peer or not waits or not isinstance(outcome, MasterUnavailable) or isinstance(outcome, KeysMoved):
                return outcome
            return None
        except TanghuluError as error:
            if peer:
                return error
            if waits and isinstance(error, NodeUnavailable):  # a master that restarted has closed its old connections
                return None
            return master_failure(self.settings.master, error)
        finally:
            self._put_back(peer, connection)

    def _exchange(self, peer: PeerId, calls: list[AnyCall], deadline_s: float, waits: bool = True) -> list[Outcome]:
        if peer == MASTER:
            return self._ask_master(calls, min(deadline_s, self.settings.master_answer_s), waits)
        if is_owner(peer):
            return self._ask_owners([(peer, call) for call in calls], deadline_s)
        answers, _ = self._try_exchange(peer, calls, time.monotonic() + deadline_s, fresh=False)
        return [answers] * len(calls) if isinstance(answers, TanghuluError) else answers

    def _ask_master(self, calls: list[AnyCall], deadline_s: float, waits: bool) -> list[Outcome]:
        """The leader's answers; while no master answers, and if that may be waited for, until the deadline."""
        waits = waits and self._has_met_master and self.settings.waits_for_master
        seeking, fresh = Seeking(self._masters, time.monotonic(), deadline_s, waits=waits), False
        while True:
            asked, now_s = self._masters.current, time.monotonic()
            answers, reused = self._try_exchange(MASTER, calls, now_s + seeking.attempt_s(now_s), fresh=fresh)
            now_s, failed = time.monotonic(), answers if isinstance(answers, TanghuluError) else answers[0]
            if waits and reused and not self._several and isinstance(answers, NodeUnavailable):
                fresh = True  # a master that restarted: its old connections are dead, its new ones are not
                continue
            if isinstance(answers, TanghuluError):
                failed = master_failure(self.settings.master, answers, seeking.waited_s(now_s))
                answers = [failed] * len(calls)
            pause_s = seeking.pause_s(asked, failed, now_s) if isinstance(failed, MasterUnavailable) else None
            if pause_s is None:
                return answers
            for connection in self._idle.pop(MASTER, ()):
                connection.close()
            time.sleep(pause_s)

    def _try_exchange(
        self, peer: PeerId, calls: list[AnyCall], until_s: float, *, fresh: bool
    ) -> tuple[list[Outcome] | TanghuluError, bool]:
        """The answers, or how the connection failed; and whether that was open before."""
        try:
            connection, reused = self._take(peer, until_s, fresh=fresh)
        except TanghuluError as error:
            return error, False
        try:
            sent_s = time.monotonic()
            outcomes = connection.call_many(calls, deadline_s=_left_s(until_s))
            if peer == MASTER:
                outcomes = [obeyed(self.context, each, sent_s) for each in outcomes]
                if not all(is_proven(self.context, each) for each in outcomes):
                    self._prove(connection, until_s)
                    outcomes = [each if is_proven(self.context, each) else unproven() for each in outcomes]
            return outcomes, reused
        except TanghuluError as error:
            return error, reused
        finally:
            self._put_back(peer, connection)

    def _prove(self, connection: FastConnection, until_s: float, peer: PeerId = MASTER) -> None:
        """Have the master at the other end prove that its lease lives; raises its typed error."""
        sent_s = time.monotonic()
        proof = connection.call_one(methods.PROVE.call(ProveRequest()), deadline_s=_left_s(until_s))
        if isinstance(proof, TanghuluError):
            raise proof
        take_proof(self.context, proof.message, sent_s, peer)

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

    def _take(self, peer: PeerId, until_s: float, *, fresh: bool, probes: bool = True) -> tuple[FastConnection, bool]:
        """A connection for this thread alone, and whether it was open before. Raises typed errors.

        ``probes``: that of a suspect node is a new one, which the node has to greet before anything waits for it.
        """
        pool = None if probes and self.context.nodes.is_suspect(peer) else self._idle.get(peer)
        while pool:
            try:
                connection = pool.pop()
            except IndexError:
                break
            if not connection.closed and not fresh:
                return connection, True
            self._hang_up(peer, connection)
        if peer == MASTER:
            target = Target(self._masters.find_blocking(), None, self.settings.uses_unix)
        else:
            target = self._sessions.target(peer)
        try:
            return self._connect(peer, target, until_s), False
        except OtherNode:
            return self._connect(peer, self._sessions.target(peer), until_s), False

    def _connect(self, peer: PeerId, target: Target, until_s: float) -> FastConnection:
        to_master = peer == MASTER or is_owner(peer)
        try:
            timeout_s = max(_left_s(until_s), MIN_CONNECT_S)
            tls = self.settings.master.credentials.tls.to(certificate_roles.MASTER if to_master else NODE)
            connection = FastConnection(
                target.address,
                target.unix_path,
                timeout_s,
                shortcut=target.shortcut,
                tls=tls,
                on_late=late_replies(self.context, peer, lambda: None),
            )
            if to_master:
                greet_blocking(connection, self.settings.master.credentials_for(target.address), timeout_s)
                self._has_met_master = self._has_met_master or peer == MASTER
        except TanghuluError as error:
            if not to_master:
                self.context.nodes.expire()
                if isinstance(error, PeerSilent):
                    self.context.nodes.note_silent(peer, self.context.clock.now_s())
            raise
        if not to_master:
            try:
                self._greet(peer, target, connection, self._sessions.patience_s(peer, _left_s(until_s)))
            except TanghuluError as error:
                connection.close()
                raise self._sessions.unanswered(peer, error) if isinstance(error, DeadlineExceeded) else error from None
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
        """Close the connection; what the peer may not have read of what it was told is told again."""
        connection.close()
        self.context.untold([(peer, call) for call in connection.unanswered])

    def _put_back(self, peer: PeerId, connection: FastConnection) -> None:
        if connection.closed:
            if connection.timed_out and peer != MASTER and not is_owner(peer):
                self.context.nodes.suspect(peer, self.context.clock.now_s())
            self.context.untold([(peer, call) for call in connection.unanswered])
            if connection.owes_replies:
                self._owing.append((peer, connection))
                if len(self._owing) > MAX_OWING:
                    self._owing.popleft()[1].close()
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

    def __repr__(self) -> str:
        return f"BlockingDriver({self.settings.master}{', closed' if self._closed else ''})"


def _left_s(until_s: float) -> float:
    return max(until_s - time.monotonic(), 0.0)
