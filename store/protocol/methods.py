"""The table of the store's fast-lane methods: number, name, messages, required right, position of the keys.

A row registers the method's handler, calls it, names it in ``tanghulu_rpc_seconds``, and is its access rule in a
process with ``--tokens``. A new method is a new row; numbers are not reused.
"""

from __future__ import annotations

from typing import Any

from tanghulu.auth.tenants import Right
from tanghulu.rpc import methods as rpc
from tanghulu.rpc.methods import Method, Rule, scope_keys, writing
from tanghulu.store.protocol import access_rules as access
from tanghulu.store.protocol import directory_messages as d
from tanghulu.store.protocol import messages as m
from tanghulu.store.protocol.announcements import AnnounceReply, NodeAnnouncement
from tanghulu.store.protocol.directory_events import EventBatch, EventsRequest

_KEYS = scope_keys("keys")
_PUT = writing("put", "items.key")

# --- of a node

HELLO = Method(rpc.HELLO.number, rpc.HELLO.name, m.NodeHello, m.Welcome)
PUT = Method(10, "put", m.PutRequest, m.PutReply, _PUT)
RESERVE = Method(11, "reserve", m.ReserveRequest, m.ReserveReply, _PUT)
COMMIT = Method(12, "commit", m.CommitRequest, m.PutReply, Rule("put", Right.WRITE))
GET = Method(13, "get", m.GetRequest, m.GetReply, Rule("get", Right.READ, _KEYS))
UNPIN = Method(14, "unpin", m.UnpinRequest, m.Done, Rule("unpin", None, scope_keys("corrupt", "read")))
EXISTS = Method(15, "exists", m.KeysRequest, m.KeysReply, Rule("exists", Right.READ, _KEYS))
REMOVE = Method(16, "remove", m.RemoveRequest, m.KeysReply, writing("remove", "keys"))
CHUNK_STAT = Method(17, "chunk_stat", m.KeysRequest, m.StatReply, Rule("stat", Right.READ, _KEYS))
EVICTION = Method(18, "eviction", m.EvictionPolicy, m.EvictionPolicy, access.EVICTION)
DRAIN = Method(19, "drain", m.DrainRequest, m.Done, Rule("drain", Right.ADMIN))
EVICT = Method(20, "evict", m.EvictRequest, m.Evicted, Rule("evict", Right.ADMIN, _KEYS))
VERIFY = Method(21, "verify", m.VerifyRequest, m.VerifiedPage, Rule("check", Right.ADMIN))
TENANTS = Method(22, "tenants", m.TenantsRequest, m.TenantsReply, access.TENANTS)
OPEN_BUFFER = Method(23, "open_buffer", m.OpenBufferRequest, m.OpenBufferReply, Rule("put", Right.WRITE))

# --- of the master

ANNOUNCE = Method(30, "announce", NodeAnnouncement, AnnounceReply, Rule("announcing chunks", Right.JOIN))
LOCATE = Method(31, "locate", m.LocateRequest, m.LocateReply, access.LOCATE)
PLACE = Method(32, "place", d.PlaceRequest, d.PlaceReply, access.PLACE)
NODES = Method(33, "nodes", d.NodesRequest, d.NodesReply, access.NODES)
LIST_KEYS = Method(34, "list_keys", d.ListKeysRequest, d.ListKeysReply, access.LIST_KEYS)
COMMIT_KEYS = Method(35, "commit_keys", m.CommitKeysRequest, m.CommitKeysReply, writing("put", "commits.key"))
WAIT = Method(36, "wait", d.WaitRequest, d.WaitReply, Rule("wait", Right.READ, _KEYS))
REPLICATE = Method(38, "replicate", d.ReplicateRequest, d.ReplicateReply, writing("replicate", "keys"))
MASTERS = Method(39, "masters", m.MastersRequest, m.MastersReply, access.MASTERS)
PROVE = Method(40, "prove", m.ProveRequest, m.ProveReply, Rule("nodes", None))
EVENTS = Method(41, "events", EventsRequest, EventBatch, access.EVENTS)

METHODS: tuple[Method[Any, Any], ...] = tuple(each for each in globals().values() if isinstance(each, Method))
assert len({each.number for each in METHODS}) == len({each.name for each in METHODS}) == len(METHODS)
