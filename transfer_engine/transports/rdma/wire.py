"""Messages between two processes about their queue pairs: pure encoding and decoding.

The payloads of an rdma CONNECT and of its answer (see ``onesided.wire``):

    connect  device's name 64 bytes, padded by NUL | gid 16 bytes | lid u16 | queue pair's number u32 | first packet u32
             | mtu u8
    granted  gid, lid, number, first packet, mtu as above | segment's address u64 | key u32
"""

from __future__ import annotations

import ipaddress
import struct
from typing import NamedTuple

from tanghulu.transfer_engine.core.wire import MalformedMessage
from tanghulu.transfer_engine.transports.onesided.wire import Dialect

RDMA = Dialect("rdma", 2, 0x7A6E6704, 0x7A6E6705)
MAX_DEVICE_BYTES = 64
_ADDRESS = struct.Struct("<16sHIIB")
_SEGMENT = struct.Struct("<QI")


class QueuePairAddress(NamedTuple):
    """Address of a queue pair for the other end; ``mtu`` is the verbs enumeration (5 = 4096 bytes)."""

    gid: str
    lid: int
    number: int
    first_packet: int
    mtu: int


class SegmentKey(NamedTuple):
    """Address of a registered segment in its owner's process, and the key to it."""

    address: int
    key: int


def pack_connect(device: str, address: QueuePairAddress) -> bytes:
    """Pack the client's queue pair, and the owner's device to which it is to be connected."""
    return device.encode().ljust(MAX_DEVICE_BYTES, b"\0") + _pack_address(address)


def parse_connect(payload: bytes) -> tuple[str, QueuePairAddress]:
    """Invert ``pack_connect``; raises MalformedMessage."""
    name, address = payload[:MAX_DEVICE_BYTES], payload[MAX_DEVICE_BYTES:]
    if len(address) != _ADDRESS.size:
        raise MalformedMessage(f"an rdma CONNECT with {len(payload)} bytes")
    return name.rstrip(b"\0").decode(errors="replace"), _parse_address(address)


def pack_granted(address: QueuePairAddress, segment: SegmentKey) -> bytes:
    """Pack the owner's queue pair and its segment."""
    return _pack_address(address) + _SEGMENT.pack(*segment)


def parse_granted(payload: bytes) -> tuple[QueuePairAddress, SegmentKey]:
    """Invert ``pack_granted``; raises MalformedMessage."""
    if len(payload) != _ADDRESS.size + _SEGMENT.size:
        raise MalformedMessage(f"an rdma CONNECT was granted with {len(payload)} bytes")
    return _parse_address(payload[: _ADDRESS.size]), SegmentKey(*_SEGMENT.unpack_from(payload, _ADDRESS.size))


def _pack_address(address: QueuePairAddress) -> bytes:
    return _ADDRESS.pack(ipaddress.IPv6Address(address.gid).packed, *address[1:])


def _parse_address(data: bytes) -> QueuePairAddress:
    gid, *numbers = _ADDRESS.unpack(data)
    return QueuePairAddress(str(ipaddress.IPv6Address(gid)), *numbers)
