"""Discovery through the master's membership service, the default.

A registration renews its lease every third of it; if the master does not have the lease (it restarted, or the process
was stalled too long) it registers again and reports so, because such a master has also lost the chunks of a node.
Attributes of a first registration are absent from others, and dropped at the first renewal. A watch outlives its
master: it reconnects and yields only the differences (see mirror). Of several masters the leader is followed (see
masters).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from random import Random
from typing import Self, TypeVar

import structlog

from tanghulu.auth.certificate_roles import MASTER
from tanghulu.discovery.base import DEFAULT_TTL_S, EventKind, Instance, InstanceEvent
from tanghulu.discovery.instance_wire import InstanceEntry
from tanghulu.discovery.masters import ATTEMPT_S, SILENCE_OF_ONE_S, SILENCE_S, MasterFinder, Seeking
from tanghulu.discovery.membership import (
    DEREGISTER,
    KEEP_ALIVE,
    REGISTER,
    WATCH,
    LeaseRequest,
    RegisterReply,
    RegisterRequest,
    WatchReply,
    WatchRequest,
)
from tanghulu.discovery.mirror import InstanceMirror
from tanghulu.discovery.renewing import RenewedRegistration
from tanghulu.errors import (
    DeadlineExceeded,
    InvalidRequest,
    MasterUnavailable,
    NodeUnavailable,
    NotLeader,
    TanghuluError,
    VersionMismatch,
)
from tanghulu.masters import Masters
from tanghulu.rpc import greeting
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.fast_client import Call
from tanghulu.rpc.streams import receive_all
from tanghulu.rpc.wire import Body
from tanghulu.runtime.clock import Backoff, SystemClock
from tanghulu.types import Address, Role

_log = structlog.get_logger(__name__)
REGISTER_DEADLINE_S = 5.0
_CALL_DEADLINE_S = 2.0
_CLOSE_DEADLINE_S = 0.5
#: Pause between two attempts: well below a new master's wait before it considers the registrations complete.
_RETRY_S, _RETRY_MOST_S = 0.2, 0.4
#: The same for watchers.
_WATCH_MOST_S = 1.0
A = TypeVar("A", bound=Body)


class MasterRegistration(RenewedRegistration):
    """An instance at the master, its lease renewed by a task until ``close``."""

    def __init__(self, discovery: MasterDiscovery, instance: Instance, ttl_s: float) -> None:
        super().__init__(discovery.registrations, instance, ttl_s)
        self._discovery = discovery
        self._entered: Instance | None = None
        self._lease_id = 0
        self._clock = SystemClock()
        #: When the lease ends unless it is renewed; the master's clock starts later.
        self.lease_until_s = float("-inf")

    async def update(self, instance: Instance) -> None:
        """Replace the registered contents. After MasterUnavailable they are sent when the master is back."""
        assert instance.id == self._instance.id, "an update keeps the id"
        self._instance = instance
        async with self._lock:
            await self._enter()

    async def _leave(self) -> None:
        with contextlib.suppress(TanghuluError):
            await self._discovery.deregister(self._instance, self._lease_id)

    async def _enter(self) -> None:
        await self._register(REGISTER_DEADLINE_S)

    async def _register(self, deadline_s: float) -> None:
        instance, until_s = self._instance, self._clock.now_s() + self._ttl_s
        self._lease_id = await self._discovery.enter(instance, self._ttl_s, deadline_s)
        self._entered, self.lease_until_s = instance, until_s
        if self._instance is instance:
            self._instance = instance.again()

    async def _renew_forever(self) -> None:
        reachable, rng = True, Random(secrets.randbits(64))
        backoff = Backoff(_RETRY_S, _RETRY_MOST_S, rng)
        while True:
            most_s = self._ttl_s / 3
            await self._discovery.pause(
                most_s * rng.uniform(0.75, 1.0) if reachable else min(most_s, backoff.pause_s())
            )
            try:
                await self._renew()
            except TanghuluError as error:
                if reachable:
                    _log.warning("discovery.lease_not_renewed", instance=self._instance.id, error=error.message)
                reachable = False
            else:
                reachable, backoff = True, Backoff(_RETRY_S, _RETRY_MOST_S, rng)

    async def _renew(self) -> None:
        async with self._lock:
            until_s = self._clock.now_s() + self._ttl_s
            known = await self._discovery.keep_alive(self._instance, self._lease_id)
            if known:
                self.lease_until_s = until_s
            if not known or self._entered != self._instance:
                await self._register(_CALL_DEADLINE_S)
        if not known:
            generation = self._discovery.master_generation
            _log.info("discovery.reregistered", instance=self._instance.id, master_generation=generation)


class MasterDiscovery:
    """Instances at the master, or at the leader of several. An async context manager; leaving it closes its
    registrations.

    ``finder`` may be shared with other callers of the master in this process.
    """

    def __init__(self, masters: Masters | Address, finder: MasterFinder | None = None) -> None:
        self.master_generation = 0  # of the last answer; 0 before the first
        self.registrations: set[MasterRegistration] = set()
        self._finder = finder or MasterFinder(masters)
        self._peer = f"master at {masters}"
        self._clock = SystemClock()
        self._links: dict[Address, AsyncFastConnection] = {}  # for calls; a watch has its own connection
        self._connecting = asyncio.Lock()
        self._tried: set[str] = set()  # ids of instances that a master may have entered
        self._poked = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.gather(*(registration.close() for registration in list(self.registrations)))
        for each in self._links.values():
            await each.close()

    @property
    def address(self) -> Address:
        """The master in use, or the first to try."""
        return self._finder.current or self._finder.masters.addresses[0]

    def is_listed(self, now_s: float) -> bool:
        """Return whether the master lists what was registered here: guaranteed only until its leases expire."""
        return any(registration.lease_until_s > now_s for registration in self.registrations)

    def poke(self) -> None:
        """Renew all registrations now: a caller has learnt that the master does not have them."""
        self._poked.set()

    async def pause(self, seconds: float) -> None:
        """Wait until the next renewal is due, or ``poke``."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._poked.wait(), seconds)
            self._poked.clear()

    async def look(self) -> None:
        """Renew no lease. Raises NotLeader if only etcd or other masters answer, MasterUnavailable if nobody does."""
        try:
            await self._call(lambda: KEEP_ALIVE.call(LeaseRequest()), ATTEMPT_S)
        except (MasterUnavailable, DeadlineExceeded) as error:
            kind = NotLeader if self._finder.answered else MasterUnavailable
            raise kind(error.message) from error

    async def require_role(self, instance: Instance) -> None:
        """Do nothing: the master checks this when the instance registers."""

    async def register(self, instance: Instance, ttl_s: float = DEFAULT_TTL_S) -> MasterRegistration:
        """Register ``instance``; waits up to REGISTER_DEADLINE_S for the master, then raises MasterUnavailable."""
        return await MasterRegistration(self, instance, ttl_s).open()

    async def watch(self, *roles: Role, namespace: str = "default") -> AsyncIterator[InstanceEvent]:
        """Yield every live instance, then SYNCED, then changes; waits for an unreachable master."""
        mirror = InstanceMirror(DEFAULT_TTL_S)
        call = WATCH.call(WatchRequest(namespace, roles))
        rng = Random(secrets.randbits(64))
        backoff, interrupted = Backoff(_RETRY_S, _WATCH_MOST_S, rng), False
        while True:
            tried: Address | None = None
            try:
                tried = await self._finder.find()
                async with aclosing(self._follow(tried, call, mirror)) as events:
                    async for event in events:
                        backoff, interrupted = Backoff(_RETRY_S, _WATCH_MOST_S, rng), False
                        yield event
            except TanghuluError as error:
                if not interrupted:
                    _log.warning("discovery.watch_interrupted", error=error.message)
                interrupted = True
                if tried is not None:
                    self._finder.failed(tried, error)
            await asyncio.sleep(backoff.pause_s())

    async def _follow(
        self, address: Address, call: Call[WatchReply], mirror: InstanceMirror
    ) -> AsyncGenerator[InstanceEvent, None]:
        """Yield the events of one stream, and those of expired doubts: beats come often enough to check them."""
        silence_s = SILENCE_S if self._finder.several else SILENCE_OF_ONE_S
        connection = await self._connect(address, silence_s)
        mirror.begin()
        async with aclosing(receive_all(connection, call, silence_s)) as messages:
            async for message in messages:
                for event in (*mirror.expire(self._clock.now_s()), *self._apply(mirror, message)):
                    yield event

    def _apply(self, mirror: InstanceMirror, message: WatchReply) -> list[InstanceEvent]:
        if message.kind is EventKind.SYNCED:
            return mirror.synced(self._clock.now_s())
        if message.entry is None:
            return []
        if message.kind is EventKind.DELETE:
            return mirror.delete(message.entry.id)
        try:
            return mirror.put(message.entry.instance())
        except InvalidRequest as error:  # a newer peer's kind of instance is of no use here
            _log.warning("discovery.unknown_instance", instance=message.entry.id, error=error.message)
            return []

    # --- calls, for registrations

    async def enter(self, instance: Instance, ttl_s: float, deadline_s: float) -> int:
        """Register; returns the lease id. Raises MasterUnavailable at the deadline."""

        def call() -> Call[RegisterReply]:
            tried = instance.again() if instance.id in self._tried else instance
            self._tried.add(instance.id)
            return REGISTER.call(RegisterRequest(InstanceEntry.of(tried), round(ttl_s * 1000)))

        try:
            reply = await self._call(call, deadline_s, waits=True)
        except NotLeader:
            raise
        except (MasterUnavailable, DeadlineExceeded) as error:
            why = f"{error.message}; it did not answer within {deadline_s:g} s, is it running?"
            raise MasterUnavailable(why) from error
        self.master_generation = reply.master_generation
        return reply.lease_id

    async def keep_alive(self, instance: Instance, lease_id: int) -> bool:
        """Renew a lease; return False if this master does not have it."""
        reply = await self._call(lambda: KEEP_ALIVE.call(LeaseRequest(lease_id, instance.id)), _CALL_DEADLINE_S)
        self.master_generation = reply.master_generation
        return reply.known

    async def deregister(self, instance: Instance, lease_id: int) -> None:
        """End a lease."""
        await self._call(lambda: DEREGISTER.call(LeaseRequest(lease_id, instance.id)), _CLOSE_DEADLINE_S)

    async def _call(self, make: Callable[[], Call[A]], deadline_s: float, *, waits: bool = False) -> A:
        """Call the master; of several, one after the other until the leader answers.

        ``waits``: also wait for an absent single master. ``make`` is called for each attempt that reaches a master.
        """
        seeking = Seeking(self._finder, self._clock.now_s(), deadline_s, waits=waits)
        while True:
            tried: Address | None = None
            try:
                tried = await self._finder.find()
                return await self._attempt(tried, make, seeking.attempt_s(self._clock.now_s()))
            except (MasterUnavailable, DeadlineExceeded) as error:
                pause_s = seeking.pause_s(tried, error, self._clock.now_s())
                if pause_s is None:
                    raise
            await asyncio.sleep(pause_s)

    async def _attempt(self, address: Address, make: Callable[[], Call[A]], timeout_s: float) -> A:
        """Make one attempt. A connection without an answer is dropped: its path may be dead."""
        until_s = self._clock.now_s() + timeout_s
        try:
            link = await self._link(address, timeout_s)
            call, left_s = make(), until_s - self._clock.now_s()
            try:
                reply = await link.call(call.method, call.request, call.reply_type, deadline_s=left_s)
            except DeadlineExceeded:
                if self._links.get(address) is link:
                    del self._links[address]
                link.abort()
                raise
        except VersionMismatch:
            raise
        except NodeUnavailable as error:
            raise MasterUnavailable(f"{self._peer}: {error.message}") from error
        return reply.message

    async def _link(self, address: Address, timeout_s: float) -> AsyncFastConnection:
        """Return the connection for calls to the master at ``address``."""
        try:
            async with asyncio.timeout(timeout_s), self._connecting:
                link = self._links.get(address)
                if link is None or link.closed:
                    link = self._links[address] = await self._connect(address, timeout_s)
                return link
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self._peer} did not answer within {timeout_s:.3g} s; is it running and reachable?"
            ) from None

    async def _connect(self, address: Address, deadline_s: float) -> AsyncFastConnection:
        return await greeting.connect(address, self._finder.masters.credentials_for(address), MASTER, deadline_s)
