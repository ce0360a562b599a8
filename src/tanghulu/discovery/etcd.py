"""Discovery in etcd, for clusters that run one already: instances are keys under leases.

Keys are ``/tanghulu/<namespace>/<instance id>``, values the Instance message. A watch reads the range, then follows
from the next revision; when the connection breaks it reads the range again and tells the differences.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

import grpc.aio
import structlog

from tanghulu.discovery.base import DEFAULT_TTL_S, EventKind, Instance, InstanceEvent
from tanghulu.discovery.instance_wire import instance_from_proto, instance_to_proto
from tanghulu.errors import MasterUnavailable
from tanghulu.protos import common_pb2, etcd_pb2, etcd_pb2_grpc
from tanghulu.rpc.grpc_edge import channel, typed_errors
from tanghulu.types import Address, Role

_log = structlog.get_logger(__name__)
_CALL_DEADLINE_S = 3.0
_RETRY_S = 0.2


class EtcdRegistration:
    """A key under a lease that a task of its own keeps alive."""

    def __init__(self, discovery: EtcdDiscovery, instance: Instance, ttl_s: float) -> None:
        self._discovery = discovery
        self._instance = instance
        self._ttl_s = ttl_s
        self._lease = 0
        self._renewing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Take a lease and enter the key; raises MasterUnavailable when etcd does not answer."""
        await self._enter()
        self._renewing = asyncio.create_task(self._renew())

    async def _enter(self) -> None:
        self._lease = await self._discovery.grant(self._ttl_s)
        await self._discovery.put(self._instance, self._lease)

    async def _renew(self) -> None:
        """Keep the lease alive; take a new one when etcd says that it is gone."""
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            try:
                if not await self._discovery.keep_alive(self._lease):
                    await self._enter()
            except MasterUnavailable as error:
                _log.warning("discovery.etcd_unavailable", error=error.message)

    async def update(self, instance: Instance) -> None:
        """Replace the registered contents (same id)."""
        assert instance.id == self._instance.id, "an update keeps the id"
        self._instance = instance
        await self._discovery.put(instance, self._lease)

    async def close(self) -> None:
        """Unregister now; an etcd that is away lets the lease run out."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
            with contextlib.suppress(MasterUnavailable):
                await self._discovery.revoke(self._lease)


class EtcdDiscovery:
    """Instances in the etcd at ``address``. An async context manager; leases have etcd's least TTL of about 2 s."""

    def __init__(self, address: Address, prefix: str = "/tanghulu") -> None:
        self._peer = f"etcd at {address}"
        self._prefix = prefix
        self._channel = channel(address)
        self._kv = etcd_pb2_grpc.KVStub(self._channel)
        self._leases = etcd_pb2_grpc.LeaseStub(self._channel)
        self._watches = etcd_pb2_grpc.WatchStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def register(self, instance: Instance, ttl_s: float = DEFAULT_TTL_S) -> EtcdRegistration:
        """Enter ``instance`` under a lease of ``ttl_s`` (rounded up to seconds). Raises MasterUnavailable."""
        registration = EtcdRegistration(self, instance, ttl_s)
        await registration.open()
        return registration

    async def grant(self, ttl_s: float) -> int:
        """A new lease."""
        request = etcd_pb2.LeaseGrantRequest(TTL=math.ceil(ttl_s))
        async with typed_errors(self._peer, MasterUnavailable):
            return int((await self._leases.LeaseGrant(request, timeout=_CALL_DEADLINE_S)).ID)

    async def put(self, instance: Instance, lease: int) -> None:
        """Write the instance's key under ``lease``."""
        value = instance_to_proto(instance).SerializeToString()
        request = etcd_pb2.PutRequest(key=self._key(instance), value=value, lease=lease)
        async with typed_errors(self._peer, MasterUnavailable):
            await self._kv.Put(request, timeout=_CALL_DEADLINE_S)

    async def keep_alive(self, lease: int) -> bool:
        """Renew ``lease``; False if it is gone."""
        async with typed_errors(self._peer, MasterUnavailable):
            call = self._leases.LeaseKeepAlive(timeout=_CALL_DEADLINE_S)
            await call.write(etcd_pb2.LeaseKeepAliveRequest(ID=lease))
            await call.done_writing()
            reply = await call.read()
            call.cancel()
        return reply is not grpc.aio.EOF and reply.TTL > 0

    async def revoke(self, lease: int) -> None:
        """End ``lease`` and the key under it."""
        async with typed_errors(self._peer, MasterUnavailable):
            await self._leases.LeaseRevoke(etcd_pb2.LeaseRevokeRequest(ID=lease), timeout=_CALL_DEADLINE_S)

    async def watch(self, *roles: Role, namespace: str = "default") -> AsyncIterator[InstanceEvent]:
        """First every live instance, then SYNCED, then changes; connects again by itself."""
        known: dict[bytes, Instance] = {}
        synced = False
        while True:
            try:
                async for event in self._follow(self._range_key(namespace), known, roles, synced):
                    synced = synced or event.kind is EventKind.SYNCED
                    yield event
            except MasterUnavailable as error:
                _log.warning("discovery.etcd_unavailable", error=error.message)
            await asyncio.sleep(_RETRY_S)

    async def _follow(
        self, start: bytes, known: dict[bytes, Instance], roles: tuple[Role, ...], synced: bool
    ) -> AsyncIterator[InstanceEvent]:
        end = start[:-1] + bytes([start[-1] + 1])
        async with typed_errors(self._peer, MasterUnavailable):
            snapshot = await self._kv.Range(etcd_pb2.RangeRequest(key=start, range_end=end), timeout=_CALL_DEADLINE_S)
            present = {kv.key: _instance(kv.value) for kv in snapshot.kvs}
            for key in known.keys() - present.keys():
                yield InstanceEvent(EventKind.DELETE, known.pop(key))
            for key, instance in present.items():
                if _wanted(instance, roles) and known.get(key) != instance:
                    known[key] = instance
                    yield InstanceEvent(EventKind.PUT, instance)
            if not synced:
                yield InstanceEvent(EventKind.SYNCED)
            create = etcd_pb2.WatchCreateRequest(key=start, range_end=end, start_revision=snapshot.header.revision + 1)
            call = self._watches.Watch()
            try:
                await call.write(etcd_pb2.WatchRequest(create_request=create))
                async for response in call:
                    for change in response.events:
                        event = _apply(known, change, roles)
                        if event is not None:
                            yield event
                    if response.canceled:
                        return
            finally:
                call.cancel()

    def _range_key(self, namespace: str) -> bytes:
        return f"{self._prefix}/{namespace}/".encode()

    def _key(self, instance: Instance) -> bytes:
        return self._range_key(instance.namespace) + instance.id.encode()


def _instance(value: bytes) -> Instance:
    return instance_from_proto(common_pb2.Instance.FromString(value))


def _wanted(instance: Instance, roles: tuple[Role, ...]) -> bool:
    return not roles or instance.role in roles


def _apply(known: dict[bytes, Instance], change: etcd_pb2.Event, roles: tuple[Role, ...]) -> InstanceEvent | None:
    if change.type == etcd_pb2.Event.DELETE:
        gone = known.pop(change.kv.key, None)
        return InstanceEvent(EventKind.DELETE, gone) if gone is not None else None
    instance = _instance(change.kv.value)
    if not _wanted(instance, roles) or known.get(change.kv.key) == instance:
        return None
    known[change.kv.key] = instance
    return InstanceEvent(EventKind.PUT, instance)
