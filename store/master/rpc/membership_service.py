"""The Membership service: gRPC calls to the lease table, and the stream of instances that come and go."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc.aio
import structlog

from tanghulu.auth.certificate_roles import WORKER, relayed_roles, require_role
from tanghulu.discovery.base import EventKind, Instance, InstanceEvent
from tanghulu.discovery.instance_wire import instance_from_proto, instance_to_proto, role_of
from tanghulu.errors import Overloaded, TanghuluError
from tanghulu.protos import membership_pb2 as pb
from tanghulu.protos import membership_pb2_grpc
from tanghulu.rpc.authorizer import CALLER
from tanghulu.rpc.grpc_edge import abort
from tanghulu.store.master.directory.events import Lagged
from tanghulu.store.master.server import MasterServer
from tanghulu.types import Role

_log = structlog.get_logger(__name__)
_KINDS = {EventKind.PUT: pb.InstanceEvent.PUT, EventKind.DELETE: pb.InstanceEvent.DELETE}
_EVENTS_PER_READ_BYTES = 1 << 20
#: The roles of instances that a token without the right to join sees.
_FOR_CLIENTS = frozenset({Role.MASTER})
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class MembershipService(membership_pb2_grpc.MembershipServicer):
    """Discovery, as the master serves it."""

    def __init__(self, server: MasterServer) -> None:
        self._server = server
        self._master = server.master

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterReply:
        """Enter or replace an instance."""
        try:
            self._server.require_leadership()
            instance = instance_from_proto(request.instance)
            certified = WORKER if instance.role.prefills or instance.role.decodes else instance.role.value
            require_role(relayed_roles(context.peer()), certified, f"to register {instance.id}")
            async with self._admitting(instance):
                lease_id = self._master.register(instance, request.ttl_ms / 1000, self._server.now_s, _owner())
        except TanghuluError as error:
            await abort(context, error)
            raise
        self._server.changed()
        _log.info("instance.registered", instance=instance.id, address=str(instance.address))
        return pb.RegisterReply(lease_id=lease_id, master_generation=self._master.generation)

    def _admitting(self, instance: Instance) -> contextlib.AbstractAsyncContextManager[None]:
        leadership = self._server.leadership
        if leadership is None or instance.role is not Role.NODE:
            return contextlib.nullcontext()
        return leadership.admitting(instance)

    async def KeepAlive(self, request: pb.KeepAliveRequest, context: Context) -> pb.KeepAliveReply:
        """Renew a lease; without an instance only tell that this master leads, which is no sign of a predecessor."""
        await self._require(context)
        known = bool(request.instance_id) and self._master.keep_alive(
            request.instance_id, request.lease_id, self._server.now_s, _owner()
        )
        return pb.KeepAliveReply(known=known, master_generation=self._master.generation)

    async def Deregister(self, request: pb.DeregisterRequest, context: Context) -> pb.DeregisterReply:
        """End a lease; a lease that is gone already is no error."""
        await self._require(context)
        if self._master.deregister(request.instance_id, request.lease_id, _owner()):
            _log.info("instance.deregistered", instance=request.instance_id)
            self._server.changed()
        return pb.DeregisterReply()

    async def _require(self, context: Context) -> None:
        try:
            self._server.require_leadership()
        except TanghuluError as error:
            await abort(context, error)

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.InstanceEvent]:
        """Stream every live instance, then SYNCED, then changes. Clients see masters alone."""
        open_streams = self._server.metrics.followers.labels("membership")
        open_streams.inc()
        try:
            self._server.require_leadership()
            roles = frozenset(role_of(component) for component in request.components) or frozenset(Role)
            async for event in self._watch(roles, request.namespace or "default"):
                yield event
        except TanghuluError as error:
            await abort(context, error)
        finally:
            open_streams.dec()

    async def _watch(self, roles: frozenset[Role], namespace: str) -> AsyncIterator[pb.InstanceEvent]:
        caller = CALLER.get()
        if caller is not None and not caller.sees_metrics:
            roles &= _FOR_CLIENTS

        def wanted(instance: Instance) -> bool:
            return instance.namespace == namespace and instance.role in roles

        ring = self._master.members
        cursor = ring.last
        present = [instance for instance in self._master.leases.instances() if wanted(instance)]
        for instance in present:
            yield pb.InstanceEvent(kind=pb.InstanceEvent.PUT, instance=instance_to_proto(instance))
        yield pb.InstanceEvent(kind=pb.InstanceEvent.SYNCED)
        while True:
            try:
                events = ring.read(cursor, _EVENTS_PER_READ_BYTES)
            except Lagged:
                self._server.metrics.cut_off_followers.inc()
                raise Overloaded(f"this watch fell behind change {ring.first}; watch again") from None
            if not events:
                await self._server.news()
            for number, event in events:
                cursor = number
                if event.instance is not None and wanted(event.instance):
                    yield _to_wire(event, event.instance)


def _owner() -> str:
    """The token that the call under way shows, by its hash; "" without tokens."""
    caller = CALLER.get()
    return "" if caller is None else caller.sha256


def _to_wire(event: InstanceEvent, instance: Instance) -> pb.InstanceEvent:
    return pb.InstanceEvent(kind=_KINDS[event.kind], instance=instance_to_proto(instance))
