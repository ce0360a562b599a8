"""Access rules of methods that need more than a right and field names; see ``methods``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from tanghulu.auth.tenants import Identity, Right, TokenTable
from tanghulu.errors import ConfigError
from tanghulu.rpc.methods import Rule, scope_keys
from tanghulu.rpc.wire import parser_of
from tanghulu.store.protocol.directory_events import EventBatch, EventsRequest
from tanghulu.store.protocol.directory_messages import ListKeysReply, ListKeysRequest, NodesReply, PlaceReply
from tanghulu.store.protocol.messages import EvictionPolicy, MastersReply, TenantsReply


def _in_listing(identity: Identity, request: ListKeysRequest) -> ListKeysRequest:
    after = identity.scope + request.after if request.after else ""
    return replace(request, prefix=identity.scope + request.prefix, after=after)


def _out_of_listing(identity: Identity, reply: ListKeysReply) -> ListKeysReply:
    return replace(reply, keys=[replace(info, key=identity.unscoped(info.key)) for info in reply.keys])


def _in_events(identity: Identity, request: EventsRequest) -> EventsRequest:
    return replace(request, key_prefix=identity.scope + request.key_prefix)


def _out_of_events(identity: Identity, batch: EventBatch) -> EventBatch:
    return replace(
        batch, events=[replace(event, keys=tuple(map(identity.unscoped, event.keys))) for event in batch.events]
    )


def _only_itself(identity: Identity, reply: TenantsReply) -> TenantsReply:
    return TenantsReply([usage for usage in reply.tenants if usage.tenant == identity.tenant])


def _to_switch(request: EvictionPolicy) -> Right:
    return Right.ADMIN if request.name else Right.READ


def _to_locate(request: Any) -> Right | None:
    """Return the right for LOCATE: writers have to find chunks that they remove, readers remove nothing."""
    if getattr(request, "removing", False):
        return Right.WRITE
    return Right.READ if request.count_only else None


def _removed(request: Any) -> Sequence[str]:
    keys: Sequence[str] = request.keys
    return keys if getattr(request, "removing", False) else ()


def refuse_open_carriers(table: TokenTable, transports: str) -> None:
    """Raise ConfigError for transports that give a peer all of a node's memory without a request, if some may not.

    ``transports`` is the list of names as in --transports.
    """
    named = {each.strip() for each in transports.split(",")} & {"rdma", "ucx"}
    kept_out = sorted(name for name, tenant in table.tenants.items() if not tenant.shared_memory)
    if named and kept_out:
        raise ConfigError(
            f"--transports {'/'.join(sorted(named))} reaches all memory of a node, but tenant {kept_out[0]!r} is not "
            "trusted with it: give every tenant shared_memory = true in the tokens file, or leave the transport out"
        )


def _with_scope(identity: Identity, reply: MastersReply) -> MastersReply:
    return replace(reply, key_scope=identity.scope)


_parse_nodes = parser_of(NodesReply)


def _without_figures(identity: Identity, reply: PlaceReply | NodesReply | bytes) -> PlaceReply | NodesReply | bytes:
    """Return a list of nodes for a tenant, without figures about others; an answer may be encoded already."""
    if identity.sees_metrics:
        return reply
    answer = _parse_nodes(reply) if isinstance(reply, bytes) else reply
    nodes = [replace(node, used_bytes=0, ssd_used_bytes=0, num_chunks=0, num_unsafe=0) for node in answer.nodes]
    return replace(answer, nodes=nodes) if isinstance(answer, PlaceReply) else replace(answer, nodes=nodes, num_keys=0)


EVICTION = Rule("switching the eviction policy", _to_switch)
TENANTS = Rule("tenants", None, None, _only_itself)
NODES = Rule("nodes", None, None, _without_figures)
PLACE = Rule("put", Right.WRITE, None, _without_figures)
MASTERS = Rule("nodes", None, None, _with_scope)
LIST_KEYS = Rule("ls", Right.READ, _in_listing, _out_of_listing)
LOCATE = Rule("exists", _to_locate, scope_keys("keys"), written=_removed)
EVENTS = Rule("following events", Right.READ, _in_events, _out_of_events)
