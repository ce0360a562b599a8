"""The edge between SegmentDescriptor and its protobuf message; the only file here that sees protobuf."""

from __future__ import annotations

from tanghulu.protos import common_pb2
from tanghulu.transfer_engine.core.segment import Endpoint, SegmentDescriptor


def to_proto(descriptor: SegmentDescriptor) -> common_pb2.SegmentDescriptor:
    """The message of common.proto for ``descriptor``."""
    return common_pb2.SegmentDescriptor(
        name=descriptor.name,
        size_bytes=descriptor.size_bytes,
        host_id=descriptor.host_id,
        generation=descriptor.generation,
        endpoints=[
            common_pb2.Endpoint(
                transport=each.transport, address=each.address, device=each.device, distance=each.distance
            )
            for each in descriptor.endpoints
        ],
    )


def from_proto(message: common_pb2.SegmentDescriptor) -> SegmentDescriptor:
    """The descriptor that ``message`` carries; transports that this version does not know are kept as they are."""
    return SegmentDescriptor(
        name=message.name,
        size_bytes=message.size_bytes,
        host_id=message.host_id,
        generation=message.generation,
        endpoints=tuple(
            Endpoint(each.transport, each.address, each.device, each.distance) for each in message.endpoints
        ),
    )
