"""Discovery in etcd, for clusters that already run one: instances are keys under leases.

Keys are ``/tanghulu/<namespace>/<instance id>``, values as ``instance_wire`` encodes them. A watch reads the range,
then follows from the next revision; after a lost connection it reads the range again and yields the differences.

etcd guards the keys with its own users and certificates: any client that can write below ``/tanghulu`` can replace and
remove any instance. An id keeps its role while its key exists, which guards against mistakes only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Self

import structlog

from tanghulu.discovery.base import DEFAULT_TTL_S, Instance, InstanceEvent, require_same_role
from tanghulu.discovery.etcd_client import EtcdClient
from tanghulu.discovery.instance_wire import instance_from_bytes, instance_to_bytes
from tanghulu.discovery.mirror import InstanceMirror
from tanghulu.discovery.renewing import RenewedRegistration
from tanghulu.errors import InvalidRequest, TanghuluError
from tanghulu.protos import etcd_pb2
from tanghulu.runtime.telemetry import RareLog
from tanghulu.types import Address, Role

_log = structlog.get_logger(__name__)
_PREFIX = "/tanghulu"
_RETRY_S = 0.2


class EtcdRegistration(RenewedRegistration):
    """A key under a lease that its own task keeps alive."""

    def __init__(self, discovery: EtcdDiscovery, instance: Instance, ttl_s: float) -> None:
        super().__init__(discovery.registrations, instance, ttl_s)
        self._discovery = discovery
        #: The lease under which ``instance`` was last written; 0 while a write is due.
        self._lease = 0

    async def _enter(self) -> None:
        async with self._lock:
            await self._write(await self._discovery.client.grant(self._ttl_s))

    async def _write(self, lease: int) -> None:
        """Put the key. Until that succeeds, the write is due, and each renewal registers anew."""
        self._lease = 0
        await self._discovery.put(self._instance, lease)
        self._lease = lease

    async def _renew_forever(self) -> None:
        """Keep the lease alive; register under a new one if it has expired, or the last write failed."""
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            try:
                if not (self._lease and await self._discovery.client.keep_alive(self._lease)):
                    await self._enter()
            except TanghuluError as error:
                _log.warning("discovery.lease_not_renewed", instance=self._instance.id, error=error.message)

    async def update(self, instance: Instance) -> None:
        """Replace the registered contents (same id). A failed write is repeated at the next renewal."""
        assert instance.id == self._instance.id, "an update keeps the id"
        async with self._lock:
            self._instance = instance
            if self._lease:
                await self._write(self._lease)

    async def _leave(self) -> None:
        with contextlib.suppress(TanghuluError):
            await self._discovery.client.revoke(self._lease)


class EtcdDiscovery:
    """Instances in the etcd at ``addresses``. An async context manager; leases have etcd's minimum TTL of about 2 s."""

    def __init__(self, *addresses: Address) -> None:
        self.client = EtcdClient(addresses)
        self._rare_log = RareLog(_log)
        self.registrations: set[EtcdRegistration] = set()
        #: Unreadable entries that were skipped.
        self.num_unreadable = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for registration in list(self.registrations):
            await registration.close()
        await self.client.close()

    async def look(self) -> None:
        """Read a key. Raises MasterUnavailable."""
        await self.client.range(_PREFIX.encode())

    async def register(self, instance: Instance, ttl_s: float = DEFAULT_TTL_S) -> EtcdRegistration:
        """Register ``instance`` under a lease of ``ttl_s`` (rounded up to seconds). Raises MasterUnavailable."""
        return await EtcdRegistration(self, instance, ttl_s).open()

    async def require_role(self, instance: Instance) -> None:
        """Raise Conflict if a live instance with this id has another role."""
        for kv in (await self.client.range(self._key(instance))).kvs:
            try:
                known = instance_from_bytes(kv.value)
            except InvalidRequest:
                continue
            require_same_role(known, instance)

    async def put(self, instance: Instance, lease: int) -> None:
        """Write the instance's key under ``lease``."""
        await self.client.put(self._key(instance), instance_to_bytes(instance), lease)

    async def watch(self, *roles: Role, namespace: str = "default") -> AsyncIterator[InstanceEvent]:
        """Yield every live instance, then SYNCED, then changes; reconnects by itself."""
        mirror = InstanceMirror(grace_s=0)  # etcd keeps leases over its restarts: missing means gone
        while True:
            try:
                async with aclosing(self._follow(self._range_key(namespace), mirror, frozenset(roles))) as events:
                    async for event in events:
                        yield event
            except TanghuluError as error:
                self._rare_log.warning("discovery.etcd_unavailable", error=error.message)
            await asyncio.sleep(_RETRY_S)

    async def _follow(
        self, start: bytes, mirror: InstanceMirror, roles: frozenset[Role]
    ) -> AsyncGenerator[InstanceEvent, None]:
        end = start[:-1] + bytes([start[-1] + 1])
        snapshot = await self.client.range(start, end)
        mirror.begin()
        for kv in snapshot.kvs:
            for event in self._put_events(mirror, kv, roles):
                yield event
        for event in mirror.synced(0):
            yield event
        async with aclosing(self.client.watch(start, end, snapshot.header.revision + 1)) as changes:
            async for change in changes:
                if change.type == etcd_pb2.Event.DELETE:
                    events = mirror.delete(change.kv.key[len(start) :].decode(errors="replace"))
                else:
                    events = self._put_events(mirror, change.kv, roles)
                for event in events:
                    yield event

    def _put_events(self, mirror: InstanceMirror, kv: etcd_pb2.KeyValue, roles: frozenset[Role]) -> list[InstanceEvent]:
        """Return the events of an entry; one written by a newer version or a stranger is counted and gives none."""
        try:
            instance = instance_from_bytes(kv.value)
        except InvalidRequest as error:
            self.num_unreadable += 1
            _log.warning("discovery.unknown_instance", key=kv.key.decode(errors="replace"), error=str(error))
            return []
        return mirror.put(instance) if not roles or instance.role in roles else []

    def _range_key(self, namespace: str) -> bytes:
        return f"{_PREFIX}/{namespace}/".encode()

    def _key(self, instance: Instance) -> bytes:
        return self._range_key(instance.namespace) + instance.id.encode()
