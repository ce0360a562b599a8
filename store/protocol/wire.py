"""The edge between the store's words and their protobuf messages, shared by the node's and the client's edges."""

from __future__ import annotations

from tanghulu.errors import InvalidRequest
from tanghulu.protos import common_pb2, store_pb2
from tanghulu.store.protocol.checksums import MAX_PARTS, NO_CHECKSUMS, Checksums
from tanghulu.store.protocol.types import Pin, Tier

_PIN_TO_WIRE = {Pin.NONE: store_pb2.PIN_NONE, Pin.SOFT: store_pb2.PIN_SOFT, Pin.HARD: store_pb2.PIN_HARD}
_TIER_TO_WIRE = {Tier.MEMORY: common_pb2.TIER_MEMORY, Tier.SSD: common_pb2.TIER_SSD}
_PIN_FROM_WIRE: dict[int, Pin] = {int(number): pin for pin, number in _PIN_TO_WIRE.items()}


def checksums_to_wire(checksums: Checksums) -> store_pb2.Checksums:
    """The message of ``checksums``."""
    return store_pb2.Checksums(part_bytes=checksums.part_bytes, parts=checksums.parts)


def fill_checksums(message: store_pb2.Checksums, checksums: Checksums) -> None:
    """Write ``checksums`` into a part of a larger message; cheaper than ``checksums_to_wire``."""
    if checksums.parts:
        message.parts.extend(checksums.parts)
        if checksums.part_bytes:
            message.part_bytes = checksums.part_bytes


def checksums_from_wire(message: store_pb2.Checksums) -> Checksums:
    """The checksums in ``message``; raises InvalidRequest for too many parts."""
    parts = message.parts
    if not parts:
        return NO_CHECKSUMS
    if len(parts) > MAX_PARTS:
        raise InvalidRequest(f"{len(parts)} checksums of one value are more than {MAX_PARTS}")
    return Checksums(message.part_bytes, tuple(parts))


def pin_from_wire(number: int) -> Pin:
    """The pin of that number; raises InvalidRequest for one that this version does not know."""
    pin = _PIN_FROM_WIRE.get(number)
    if pin is None:
        raise InvalidRequest(f"pin {number} is unknown")
    return pin


def pin_to_wire(pin: Pin) -> store_pb2.Pin:
    """The number of ``pin``."""
    return _PIN_TO_WIRE[pin]


def tier_to_wire(tier: Tier) -> common_pb2.Tier:
    """The number of ``tier``."""
    return _TIER_TO_WIRE[tier]


def tier_from_wire(number: int) -> Tier:
    """The tier of that number; one that this version does not know is below memory too."""
    return Tier.MEMORY if number == common_pb2.TIER_MEMORY else Tier.SSD
