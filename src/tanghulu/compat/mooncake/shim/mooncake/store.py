"""``mooncake.store``, provided by tanghulu."""

from tanghulu.compat.mooncake.memory import BufferHandle
from tanghulu.compat.mooncake.options import ReplicateConfig, SoftPinAction
from tanghulu.compat.mooncake.replicas import ReplicaDescriptor, ReplicaStatus
from tanghulu.compat.mooncake.store import MooncakeDistributedStore

__all__ = [
    "BufferHandle",
    "MooncakeDistributedStore",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
]
