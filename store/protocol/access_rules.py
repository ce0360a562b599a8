"""The rules of methods for which it takes more than a right and the names of fields; see ``methods``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tanghulu.auth.tenants import Identity, Right, TokenTable
from tanghulu.errors import ConfigError
from tanghulu.protos import directory_pb2
from tanghulu.rpc.methods import Rule, scope_keys
from tanghulu.store.protocol.messages import EvictionPolicy, MastersReply, TenantsReply


def _in_listing(identity: Identity, request: directory_pb2.ListKeysRequest) -> directory_pb2.ListKeysRequest:
    request.prefix = identity.scope + request.prefix
    if request.after:
        request.after = identity.scope + request.after
    return request


def _out_of_listing(identity: Identity, reply: directory_pb2.ListKeysReply) -> directory_pb2.ListKeysReply:
    for info in reply.keys:
        info.key = identity.unscoped(info.key)
    return reply


def _in_events(identity: Identity, request: directory_pb2.EventsRequest) -> directory_pb2.EventsRequest:
    request.key_prefix = identity.scope + request.key_prefix
    return request


def _out_of_events(identity: Identity, batch: directory_pb2.EventBatch) -> directory_pb2.EventBatch:
    for event in batch.events:
        event.keys[:] = list(map(identity.unscoped, event.keys))
    return batch


def _only_itself(identity: Identity, reply: TenantsReply) -> TenantsReply:
    return TenantsReply([usage for usage in reply.tenants if usage.tenant == identity.tenant])


def _to_switch(request: EvictionPolicy) -> Right:
    return Right.ADMIN if request.name else Right.READ


def _to_locate(request: Any) -> Right | None:
    """Who only writes has to find what it removes, who only reads removes nothing."""
    if getattr(request, "removing", False):
        return Right.WRITE
    return Right.READ if request.count_only else None


def _removed(request: Any) -> Sequence[str]:
    keys: Sequence[str] = request.keys
    return keys if getattr(request, "removing", False) else ()


def refuse_open_carriers(table: TokenTable, transports: str) -> None:
    """Raise ConfigError for transports by which a peer reaches all of a node's memory without asking, if some may not.

    ``transports`` is the list of names as --transports has it.
    """
    named = {each.strip() for each in transports.split(",")} & {"rdma", "ucx"}
    kept_out = sorted(name for name, tenant in table.tenants.items() if not tenant.shared_memory)
    if named and kept_out:
        raise ConfigError(
            f"--transports {'/'.join(sorted(named))} reaches all memory of a node, but tenant {kept_out[0]!r} is not "
            "trusted with it: give every tenant shared_memory = true in the tokens file, or leave the transport out"
        )


def _with_scope(identity: Identity, reply: MastersReply) -> MastersReply:
    return msgspec.structs.replace(reply, key_scope=identity.scope)


def _without_figures(identity: Identity, reply: Any) -> Any:
    """A list of nodes for a tenant, which may not count what others hold; an answer may be encoded already."""
    if identity.sees_metrics:
        return reply
    if isinstance(reply, bytes):
        return _without_figures(identity, directory_pb2.NodesReply.FromString(reply)).SerializeToString()
    for node in reply.nodes:
        node.used_bytes = node.ssd_used_bytes = node.num_chunks = node.num_unsafe = 0
    if isinstance(reply, directory_pb2.NodesReply):
        reply.num_keys = 0
    return reply


EVICTION = Rule("switching the eviction policy", _to_switch)
TENANTS = Rule("tenants", None, None, _only_itself)
NODES = Rule("nodes", None, None, _without_figures)
PLACE = Rule("put", Right.WRITE, None, _without_figures)
MASTERS = Rule("nodes", None, None, _with_scope)
LIST_KEYS = Rule("ls", Right.READ, _in_listing, _out_of_listing)
LOCATE = Rule("exists", _to_locate, scope_keys("keys"), written=_removed)
EVENTS = Rule("following events", Right.READ, _in_events, _out_of_events)
