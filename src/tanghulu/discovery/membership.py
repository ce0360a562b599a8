"""The master's methods to register and watch instances: messages, numbers, rights."""

from __future__ import annotations

from typing import Any, Final

from tanghulu.auth.tenants import Right
from tanghulu.discovery.base import EventKind
from tanghulu.discovery.instance_wire import InstanceEntry
from tanghulu.rpc.methods import Method, Rule
from tanghulu.rpc.wire import U32, U64, FastMessage
from tanghulu.types import Role


class RegisterRequest(FastMessage, frozen=True):
    """Add or replace an instance; it stays while KEEP_ALIVE comes within ``ttl_ms``."""

    entry: InstanceEntry
    ttl_ms: U32


class RegisterReply(FastMessage, frozen=True):
    """``master_generation`` changes when the master restarts: report again."""

    lease_id: U64
    master_generation: U64


class LeaseRequest(FastMessage, frozen=True):
    """Renew or end a lease. KEEP_ALIVE without an instance renews nothing, and is answered by the leader only."""

    lease_id: U64 = 0
    instance_id: str = ""


class KeepAliveReply(FastMessage, frozen=True):
    """``known`` is false if the lease has ended; register again."""

    known: bool
    master_generation: U64


class DeregisterReply(FastMessage, frozen=True):
    """The lease has ended, now or before."""


class WatchRequest(FastMessage, frozen=True):
    """Request every live instance (PUT), then SYNCED, then changes. Without ``roles``: all roles."""

    namespace: str = "default"
    roles: tuple[Role, ...] = ()


class WatchReply(FastMessage, frozen=True):
    """A change of ``entry``, which is None with SYNCED. A message without a ``kind`` is the stream's beat."""

    kind: EventKind | None = None
    entry: InstanceEntry | None = None


_JOIN: Final = Rule("registering", Right.JOIN)
REGISTER = Method(60, "register", RegisterRequest, RegisterReply, _JOIN)
KEEP_ALIVE = Method(61, "keep_alive", LeaseRequest, KeepAliveReply, _JOIN)
DEREGISTER = Method(62, "deregister", LeaseRequest, DeregisterReply, _JOIN)
#: Any authenticated caller; clients see the masters alone.
WATCH = Method(63, "watch", WatchRequest, WatchReply, Rule("watching instances", None))

METHODS: tuple[Method[Any, Any], ...] = (REGISTER, KEEP_ALIVE, DEREGISTER, WATCH)
