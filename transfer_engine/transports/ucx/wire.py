"""What two processes tell each other about their UCX agents: pure encoding and decoding.

A CONNECT at the ucx door (see ``onesided_wire``) has no payload; its answer's is

    segment's address u64 | the metadata of the owner's agent
"""

from __future__ import annotations

import struct

from tanghulu.transfer_engine.core.wire import MalformedMessage
from tanghulu.transfer_engine.transports.onesided.wire import Dialect

UCX = Dialect("ucx", 2, 0x7A6E6706, 0x7A6E6707)
_SEGMENT = struct.Struct("<Q")


def pack_granted(address: int, metadata: bytes) -> bytes:
    """The segment's address, and what a peer needs in order to reach the agent."""
    return _SEGMENT.pack(address) + metadata


def parse_granted(payload: bytes) -> tuple[int, bytes]:
    """The inverse of ``pack_granted``; raises MalformedMessage."""
    if len(payload) < _SEGMENT.size:
        raise MalformedMessage(f"a ucx CONNECT was granted with {len(payload)} bytes")
    return _SEGMENT.unpack_from(payload)[0], payload[_SEGMENT.size :]
