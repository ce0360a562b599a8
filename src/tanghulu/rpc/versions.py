"""Versions of the fast lane's protocol, and how two peers settle on one. Pure.

A process speaks a range of versions, its own and the two before, so that a cluster is upgraded process by process, in
any order, by one version at a time. HELLO carries the caller's range, the answer the highest version that both speak,
for all that follows on the connection. A peer that says no HELLO (clients of a version before 6 say none to masters
without credentials) speaks the lowest. Without a common version the call fails with VersionMismatch, which names both
ranges.

Within a version messages only grow, at their end (see ``wire.FastMessage``; protobuf messages get new fields, never
other numbers): who does not know a field passes it over, who misses one has its default. Only what cannot be said so
takes a new version. Whoever makes one writes here what differs, keeps the old behaviour towards peers of the version
before, and before the first change records that version's bytes (those of 5: ``tests/store/protocol/version_5.txt``).

6   Several masters may share the ranges of keys. Who speaks 6 is told MOVED by a master that does not own all keys of a
    call, and asks for the map of the masters; for others the leader asks the owners (``store.master.rpc.forwarding``),
    and as long as one of the nodes or masters speaks 5, the leader owns everything. HELLO comes first at masters, too.
5   A value that is streamed is the attachment of RESERVE (``fill``), and COMMIT says so (``filled``); nodes report in
    numbered pieces of slots, and name the versions of what they removed. To a node of version 4 nothing is streamed; a
    master takes the reports of version 4 (BEGIN, PIECE, END) too. Masters are upgraded before their nodes.
4   Messages of the store as MessagePack arrays. Version 3, which had packed structs in their place, is refused.

4 is spoken until 6 is released.

Example: a caller of [4, 5] sends ``protocol_version=4, highest_version=5``; a process of [4, 4] answers 4, one of
[5, 6] answers 5. One from before ranges existed compares ``protocol_version`` with its 4 and answers nothing, which
means 4.
"""

from __future__ import annotations

from typing import NamedTuple

from tanghulu.errors import VersionMismatch
from tanghulu.protos import store_pb2


class VersionRange(NamedTuple):
    """The versions from ``lowest`` to ``highest``."""

    lowest: int
    highest: int

    def common(self, other: VersionRange, peer: str) -> int:
        """The highest version that both speak; raises VersionMismatch."""
        version = min(self.highest, other.highest)
        if version < max(self.lowest, other.lowest):
            raise VersionMismatch(
                f"{peer} speaks {other} of the protocol, this process {self}; upgrade the older one, version by version"
            )
        return version

    def __str__(self) -> str:
        return f"version {self.lowest}" if self.lowest == self.highest else f"versions {self.lowest} to {self.highest}"


#: What this process speaks.
SPOKEN = VersionRange(4, 6)
#: From this version on a node takes streamed values.
STREAMS_FROM = 5


def settle(request: store_pb2.HelloRequest, spoken: VersionRange = SPOKEN) -> int:
    """The version that a server and who says ``request`` speak from now on; raises VersionMismatch."""
    lowest = request.protocol_version
    return spoken.common(VersionRange(lowest, request.highest_version or lowest), "the caller")


def settled(reply: store_pb2.HelloReply, peer: str, spoken: VersionRange = SPOKEN) -> int:
    """The version that ``peer`` has chosen in its answer to a HELLO; raises VersionMismatch if it was not offered."""
    version = reply.protocol_version or spoken.lowest
    return spoken.common(VersionRange(version, version), peer)
