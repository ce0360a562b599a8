"""What each method of node and master needs of a token, and where keys stand in its messages."""

from __future__ import annotations

from typing import Any

from tanghulu.auth.tenants import Identity, Right, TokenTable
from tanghulu.errors import ConfigError, Forbidden
from tanghulu.protos import directory_pb2, fastlane_pb2, membership_pb2, store_pb2
from tanghulu.rpc.authorizer import Rule
from tanghulu.store.protocol.packed_directory import LocateRequest
from tanghulu.store.protocol.packed_node import GetRequest, PutRequest, UnpinRequest
from tanghulu.store.protocol.packed_stream import StreamRequest
from tanghulu.store.protocol.types import Proclamation
from tanghulu.types import ChunkKey, Role

# --- where the keys are


def _in_puts(identity: Identity, request: PutRequest) -> PutRequest:
    scoped = identity.scoped
    return request._replace(items=[new._replace(key=ChunkKey(scoped(new.key))) for new in request.items])


def _in_stream(identity: Identity, request: StreamRequest) -> StreamRequest:
    return request._replace(item=request.item._replace(key=ChunkKey(identity.scoped(request.item.key))))


def _in_proclamation(identity: Identity, said: Proclamation) -> Proclamation:
    return said._replace(key=ChunkKey(identity.scoped(said.key)))


def _in_proclamations(identity: Identity, said: list[Proclamation]) -> list[Proclamation]:
    return [_in_proclamation(identity, each) for each in said]


def _in_named_keys(identity: Identity, request: Any) -> Any:
    """Of the packed messages, which are tuples."""
    return request._replace(keys=list(map(identity.scoped, request.keys)))


def _in_unpin(identity: Identity, request: UnpinRequest) -> UnpinRequest:
    scoped = identity.scoped
    return request._replace(corrupt=list(map(scoped, request.corrupt)), read=list(map(scoped, request.read)))


def _in_keys(identity: Identity, request: Any) -> Any:
    """Of protobuf messages with ``keys``."""
    request.keys[:] = list(map(identity.scoped, request.keys))
    return request


def _in_items(identity: Identity, request: store_pb2.PutRequest) -> store_pb2.PutRequest:
    for item in request.items:
        item.key = identity.scoped(item.key)
    return request


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


def _of_no_tenant(identity: Identity, request: Any) -> Any:
    """A node holds chunks of all tenants, so none of them may say what it holds."""
    raise Forbidden(
        f"token {identity.token_name!r} belongs to tenant {identity.tenant!r}: a node needs an operator's, with 'join'"
    )


def _no_node(identity: Identity, request: membership_pb2.RegisterRequest) -> membership_pb2.RegisterRequest:
    """Tenants have workers and conductors of their own, but no nodes."""
    if request.instance.component == Role.NODE.value:
        _of_no_tenant(identity, request)
    return request


def _only_itself(identity: Identity, reply: store_pb2.TenantsReply) -> store_pb2.TenantsReply:
    return store_pb2.TenantsReply(tenants=[usage for usage in reply.tenants if usage.tenant == identity.tenant])


def _to_switch(request: store_pb2.EvictionRequest) -> Right:
    return Right.ADMIN if request.policy else Right.READ


def _to_ask(request: Any) -> Right | None:
    """Who only writes has to find what it removes."""
    return Right.READ if request.count_only else None


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


_METHODS = fastlane_pb2.Method
assert GetRequest._fields[0] == LocateRequest._fields[0] == "keys"

NODE_RULES: dict[int, Rule] = {
    _METHODS.METHOD_PUT: Rule("put", Right.WRITE, _in_puts),
    _METHODS.METHOD_DESK: Rule("put", Right.WRITE),
    _METHODS.METHOD_STREAM: Rule("put", Right.WRITE, _in_stream),
    _METHODS.METHOD_SETTLE: Rule("put", Right.WRITE),
    _METHODS.METHOD_RESERVE: Rule("put", Right.WRITE, _in_puts),
    _METHODS.METHOD_COMMIT: Rule("put", Right.WRITE),
    _METHODS.METHOD_GET: Rule("get", Right.READ, _in_named_keys),
    _METHODS.METHOD_UNPIN: Rule("unpin", None, _in_unpin),
    _METHODS.METHOD_EXISTS: Rule("exists", Right.READ, _in_keys),
    _METHODS.METHOD_REMOVE: Rule("remove", Right.WRITE, _in_keys),
    _METHODS.METHOD_CHUNK_STAT: Rule("stat", Right.READ, _in_keys),
    _METHODS.METHOD_EVICTION: Rule("switching the eviction policy", _to_switch),
    _METHODS.METHOD_DRAIN: Rule("drain", Right.ADMIN),
    _METHODS.METHOD_EVICT: Rule("evict", Right.ADMIN),
    _METHODS.METHOD_VERIFY: Rule("check", Right.ADMIN),
    _METHODS.METHOD_TENANTS: Rule("tenants", None, None, _only_itself),
}

MASTER_RULES: dict[int, Rule] = {
    _METHODS.METHOD_ANNOUNCE: Rule("announcing chunks", Right.JOIN, _of_no_tenant),
    _METHODS.METHOD_LOCATE: Rule("exists", _to_ask, _in_named_keys),
    _METHODS.METHOD_PROCLAIM: Rule("put", Right.WRITE, _in_proclamation),
    _METHODS.METHOD_PROCLAIM_MANY: Rule("put", Right.WRITE, _in_proclamations),
    _METHODS.METHOD_PLACE: Rule("put", Right.WRITE),
    _METHODS.METHOD_NODES: Rule("nodes", None),
    _METHODS.METHOD_WAIT: Rule("wait", Right.READ, _in_keys),
    _METHODS.METHOD_REPLICATE: Rule("replicate", Right.WRITE, _in_keys),
    _METHODS.METHOD_LIST_KEYS: Rule("ls", Right.READ, _in_listing, _out_of_listing),
}

_NODE = "/tanghulu.v1.StoreNode/"
_DIRECTORY = "/tanghulu.v1.Directory/"
_MEMBERSHIP = "/tanghulu.v1.Membership/"

NODE_GRPC_RULES: dict[str, Rule] = {
    _NODE + "Put": Rule("put", Right.WRITE, _in_items),
    _NODE + "Get": Rule("get", Right.READ, _in_keys),
    _NODE + "Exists": Rule("exists", Right.READ, _in_keys),
    _NODE + "Remove": Rule("remove", Right.WRITE, _in_keys),
    _NODE + "Stat": Rule("stat", Right.READ, _in_keys),
}

MASTER_GRPC_RULES: dict[str, Rule] = {
    _DIRECTORY + "Announce": Rule("announcing chunks", Right.JOIN, _of_no_tenant),
    _DIRECTORY + "Locate": Rule("exists", _to_ask, _in_keys),
    _DIRECTORY + "Place": Rule("put", Right.WRITE),
    _DIRECTORY + "Nodes": Rule("nodes", None),
    _DIRECTORY + "ListKeys": Rule("ls", Right.READ, _in_listing, _out_of_listing),
    _DIRECTORY + "Wait": Rule("wait", Right.READ, _in_keys),
    _DIRECTORY + "Replicate": Rule("replicate", Right.WRITE, _in_keys),
    _DIRECTORY + "Events": Rule("following events", Right.READ, _in_events, _out_of_events),
    _MEMBERSHIP + "Register": Rule("registering", Right.JOIN, _no_node),
    _MEMBERSHIP + "KeepAlive": Rule("registering", Right.JOIN),
    _MEMBERSHIP + "Deregister": Rule("registering", Right.JOIN),
    _MEMBERSHIP + "Watch": Rule("watching instances", None),
}
