"""The messages of the directory beside LOCATE and commits: nodes, placement, listings, waits, copies in advance.

If a client's answer is such a value, ``NodeView`` or ``KeyInfo``, the message's item is that very value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tanghulu.discovery.base import Instance
from tanghulu.errors import InvalidRequest
from tanghulu.rpc.wire import U32, U64, FastMessage
from tanghulu.store.protocol.terms import UNSIGNED, Signature

MAX_KEYS_PER_CALL = 1 << 16


def check_count(num_keys: int) -> None:
    """Raise InvalidRequest for too many keys in one call."""
    if num_keys > MAX_KEYS_PER_CALL:
        raise InvalidRequest(f"{num_keys} keys in one call are more than {MAX_KEYS_PER_CALL}; send them in several")


class NodeView(FastMessage, frozen=True):
    """A store node as listed by the master. ``last_seen_s``: seconds since its last sign of life.

    Of a draining node ``num_unsafe`` chunks have no other holder yet; ``drained`` means that it may be stopped.
    """

    id: str
    address: str
    unix_path: str
    metrics_address: str
    place: str
    host_id: str
    capacity_bytes: U64 = 0
    used_bytes: U64 = 0
    num_chunks: U64 = 0
    draining: bool = False
    last_seen_s: float = 0.0
    ssd_capacity_bytes: U64 = 0
    ssd_used_bytes: U64 = 0
    num_unsafe: U64 = 0
    drained: bool = False

    @classmethod
    def of(cls, instance: Instance, *figures: Any) -> NodeView:
        """Return the view of ``instance`` with these ``figures``: the fields from ``capacity_bytes`` on, in order."""
        host_id = instance.attributes.get("host_id", "")
        address, place = str(instance.address), str(instance.place)
        return cls(instance.id, address, instance.unix_path, instance.metrics_address, place, host_id, *figures)


class KeyInfo(FastMessage, frozen=True):
    """One line of a listing; ``nodes`` are the ids of the holders."""

    key: str
    size_bytes: U64
    version: U64
    nodes: tuple[str, ...]


class PlaceRequest(FastMessage, frozen=True):
    """Request nodes for a value of ``size_bytes``, to be held by ``replicas`` of them.

    ``prefer_node`` is the id of the first choice, ``client_place`` the client's zone/rack/host; "" for none.
    """

    size_bytes: U64
    replicas: U32 = 1
    prefer_node: str = ""
    client_place: str = ""


class PlaceReply(FastMessage, frozen=True):
    """Nodes, best first: at least ``replicas`` of them if that many are alive. The rest is as in LocateReply."""

    nodes: list[NodeView]
    signature: Signature = UNSIGNED


class NodesRequest(FastMessage, frozen=True):
    """Request all nodes. The list has a version, which changes when a node joins, leaves, or changes its registration
    or its capacity, and when the directory is complete; other figures change without it.

    ``known_version`` is of the caller's list, from the master of ``known_generation``; 0: none. ``versioned``: figures
    may be as old as the list's version; otherwise they are current. ``ranges``: the owner of these, a bit for each, is
    asked for the chunks of each node and the progress of drains; 0: the leader is asked.
    """

    known_version: U64 = 0
    known_generation: U64 = 0
    versioned: bool = False
    ranges: U64 = 0


class NodesReply(FastMessage, frozen=True):
    """The nodes, and the state of the directory. ``unchanged``: ``nodes`` is empty, because the caller has the list.

    ``rebuilding_ranges``: the number of ranges of this master that are not completely known; ``leading``: it is the
    leader; ``of_part``: chunks and drains are those of its ranges alone, and others own the rest. ``signature`` stays
    the last field: see ``NodeList``.
    """

    nodes: list[NodeView]
    rebuilding: bool
    num_keys: U64 = 0
    master_generation: U64 = 0
    version: U64 = 0
    unchanged: bool = False
    rebuilding_ranges: U32 = 0
    leading: bool = False
    of_part: bool = False
    signature: Signature = UNSIGNED


class ListKeysRequest(FastMessage, frozen=True):
    """Request keys in order, behind the key ``after``. ``limit`` 0: the server's default.

    ``ranges``: keys of these, a bit for each; 0: all, which one master must own then.
    """

    prefix: str = ""
    after: str = ""
    limit: U32 = 0
    ranges: U64 = 0


class ListKeysReply(FastMessage, frozen=True):
    """A page of keys, and whether there are ``more``."""

    keys: list[KeyInfo]
    more: bool
    signature: Signature = UNSIGNED


class _OfKeys(FastMessage, frozen=True):
    """A request that names keys."""

    keys: Sequence[str]

    def validate(self) -> None:
        """Refuse too many keys."""
        check_count(len(self.keys))


class WaitRequest(_OfKeys, frozen=True):
    """Wait until all keys exist, for ``deadline_ms`` at most and 30 s in any case; 0 does not wait."""

    deadline_ms: U32 = 0


class WaitReply(FastMessage, frozen=True):
    """A byte a key in ``found``: 1 if some node holds it now."""

    found: bytes
    signature: Signature = UNSIGNED


class ReplicateRequest(_OfKeys, frozen=True):
    """Have each key held by ``holders`` nodes, up to the master's bound, for ``for_s`` seconds.

    The copies are made in the background; afterwards unread ones are dropped.
    """

    holders: U32
    for_s: float


class ReplicateReply(FastMessage, frozen=True):
    """``num_taken`` of the keys; the others have no holder, or too many are requested already."""

    num_taken: U32
    signature: Signature = UNSIGNED
