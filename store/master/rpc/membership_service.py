"""The membership service: calls to the lease table, and the stream of joining and leaving instances."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

import structlog

from tanghulu.auth.certificate_roles import WORKER, require_role
from tanghulu.discovery import membership
from tanghulu.discovery.base import EventKind, Instance
from tanghulu.discovery.instance_wire import InstanceEntry
from tanghulu.discovery.membership import (
    DeregisterReply,
    KeepAliveReply,
    LeaseRequest,
    RegisterReply,
    RegisterRequest,
    WatchReply,
    WatchRequest,
)
from tanghulu.errors import Overloaded
from tanghulu.rpc.fast_server import AnswerStream, FastService, Peer
from tanghulu.rpc.streams import send_all
from tanghulu.store.master.directory.events import Lagged
from tanghulu.store.master.server import MasterServer
from tanghulu.types import Role

_log = structlog.get_logger(__name__)
_EVENTS_PER_READ_BYTES = 1 << 20
#: The roles of instances visible to a token without the right to join.
_FOR_CLIENTS = frozenset({Role.MASTER})


class MembershipService:
    """Discovery, as served by the master."""

    def __init__(self, server: MasterServer) -> None:
        self._server = server
        self._master = server.master

    def serve(self, service: FastService) -> None:
        """Answer the methods of ``membership``."""
        service.register(membership.REGISTER, self._register)
        service.register(membership.KEEP_ALIVE, self._keep_alive)
        service.register(membership.DEREGISTER, self._deregister)
        service.register(membership.WATCH, self._watch)

    async def _register(self, peer: Peer, request: RegisterRequest, attachment: memoryview) -> RegisterReply:
        """Enter or replace an instance."""
        self._server.ownership.require_lead()
        instance = request.entry.instance()
        certified = WORKER if instance.role.prefills or instance.role.decodes else instance.role.value
        require_role(peer.roles, certified, f"to register {instance.id}")
        async with self._admitting(instance):
            lease_id = self._master.register(instance, request.ttl_ms / 1000, self._server.now_s, _owner(peer))
        self._server.changed()
        _log.info("instance.registered", instance=instance.id, address=str(instance.address))
        return RegisterReply(lease_id, self._master.generation)

    def _admitting(self, instance: Instance) -> contextlib.AbstractAsyncContextManager[None]:
        return self._server.ownership.admitting(instance) if instance.role is Role.NODE else contextlib.nullcontext()

    def _keep_alive(self, peer: Peer, request: LeaseRequest, attachment: memoryview) -> KeepAliveReply:
        """Renew a lease. A request without an instance is no sign of a predecessor."""
        self._server.ownership.require_lead()
        known = bool(request.instance_id) and self._master.keep_alive(
            request.instance_id, request.lease_id, self._server.now_s, _owner(peer)
        )
        return KeepAliveReply(known, self._master.generation)

    def _deregister(self, peer: Peer, request: LeaseRequest, attachment: memoryview) -> DeregisterReply:
        """End a lease; an already ended lease is no error."""
        self._server.ownership.require_lead()
        if self._master.deregister(request.instance_id, request.lease_id, _owner(peer)):
            _log.info("instance.deregistered", instance=request.instance_id)
            self._server.changed()
        return DeregisterReply()

    def _watch(self, peer: Peer, request: WatchRequest, attachment: memoryview) -> AnswerStream:
        """Stream every live instance, then SYNCED, then changes. Clients see masters alone."""
        roles = frozenset(request.roles or Role)
        if peer.identity is not None and not peer.identity.sees_metrics:
            roles &= _FOR_CLIENTS
        return send_all(peer, self._events(roles, request.namespace), WatchReply())

    async def _events(self, roles: frozenset[Role], namespace: str) -> AsyncGenerator[WatchReply, None]:
        def wanted(instance: Instance) -> bool:
            return instance.namespace == namespace and instance.role in roles

        self._server.ownership.require_lead()
        ring = self._master.members
        cursor = ring.last
        present = [instance for instance in self._master.leases.instances() if wanted(instance)]
        with self._server.metrics.followers.labels("membership").track_inprogress():
            for instance in present:
                yield WatchReply(EventKind.PUT, InstanceEntry.of(instance))
            yield WatchReply(EventKind.SYNCED)
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
                        yield WatchReply(event.kind, InstanceEntry.of(event.instance))


def _owner(peer: Peer) -> str:
    """Return the token presented by the peer, as its hash; "" without tokens."""
    return "" if peer.identity is None else peer.identity.sha256
