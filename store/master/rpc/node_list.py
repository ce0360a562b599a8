"""The answers to NODES: the list of nodes is written out once for each of its versions."""

from __future__ import annotations

from tanghulu.protos import directory_pb2 as pb
from tanghulu.store.master.ownership import ALL_RANGES
from tanghulu.store.master.replication.planner import Progress
from tanghulu.store.master.rpc import wire
from tanghulu.store.master.server import MasterServer
from tanghulu.store.protocol.terms import NO_TERM


class NodeList:
    """The nodes as clients ask for them, every client about once a second.

    A client names the version that it has, and mostly hears that nothing has changed. A version is counted within one
    generation of the master; it changes when a node comes, goes, changes its registration or its capacity, and when the
    directory is complete for the first time. Other figures, used bytes say, change all the time: they are of now only
    in answers to those who do not ask by version, operators mostly.
    """

    def __init__(self, server: MasterServer) -> None:
        self._server = server
        self._written = (-1, -1, NO_TERM)  # generation and version of what follows, and the term that it tells
        self._whole = b""
        self._unchanged = b""

    def answer(self, request: pb.NodesRequest) -> bytes:
        """The bytes of the NodesReply to ``request``."""
        if not request.versioned:
            return self._write(request.ranges).SerializeToString() + self._renewals()
        generation, version = self._server.master.generation, self._version
        if self._written != (generation, version, self._server.term):
            self._written = (generation, version, self._server.term)
            self._whole = self._write().SerializeToString()
            self._unchanged = self._head(unchanged=True).SerializeToString()
        same = request.known_version == version and request.known_generation == generation
        return (self._unchanged if same else self._whole) + self._renewals()

    def _renewals(self) -> bytes:
        """The field of the message that is of now in every answer."""
        renewals = self._server.signature[2]
        return pb.NodesReply(renewals=renewals).SerializeToString() if renewals else b""

    @property
    def _version(self) -> int:
        directory = self._server.master.directory
        return 2 * directory.nodes_version + directory.is_rebuilt

    def _write(self, ranges: int = 0) -> pb.NodesReply:
        """The whole answer; ``ranges``: those that the caller asks this master for, among its others, a bit for each.

        To who asks for everything no drain is over as long as this master knows a part of the keys only.
        """
        master = self._server.master
        reply = self._head(unchanged=False)
        knows_all = bool(ranges) or self._server.ownership.owned == ALL_RANGES

        def progress(node_id: str) -> Progress:
            made = master.copies.progress(node_id)
            return made if knows_all else Progress(made.num_unsafe, drained=False)

        reply.nodes.extend(wire.nodes_to_wire(master.directory.nodes(), self._server.now_s, progress))
        for node in reply.nodes if ranges else ():
            node.num_chunks = master.directory.num_chunks(node.instance.id, ranges)
        reply.of_part = not knows_all
        reply.rebuilding_ranges = master.directory.num_unready
        leadership = self._server.leadership
        reply.leading = leadership is None or leadership.leads
        return reply

    def _head(self, *, unchanged: bool) -> pb.NodesReply:
        directory, (term, term_of) = self._server.master.directory, self._server.term
        return pb.NodesReply(
            rebuilding=not directory.is_rebuilt,
            num_keys=directory.num_keys,
            master_generation=self._server.master.generation,
            term=term,
            term_of=term_of,
            version=self._version,
            unchanged=unchanged,
        )

    def __repr__(self) -> str:
        return f"NodeList(version {self._version}, {len(self._whole)} bytes)"
