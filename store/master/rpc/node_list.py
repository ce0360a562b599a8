"""The answers to NODES: the list of nodes is encoded once for each of its versions."""

from __future__ import annotations

from typing import Any

import msgspec

from tanghulu.rpc.wire import encode
from tanghulu.store.master.directory.nodes import NodeRecord
from tanghulu.store.master.directory.ranges import RangeDirectories
from tanghulu.store.master.server import MasterServer
from tanghulu.store.protocol.directory_messages import NodesReply, NodesRequest, NodeView
from tanghulu.store.protocol.key_slots import ALL_BITS, ALL_RANGES
from tanghulu.store.protocol.terms import NO_TERM


def view_of(
    directory: RangeDirectories, node: NodeRecord, now_s: float, ranges: int = ALL_BITS, *progress: Any
) -> NodeView:
    """Return ``node`` for callers, with its chunks of ``ranges``, a bit for each; ``progress`` is that of its drain.

    ``last_seen_s`` is an age there.
    """
    num_chunks, age_s = directory.num_chunks(node.instance.id, ranges), max(now_s - node.last_seen_s, 0.0)
    figures = node.capacity_bytes, node.used_bytes, num_chunks, node.draining, age_s
    return NodeView.of(node.instance, *figures, node.ssd_capacity_bytes, node.ssd_used_bytes, *progress)


class NodeList:
    """The nodes as requested by clients, every client about once a second.

    A client names its version, and mostly receives that nothing has changed. A version is counted within one generation
    of the master; it changes when a node joins, leaves, changes its registration or its capacity, and when the
    directory is complete for the first time. Other figures, such as used bytes, change all the time: they are current
    only in answers to requests without a version, mostly from operators.
    """

    def __init__(self, server: MasterServer) -> None:
        self._server = server
        self._written = (-1, -1, NO_TERM)  # generation and version of the encoded list, and its term
        self._whole = b""  # without the last field

    def answer(self, request: NodesRequest) -> NodesReply | bytes:
        """Return the answer to ``request``, or its bytes."""
        if not request.versioned:
            return self._write(request.ranges)
        generation, version = self._server.master.generation, self._version
        if request.known_version == version and request.known_generation == generation:
            return self._reply([], unchanged=True)
        signature = self._server.ownership.signature
        if self._written != (generation, version, signature.term):
            self._written = (generation, version, signature.term)
            self._whole = encode(self._write()).removesuffix(msgspec.msgpack.encode(signature))
        return self._whole + msgspec.msgpack.encode(signature)

    @property
    def _version(self) -> int:
        directory = self._server.master.directory
        return 2 * directory.nodes_version + directory.is_rebuilt

    def _write(self, ranges: int = 0) -> NodesReply:
        """Build the whole answer; ``ranges``: those requested from this master among its ranges, a bit for each.

        For callers that request everything no drain has ended while this master knows only a part of the keys.
        """
        master, now_s = self._server.master, self._server.now_s
        knows_all = bool(ranges) or self._server.ownership.owned == ALL_RANGES
        nodes: list[NodeView] = []
        for node in master.directory.nodes():
            num_unsafe, drained = master.copies.progress(node.instance.id) if node.draining else (0, False)
            nodes.append(view_of(master.directory, node, now_s, ranges or ALL_BITS, num_unsafe, drained and knows_all))
        return self._reply(nodes, of_part=not knows_all)

    def _reply(self, nodes: list[NodeView], *, unchanged: bool = False, of_part: bool = False) -> NodesReply:
        directory, ownership = self._server.master.directory, self._server.ownership
        return NodesReply(
            nodes,
            not directory.is_rebuilt,
            directory.num_keys,
            self._server.master.generation,
            self._version,
            unchanged,
            directory.num_unready,
            ownership.leads,
            of_part,
            ownership.signature,
        )

    def __repr__(self) -> str:
        return f"NodeList(version {self._version}, {len(self._whole)} bytes)"
