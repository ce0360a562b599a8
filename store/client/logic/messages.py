"""The client's edge to the wire: calls to nodes and the master as messages, their answers as values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias, cast

from tanghulu.auth.credentials import Credentials
from tanghulu.errors import TanghuluError
from tanghulu.rpc.fast_client import Call, Reply
from tanghulu.rpc.methods import PROTOCOL_VERSION, require_version
from tanghulu.rpc.wire import Failure
from tanghulu.store.client.logic.effects import PeerId
from tanghulu.store.protocol import messages as m
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.messages import Found, Reservation, Welcome

AnyCall = Call[Any]
AnyReply = Reply[Any]
_PeerIds: TypeAlias = tuple[PeerId, ...]
#: Answers that grant leases.
GrantingReply: TypeAlias = m.GetReply | m.ReserveReply
GRANTING: tuple[type[GrantingReply], ...] = (m.GetReply, m.ReserveReply)


def hello(client_id: str, shown: Credentials, host_id: str, wants_shm: bool, held: Iterable[int]) -> AnyCall:
    """Build the first frame of a connection to a node."""
    return methods.HELLO.call(
        m.NodeHello(PROTOCOL_VERSION, shown.tenant, shown.token, client_id, host_id, wants_shm, list(held))
    )


def welcome(reply: AnyReply) -> Welcome:
    """Decode the answer to ``hello``; raises VersionMismatch."""
    message: Welcome = reply.message
    require_version(message.protocol_version, message.instance_id)
    return message


def reservations(reply: AnyReply) -> list[Reservation | TanghuluError | None]:
    """Return the range reserved for each value; None: its key exists."""
    message: m.ReserveReply = reply.message
    return [each.error if isinstance(each, Failure) else each for each in message.reservations]


def leases_in(reply: GrantingReply) -> list[int]:
    """Return the leases granted by the answer to GET or RESERVE."""
    granted = reply.items if isinstance(reply, m.GetReply) else reply.reservations
    return [each.lease_id for each in granted if isinstance(each, Found | Reservation) and each.lease_id]


def locations(reply: AnyReply) -> tuple[list[tuple[_PeerIds, int]], bool]:
    """Return (holders of each key, with the number of leading ones in memory; whether the master lacks some)."""
    message: m.LocateReply = reply.message
    located = [((), 0) if each is None else (each.node_ids, each.num_warm) for each in message.locations]
    return cast("list[tuple[_PeerIds, int]]", located), message.incomplete
