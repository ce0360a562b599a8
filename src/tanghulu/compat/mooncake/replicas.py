"""Descriptions of where an object is kept, in the classes of Mooncake's API."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tanghulu.store.protocol.messages import ChunkInfo
from tanghulu.store.protocol.types import Tier


class ReplicaStatus(Enum):
    """State of a replica; ours are complete whenever they can be seen."""

    UNDEFINED, INITIALIZED, PROCESSING, COMPLETE, REMOVED, FAILED = range(6)


@dataclass(frozen=True)
class Descriptor:
    """Place of the bytes. ``buffer_address`` is 0: only the node knows it; ``transport_endpoint`` is the node's id."""

    size: int
    transport_endpoint: str
    buffer_address: int = 0


@dataclass(frozen=True)
class MemoryDescriptor:
    """The one buffer of a replica."""

    buffer_descriptor: Descriptor


@dataclass(frozen=True)
class ReplicaDescriptor:
    """One node's copy of an object."""

    node: str
    size: int
    in_memory: bool
    status: ReplicaStatus = ReplicaStatus.COMPLETE

    @classmethod
    def all_of(cls, info: ChunkInfo) -> list[ReplicaDescriptor]:
        """Return a descriptor for each holder; the tier is known for the first, and assumed for the others."""
        return [cls(node, info.size_bytes, info.tier is Tier.MEMORY) for node in info.nodes]

    def is_memory_replica(self) -> bool:
        return self.in_memory

    def is_disk_replica(self) -> bool:
        """Return False: disks shared by all nodes are Mooncake's."""
        return False

    def is_local_disk_replica(self) -> bool:
        return not self.in_memory

    def get_memory_descriptor(self) -> MemoryDescriptor:
        return MemoryDescriptor(Descriptor(self.size, self.node))
