"""The client's edge to the wire: calls to nodes and the master as messages, their answers as values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, cast

from tanghulu.auth.credentials import Credentials
from tanghulu.errors import TanghuluError
from tanghulu.rpc.fast_client import Call, Reply
from tanghulu.rpc.methods import PROTOCOL_VERSION, require_version
from tanghulu.rpc.wire import Failure
from tanghulu.store.client.logic.effects import PeerId
from tanghulu.store.protocol import messages as m
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.directory_messages import NodesRequest
from tanghulu.store.protocol.messages import Found, Reservation, Welcome
from tanghulu.store.protocol.types import MAX_INLINE_BYTES, NewChunk

AnyCall = Call[Any]
AnyReply = Reply[Any]
_PeerIds: TypeAlias = tuple[PeerId, ...]
#: Answers that grant leases.
GrantingReply: TypeAlias = m.GetReply | m.ReserveReply
GRANTING: tuple[type[GrantingReply], ...] = (m.GetReply, m.ReserveReply)


# --- nodes


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


def reserve(items: Iterable[NewChunk], deadline_ms: int, *, visible: bool) -> AnyCall:
    """Request ranges for large values."""
    return methods.RESERVE.call(m.ReserveRequest(list(items), deadline_ms, visible))


def reservations(reply: AnyReply) -> list[Reservation | TanghuluError | None]:
    """Return the range reserved for each value; None: its key exists."""
    message: m.ReserveReply = reply.message
    return [each.error if isinstance(each, Failure) else each for each in message.reservations]


def get(keys: Sequence[str], max_inline_bytes: int = MAX_INLINE_BYTES, deadline_ms: int = 0) -> AnyCall:
    """Request values, small ones inside the answer; ``deadline_ms``: wait for those on an SSD, 0 for some seconds."""
    return methods.GET.call(m.GetRequest(keys, max_inline_bytes, False, deadline_ms))


def leases_in(reply: GrantingReply) -> list[int]:
    """Return the leases granted by the answer to ``get`` or ``reserve``."""
    granted = reply.items if isinstance(reply, m.GetReply) else reply.reservations
    return [each.lease_id for each in granted if isinstance(each, Found | Reservation) and each.lease_id]


def unpin(
    lease_ids: Sequence[int], bytes_read: int = 0, corrupt: Sequence[str] = (), read: Sequence[str] = ()
) -> AnyCall:
    """Return unneeded leases; report keys whose bytes did not match, and keys read by the shared index."""
    return methods.UNPIN.call(m.UnpinRequest(lease_ids, bytes_read, corrupt, read))


def returned_leases(call: AnyCall) -> Sequence[int]:
    """Return the leases given back by ``call``, if it is an ``unpin``."""
    return call.request.lease_ids if isinstance(call.request, m.UnpinRequest) else ()


def node_stat(key: str) -> AnyCall:
    """Request the node's description of a chunk."""
    return methods.CHUNK_STAT.call(m.KeysRequest([key]))


# --- master


def locate(keys: Sequence[str], *, count_only: bool = False, removing: bool = False) -> AnyCall:
    """Request the holders of these keys."""
    return methods.LOCATE.call(m.LocateRequest(keys, count_only, removing))


def locations(reply: AnyReply) -> tuple[list[tuple[_PeerIds, int]], bool]:
    """Return (holders of each key, with the number of leading ones in memory; whether the master lacks some)."""
    message: m.LocateReply = reply.message
    located = [((), 0) if each is None else (each.node_ids, each.num_warm) for each in message.locations]
    return cast("list[tuple[_PeerIds, int]]", located), message.incomplete


def nodes() -> AnyCall:
    """Request all nodes, with their present figures."""
    return methods.NODES.call(NodesRequest())
