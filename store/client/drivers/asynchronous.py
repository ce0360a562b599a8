"""The asyncio driver: runs the same logic with one multiplexed connection per peer. Belongs to one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Concatenate

from tanghulu.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NodeUnavailable,
    TanghuluError,
)
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.fast_client import Reply
from tanghulu.rpc.greeting import greet
from tanghulu.store.client.drivers.connections import (
    OtherNode,
    Target,
    late_replies,
    silent,
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
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.messages import KeysRequest, Welcome
from tanghulu.transfer_engine.engine import TransferBatch, TransferEngine, TransferRequest


class AsyncioDriver(Driver):
    """Performs effects on the loop it was created on."""

    connect = "tanghulu.aio.connect"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.context.flush = self.flush
        self._loop = asyncio.get_running_loop()
        self._connections: dict[PeerId, AsyncFastConnection] = {}
        self._opening: dict[PeerId, asyncio.Lock] = {}
        self._flushing: asyncio.Task[None] | None = None
        self._num_notices = 0  # unanswered notices
        self._notices_answered = asyncio.Event()
        self._notices_answered.set()

    async def perform(
        self,
        seconds: float | None,
        operation: Callable[Concatenate[Context, Deadline, P], Logic[T]],
        *args: P.args,
        **named: P.kwargs,
    ) -> T:
        """Run ``operation`` with a deadline of ``seconds``."""
        deadline = self.deadline(seconds)
        return await self.run(operation(self.context, deadline, *args, **named), deadline)

    async def run(self, logic: Logic[T], deadline: Deadline) -> T:
        """Drive ``logic`` to its end; return its result or raise its error."""
        if self._closed:
            self._refuse_closed()
        self._require_loop()
        if self.context.leases.dropped or self.context.reads.due:
            self.flush()
        try:
            effect = next(logic)
            while True:
                effect = logic.send(await self._perform(effect, deadline))
        except StopIteration as end:
            result: T = end.value
            return result
        except BaseException:
            logic.close()  # the logic releases what it has taken after a cancelled call, too
            raise
        finally:
            if self.context.leases.dropped:
                self.flush()
            if self.context.departed:
                self._leave_departed()

    def _leave_departed(self) -> None:
        """Close connections and segments of departed nodes."""
        for peer in self._sessions.take_departed():
            connection = self._connections.pop(peer, None)
            if connection is not None:
                connection.abort()
            opening = self._opening.get(peer)
            if opening is not None and not opening.locked():
                del self._opening[peer]

    def deadline(self, seconds: float | None) -> Deadline:
        """Return the deadline of an operation that begins now."""
        return Deadline(self._loop.time() + self.settings.deadline_of(seconds), self._loop.time)

    def flush(self) -> None:
        """Return unneeded leases soon."""
        if not self._closed and (self._flushing is None or self._flushing.done()):
            self._flushing = self._loop.create_task(self._give_back())

    async def close(self) -> None:
        """Return all unneeded leases, close all connections and segments; do nothing in a forked child."""
        if self._closed:
            return
        if self._loop.is_closed():
            self._let_go()
            return
        self._require_loop()
        await self._give_back()
        self._closed = True
        if self._flushing is not None:
            await self._flushing
        with contextlib.suppress(TimeoutError):  # a node may lose unread calls of connections closed earlier
            await asyncio.wait_for(self._notices_answered.wait(), self.settings.deadline_s)
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            await connection.close()
        LateLeases(self.settings, self.context, self._sessions).watch()
        self.context.close()
        self._sessions.close()
        await self._loop.run_in_executor(None, self._engine.close)

    def dropped(self, client: object) -> None:
        """Handle the loss of the last reference to ``client``: warn if it was not closed, and disconnect."""
        if self._closed:
            return
        self._let_go()
        warn_unclosed(client)

    def _let_go(self) -> None:
        """Disconnect without notice."""
        self._closed = True
        if not self._loop.is_closed():
            for connection in self._connections.values():
                connection.abort()
        self.context.flush = no_flush
        LateLeases(self.settings, self.context, self._sessions).watch()
        self._engine.close()

    def _require_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise InvalidRequest("this client belongs to another event loop; call tanghulu.aio.connect() in this one")

    # --- effects

    async def _perform(self, effect: Effect, deadline: Deadline) -> Any:
        left_s = deadline.remaining_s()
        match effect:
            case CallPeers(calls, within_s, meanwhile, waits):
                if meanwhile is not None:
                    return [await self._call_meanwhile(*calls[0], left_s, meanwhile)]
                call_s = left_s if within_s is None else min(within_s, left_s)
                if calls and is_master(calls[0][0]):
                    return await self._drive(self._masters.call(calls, call_s, waits=waits))
                return await self._call(calls, call_s)
            case Notify(calls):
                return await self._notify(calls, left_s)
            case Transfer():
                return await self._transfer(effect, left_s)
            case OpenSegment(node, copies):
                return await self._open_segment(node, copies)
            case Sleep(seconds):
                return await self._sleep(seconds)

    async def _drive(self, logic: Logic[T]) -> T:
        """Run logic that only calls masters and pauses between calls."""
        try:
            effect = next(logic)
            while True:
                outcomes: list[Outcome] | None = None
                if isinstance(effect, CallPeers):
                    outcomes = await self._call(effect.calls, effect.within_s or 0.0)
                else:
                    assert isinstance(effect, Sleep)
                    await self._sleep(effect.seconds)
                effect = logic.send(outcomes)
        except StopIteration as end:
            result: T = end.value
            return result

    async def _sleep(self, seconds: float) -> None:
        if self._closed:  # by another task: retries of this call would fail for ever
            self._refuse_closed()
        await asyncio.sleep(seconds)

    async def _call(self, calls: Sequence[tuple[PeerId, AnyCall]], deadline_s: float) -> list[Outcome]:
        """Return the answer to each of ``calls``; a peer's error, or its connection's failure, takes its place."""
        if len(calls) == 1:
            return [await self._exchange(*calls[0], deadline_s)]
        tasks = [self._loop.create_task(self._exchange(peer, call, deadline_s)) for peer, call in calls]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:  # the task was cancelled; re-raised
            for (peer, _), task in zip(calls, tasks, strict=True):
                self._abandon(peer, task)
            raise

    async def _call_meanwhile(
        self, node: PeerId, call: AnyCall, deadline_s: float, meanwhile: Callable[[], None]
    ) -> Outcome:
        task = self._loop.create_task(self._exchange(node, call, deadline_s))
        try:
            await asyncio.sleep(0)  # if there is a connection, the call has left then
            meanwhile()
            return await task
        except BaseException:  # the task was cancelled, for example; everything is re-raised
            self._abandon(node, task)
            raise

    def _abandon(self, peer: PeerId, task: asyncio.Task[Outcome]) -> None:
        """Abandon the answer of ``peer``; leases it grants are returned."""
        task.cancel()
        task.add_done_callback(partial(self._abandoned, peer))

    def _abandoned(self, peer: PeerId, task: asyncio.Task[Outcome]) -> None:
        outcome = None if task.cancelled() else task.result()
        if isinstance(outcome, Reply) and isinstance(outcome.message, messages.GRANTING):
            self.context.return_granted(peer, outcome.message)
            self.flush()

    async def _transfer(self, wanted: Transfer, deadline_s: float) -> tuple[list[TanghuluError | None], list[Outcome]]:
        sent_s, limit_s = self._loop.time(), self._masters.limit_s
        tasks = [
            self._loop.create_task(self._exchange(peer, call, limit_s(peer, wanted.within_s)))
            for peer, call in wanted.calls
        ]
        try:
            errors = await _move(self._engine, wanted.requests, deadline_s)
            answers = [await task for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
        accepted = self._masters.accepted(wanted.calls, answers, sent_s, sent_s + wanted.within_s)
        return errors, await self._drive(accepted)

    async def _notify(self, calls: Sequence[tuple[PeerId, AnyCall]], deadline_s: float) -> None:
        for position, (peer, call) in enumerate(calls):
            try:
                connection = self._connections.get(peer)
                if connection is None or connection.closed:  # a node that lost the session receives the leases held
                    connection = await self._open(peer, deadline_s)
                on_reply = partial(self._on_notice_reply, peer, call)
                connection.send(call.method, call.request, call.reply_type, on_reply, call.attachment)
                self._num_notices += 1
                self._notices_answered.clear()
            except TanghuluError:
                continue
            except BaseException:  # the task was cancelled: re-raised
                self.context.requeue(calls[position:])
                raise

    async def _exchange(self, peer: PeerId, call: AnyCall, deadline_s: float) -> Outcome:
        until_s = self._loop.time() + deadline_s
        try:
            connection = await self._connected(peer, deadline_s)
            left_s = max(until_s - self._loop.time(), 0.0)
            return await connection.call(call.method, call.request, call.reply_type, call.attachment, deadline_s=left_s)
        except TanghuluError as error:
            if isinstance(error, DeadlineExceeded) and not is_master(peer):
                self.context.nodes.suspect(peer, self.context.clock.now_s())
            return error

    async def _connected(self, peer: PeerId, deadline_s: float) -> AsyncFastConnection:
        connection = self._connections.get(peer)
        if connection is not None and peer == MASTER and not self._masters.is_current(connection.peer):
            del self._connections[peer]
            await connection.close()
            connection = None
        if connection is not None and not connection.closed:
            if self.context.nodes.is_suspect(peer):
                await self._probe(peer, connection, deadline_s)
            return connection
        try:
            async with asyncio.timeout(deadline_s):
                return await self._open(peer, deadline_s)
        except TimeoutError:
            if not is_master(peer):
                self.context.nodes.suspect(peer, self.context.clock.now_s())
            raise NodeUnavailable(f"no connection to {peer} within {deadline_s:.3g} s") from None

    async def _probe(self, peer: PeerId, connection: AsyncFastConnection, deadline_s: float) -> None:
        """Check that a node is alive after a call timed out; raises NodeUnavailable."""
        if self.context.nodes.is_silent(peer, self.context.clock.now_s()):
            raise silent(peer)
        call, patience_s = methods.EXISTS.call(KeysRequest(())), self._sessions.patience_s(peer, deadline_s)
        try:
            await connection.call(call.method, call.request, call.reply_type, deadline_s=patience_s)
        except DeadlineExceeded as error:
            raise self._sessions.unanswered(peer, error) from None
        self.context.nodes.answered(peer)

    async def _open(self, peer: PeerId, deadline_s: float) -> AsyncFastConnection:
        """Return the peer's connection, opened by its first user while the others wait."""
        async with self._opening.setdefault(peer, asyncio.Lock()):
            connection = self._connections.get(peer)
            if connection is not None and not connection.closed:
                return connection
            if peer == MASTER:
                target = Target(await self._masters.finder.find(), None, self.settings.uses_unix)
            else:
                target = self._sessions.target(peer)
            try:
                connection = await self._connect(peer, target, deadline_s)
            except OtherNode:
                connection = await self._connect(peer, self._sessions.target(peer), deadline_s)
            self._connections[peer] = connection
            return connection

    async def _connect(self, peer: PeerId, target: Target, deadline_s: float) -> AsyncFastConnection:
        try:
            connection = await AsyncFastConnection.connect(
                target.address,
                target.unix_path,
                shortcut=target.shortcut,
                tls=self._sessions.tls(peer),
                on_late=late_replies(self.context, peer, self.flush),
            )
        except TanghuluError as error:
            self._sessions.unreachable(peer, error)
            raise
        try:
            if is_master(peer):
                await greet(connection, self.settings.master.credentials_for(target.address), deadline_s)
                self._masters.has_met_master |= peer == MASTER
            else:
                await self._greet(peer, target, connection, self._sessions.patience_s(peer, deadline_s))
        except asyncio.CancelledError:
            await connection.close()
            raise
        except TanghuluError as error:
            await connection.close()
            raise self._sessions.ungreeted(peer, error) from None
        return connection

    async def _greet(self, peer: PeerId, target: Target, connection: AsyncFastConnection, deadline_s: float) -> None:
        call = self._sessions.hello(peer, target)
        reply = await connection.call(call.method, call.request, call.reply_type, deadline_s=deadline_s)
        welcome = self._sessions.greeted(peer, target, reply)
        if target.unix_path is not None:
            link = await self._open_segment(peer, False)
            if isinstance(link, NodeLink):
                self.context.opened(peer, link, welcome)

    async def _open_segment(self, node: PeerId, copies: bool) -> NodeLink | TanghuluError:
        known = self._sessions.link(node, copies)
        if not isinstance(known, Welcome):
            return known
        carrier = self.settings.carrier(copies)
        try:
            remote = await self._engine.open_segment_async(known.segment, known.session, carrier)
        except TanghuluError as error:
            return error
        return self._sessions.opened(known, copies, remote)

    def _on_notice_reply(self, peer: PeerId, call: AnyCall, outcome: Outcome) -> None:
        """Handle the reply of ``peer`` to a notice; after a lost connection the notice is sent again on another one."""
        self._num_notices -= 1
        if not self._num_notices:
            self._notices_answered.set()
        if isinstance(outcome, NodeUnavailable):
            self.context.requeue([(peer, call)])
            self.flush()

    async def _give_back(self) -> None:
        """Return unneeded leases, and those dropped meanwhile: no later call might do so."""
        while calls := self.context.take_notices():
            await self._notify(calls, self.settings.deadline_s)


async def _move(
    engine: TransferEngine, requests: Sequence[TransferRequest], deadline_s: float
) -> list[TanghuluError | None]:
    """Move the requests and return one outcome each; each moves at most twice."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + deadline_s
    try:
        await engine.transfer_async(requests, deadline_s)
        return [None] * len(requests)
    except TanghuluError as error:
        if len(requests) == 1:
            return [error]
    try:
        left_s = max(until_s - loop.time(), 0.0)
        return list((await engine.submit(TransferBatch(requests)).wait_async(left_s)).errors)
    except TanghuluError as error:
        return [error] * len(requests)
