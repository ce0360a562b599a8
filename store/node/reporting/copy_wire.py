"""The edge between the master's orders in the answer to a report and the node's words for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tanghulu.protos import directory_pb2 as pb
from tanghulu.store.client.model import NodeView
from tanghulu.types import ChunkKey


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """Pull ``key`` at ``version`` from the node ``source``."""

    key: str
    version: int
    source: str


class DropOrder(NamedTuple):
    """Let go of ``key`` at ``version``: it was ``removed`` elsewhere, or others hold it now."""

    key: ChunkKey
    version: int
    removed: bool


@dataclass(frozen=True, slots=True)
class Orders:
    """What a node is to do: copies from ``sources``, and what it shall hold no longer."""

    copies: list[CopyOrder] = field(default_factory=list)
    drops: list[DropOrder] = field(default_factory=list)
    sources: list[NodeView] = field(default_factory=list)


def orders_from_wire(reply: pb.AnnounceReply) -> Orders | None:
    """The orders in ``reply``; None without any."""
    if not (reply.copies or reply.drops):
        return None
    sources = [
        NodeView(
            id=source.id,
            address=source.address,
            unix_path=source.unix_path,
            metrics_address=source.metrics_address,
            place=source.place,
            host_id=source.attributes.get("host_id", ""),
            capacity_bytes=0,
            used_bytes=0,
            num_chunks=0,
            draining=False,
            last_seen_s=0.0,
        )
        for source in reply.sources
    ]
    copies = [CopyOrder(copy.key, copy.version, copy.source) for copy in reply.copies]
    return Orders(copies, [DropOrder(ChunkKey(each.key), each.version, each.removed) for each in reply.drops], sources)
