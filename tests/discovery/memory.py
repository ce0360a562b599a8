"""Discovery within one process, for tests and simulations.

A MemoryRegistry is the source that several MemoryDiscovery objects share, each standing for one process. A lease is
renewed while its MemoryDiscovery lives; ``crash`` stops that silently, and the instances vanish when their leases
expire by the registry's clock. With a ManualClock call ``tick`` after advancing it; a SystemClock ticks
itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Self

from tanghulu.discovery.base import DEFAULT_TTL_S, EventKind, Instance, InstanceEvent
from tanghulu.discovery.leases import LeaseTable
from tanghulu.errors import MasterUnavailable, Overloaded
from tanghulu.runtime.clock import Clock, SystemClock
from tanghulu.types import Role

MAX_UNREAD_EVENTS = 1 << 16


class MemoryRegistry:
    """The registered instances, and the queues of their watchers."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self._leases = LeaseTable()
        self._alive: dict[int, Instance] = {}  # lease id -> instance of a live process
        self._watchers: set[asyncio.Queue[InstanceEvent]] = set()

    def enter(self, instance: Instance, ttl_s: float) -> int:
        """Register or replace ``instance``; returns its lease id."""
        self.tick()
        lease_id = self._leases.register(instance, ttl_s, self.clock.now_s())
        self._alive[lease_id] = instance
        self._publish()
        return lease_id

    def leave(self, lease_id: int) -> None:
        """End a lease now."""
        instance = self._alive.pop(lease_id, None)
        if instance is not None:
            self._leases.deregister(instance.id, lease_id)
            self._publish()

    def abandon(self, lease_id: int) -> None:
        """Stop renewing this lease: its process has crashed."""
        self.tick()
        self._alive.pop(lease_id, None)

    def tick(self) -> None:
        """Renew the leases of live processes and end the other expired ones."""
        now_s = self.clock.now_s()
        for lease_id, instance in self._alive.items():
            self._leases.keep_alive(instance.id, lease_id, now_s)
        self._leases.expire(now_s)
        self._publish()

    def attach(self) -> tuple[list[Instance], asyncio.Queue[InstanceEvent]]:
        """Return the current instances, and a queue of all later changes (to be detached)."""
        self.tick()
        queue: asyncio.Queue[InstanceEvent] = asyncio.Queue(MAX_UNREAD_EVENTS)
        self._watchers.add(queue)
        return self._leases.instances(), queue

    def detach(self, queue: asyncio.Queue[InstanceEvent]) -> None:
        """Stop filling ``queue``."""
        self._watchers.discard(queue)

    def _publish(self) -> None:
        for event in self._leases.take_events():
            for queue in self._watchers:
                if queue.full():
                    raise Overloaded(f"a watcher in this process left {MAX_UNREAD_EVENTS} events unread")
                queue.put_nowait(event)

    def check(self) -> None:
        """Assert that the table is sound."""
        self._leases.check()


class MemoryRegistration:
    """An instance in a registry, until it is closed or its process crashes."""

    def __init__(self, discovery: MemoryDiscovery, instance: Instance, ttl_s: float) -> None:
        self._discovery = discovery
        self._instance = instance
        self.ttl_s = ttl_s
        self.lease_id = discovery.registry.enter(instance, ttl_s)

    async def update(self, instance: Instance) -> None:
        """Replace the registered contents (same id)."""
        assert instance.id == self._instance.id, "an update keeps the id"
        registry = self._discovery.registry
        registry.abandon(self.lease_id)
        self._instance = instance
        self.lease_id = registry.enter(instance, self.ttl_s)

    async def close(self) -> None:
        """Unregister now."""
        self._discovery.registrations.discard(self)
        self._discovery.registry.leave(self.lease_id)


class MemoryDiscovery:
    """One process's view of a MemoryRegistry; leaving the context closes its registrations."""

    def __init__(self, registry: MemoryRegistry) -> None:
        self.registry = registry
        self.registrations: set[MemoryRegistration] = set()
        self._crashed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for registration in list(self.registrations):
            await registration.close()

    async def look(self) -> None:
        """Return at once: the registry is always available."""

    async def require_role(self, instance: Instance) -> None:
        """Do nothing: the registry checks this when the instance registers."""

    async def register(self, instance: Instance, ttl_s: float = DEFAULT_TTL_S) -> MemoryRegistration:
        """Register ``instance``. Raises MasterUnavailable after ``crash``."""
        if self._crashed:
            raise MasterUnavailable("this process has crashed; registering needs another MemoryDiscovery")
        registration = MemoryRegistration(self, instance, ttl_s)
        self.registrations.add(registration)
        return registration

    async def watch(self, *roles: Role, namespace: str = "default") -> AsyncIterator[InstanceEvent]:
        """Yield every live instance, then SYNCED, then changes."""

        def wanted(instance: Instance) -> bool:
            return instance.namespace == namespace and (not roles or instance.role in roles)

        present, queue = self.registry.attach()
        try:
            for instance in filter(wanted, present):
                yield InstanceEvent(EventKind.PUT, instance)
            yield InstanceEvent(EventKind.SYNCED)
            while True:
                event = await queue.get()
                if event.instance is not None and wanted(event.instance):
                    yield event
        finally:
            self.registry.detach(queue)

    def crash(self) -> None:
        """Stop like a killed process, silently. The instances vanish when their leases end."""
        self._crashed = True
        for registration in self.registrations:
            self.registry.abandon(registration.lease_id)
            if isinstance(self.registry.clock, SystemClock):
                asyncio.get_running_loop().call_later(registration.ttl_s + 0.001, self.registry.tick)
        self.registrations.clear()
