"""The table of the store's fast-lane methods: number, name, messages, the right that it takes, where keys stand.

A row registers the method's handler, calls it, names it in ``tanghulu_rpc_seconds``, and is its rule where a process
has ``--tokens``. A new method is a new row; numbers are not used again. Messages of the module ``messages`` are the
fast lane's own; those of ``store_pb2`` and ``directory_pb2`` are protobuf on the fast lane too: gRPC carries the same
ones, or they are an operator's and rare, so that is their one definition.

gRPC's rules stand below, by the full names of its methods.
"""

from __future__ import annotations

from typing import Any

from tanghulu.auth.tenants import Right
from tanghulu.protos import directory_pb2, store_pb2
from tanghulu.rpc import methods as rpc
from tanghulu.rpc.methods import Method, Rule, scope_keys, writing
from tanghulu.store.protocol import access_rules as access
from tanghulu.store.protocol import messages as m
from tanghulu.store.protocol.types import ClientCommit

_KEYS = scope_keys("keys")
_PUT = writing("put", "items.key")

# --- of a node

HELLO = Method(rpc.HELLO.number, rpc.HELLO.name, m.NodeHello, m.Welcome)
PUT = Method(10, "put", m.PutRequest, m.PutReply, _PUT)
RESERVE = Method(11, "reserve", m.ReserveRequest, m.ReserveReply, _PUT)
COMMIT = Method(12, "commit", m.CommitRequest, m.PutReply, Rule("put", Right.WRITE))
GET = Method(13, "get", m.GetRequest, m.GetReply, Rule("get", Right.READ, _KEYS))
UNPIN = Method(14, "unpin", m.UnpinRequest, m.Done, Rule("unpin", None, scope_keys("corrupt", "read")))
EXISTS = Method(15, "exists", store_pb2.ExistsRequest, store_pb2.ExistsReply, Rule("exists", Right.READ, _KEYS))
REMOVE = Method(16, "remove", store_pb2.RemoveRequest, store_pb2.RemoveReply, writing("remove", "keys"))
CHUNK_STAT = Method(17, "chunk_stat", store_pb2.StatRequest, store_pb2.StatReply, Rule("stat", Right.READ, _KEYS))
EVICTION = Method(18, "eviction", store_pb2.EvictionRequest, store_pb2.EvictionReply, access.EVICTION)
DRAIN = Method(19, "drain", store_pb2.DrainRequest, store_pb2.DrainReply, Rule("drain", Right.ADMIN))
EVICT = Method(20, "evict", store_pb2.EvictRequest, store_pb2.EvictReply, Rule("evict", Right.ADMIN))
VERIFY = Method(21, "verify", store_pb2.VerifyRequest, store_pb2.VerifyReply, Rule("check", Right.ADMIN))
TENANTS = Method(22, "tenants", store_pb2.TenantsRequest, store_pb2.TenantsReply, access.TENANTS)
OPEN_BUFFER = Method(23, "open_buffer", m.OpenBufferRequest, m.OpenBufferReply, Rule("put", Right.WRITE))

# --- of the master

ANNOUNCE = Method(
    30, "announce", directory_pb2.AnnounceRequest, directory_pb2.AnnounceReply, Rule("announcing chunks", Right.JOIN)
)
LOCATE = Method(31, "locate", m.LocateRequest, m.LocateReply, access.LOCATE)
PLACE = Method(32, "place", directory_pb2.PlaceRequest, directory_pb2.PlaceReply, access.PLACE)
NODES = Method(33, "nodes", directory_pb2.NodesRequest, directory_pb2.NodesReply, access.NODES)
LIST_KEYS = Method(34, "list_keys", directory_pb2.ListKeysRequest, directory_pb2.ListKeysReply, access.LIST_KEYS)
COMMIT_KEY = Method(35, "commit_key", ClientCommit, m.CommitKeyReply, writing("put", "key"))
WAIT = Method(36, "wait", directory_pb2.WaitRequest, directory_pb2.WaitReply, Rule("wait", Right.READ, _KEYS))
COMMIT_KEYS = Method(37, "commit_keys", m.CommitKeysRequest, m.CommitKeysReply, writing("put", "said.key"))
REPLICATE = Method(
    38,
    "replicate",
    directory_pb2.ReplicateRequest,
    directory_pb2.ReplicateReply,
    writing("replicate", "keys"),
)

MASTERS = Method(39, "masters", m.MastersRequest, m.MastersReply, access.MASTERS)
PROVE = Method(40, "prove", m.ProveRequest, m.ProveReply, Rule("nodes", None))

METHODS: tuple[Method[Any, Any], ...] = tuple(each for each in globals().values() if isinstance(each, Method))
assert len({each.number for each in METHODS}) == len({each.name for each in METHODS}) == len(METHODS)

# --- gRPC

_DIRECTORY = "/tanghulu.v1.Directory/"
_MEMBERSHIP = "/tanghulu.v1.Membership/"

MASTER_GRPC_RULES: dict[str, Rule | None] = {
    _DIRECTORY + "Announce": ANNOUNCE.rule,
    _DIRECTORY + "Locate": LOCATE.rule,
    _DIRECTORY + "Place": PLACE.rule,
    _DIRECTORY + "Nodes": NODES.rule,
    _DIRECTORY + "ListKeys": LIST_KEYS.rule,
    _DIRECTORY + "Wait": WAIT.rule,
    _DIRECTORY + "Replicate": REPLICATE.rule,
    _DIRECTORY + "Events": access.EVENTS,
    _MEMBERSHIP + "Register": Rule("registering", Right.JOIN),
    _MEMBERSHIP + "KeepAlive": Rule("registering", Right.JOIN),
    _MEMBERSHIP + "Deregister": Rule("registering", Right.JOIN),
    _MEMBERSHIP + "Watch": Rule("watching instances", None),
}
