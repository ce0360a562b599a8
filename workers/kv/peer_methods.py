"""Calls by which one worker reads another's KV; their numbers are separate from the store's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from tanghulu.auth.tenants import Right
from tanghulu.rpc import methods as rpc
from tanghulu.rpc.methods import Method, Rule
from tanghulu.rpc.wire import U32, U64, FastMessage
from tanghulu.transfer_engine.core.segment import SegmentHello, SegmentWelcome
from tanghulu.types import BlockHash


class ExportPinRequest(FastMessage, frozen=True):
    """Blocks of an export to be held while the caller reads them: ``max_blocks`` from ``first_block`` on; 0 means all.

    ``fingerprint`` is the reader's; KV of another model, type or split is refused.
    """

    export_id: U64
    first_block: U32 = 0
    fingerprint: bytes = b""
    max_blocks: U32 = 0


class PrefixPinRequest(FastMessage, frozen=True):
    """The cached blocks of the longest leading run of the hashes become an export of their own, pinned as above."""

    block_hashes: Sequence[BlockHash]
    fingerprint: bytes = b""


class ExportedBlock(FastMessage, frozen=True):
    """A block in the exporter's segment, readable under the lease; ``checksums`` (XXH3-64) of each ``part_bytes``."""

    offset: U64
    length: U64
    lease_id: U64
    checksums: Sequence[U64]
    part_bytes: Annotated[int, msgspec.Meta(ge=1)]


class ExportPinReply(FastMessage, frozen=True):
    """The leading blocks requested, as far as there is room.

    ``export_id`` names the export made by a PrefixPinRequest; 0 if nothing was cached.
    """

    blocks: Sequence[ExportedBlock] = ()
    export_id: U64 = 0


class ExportReleaseRequest(FastMessage, frozen=True):
    """The caller has stopped reading; the export's blocks are given back once all their readers are gone.

    ``keep``: only the caller's pins are given back, the export stays for others; so does a growing one.
    """

    export_id: U64
    bytes_read: U64 = 0
    keep: bool = False


class ExportReleaseReply(FastMessage, frozen=True):
    """Acknowledgement."""


class ExportWatchRequest(FastMessage, frozen=True):
    """A long poll, answered when the export has over ``num_known`` blocks or is complete, or after ``wait_ms``."""

    export_id: U64
    num_known: U32 = 0
    fingerprint: bytes = b""
    wait_ms: U32 = 0


class ExportWatchReply(FastMessage, frozen=True):
    """The number of readable leading blocks; the export stops growing once ``complete``."""

    num_blocks: U32
    complete: bool = False


def _of_the_cluster(name: str) -> Rule:
    return Rule(name, Right.JOIN)


HELLO = Method(rpc.HELLO.number, rpc.HELLO.name, SegmentHello, SegmentWelcome)
EXPORT_PIN = Method(50, "export_pin", ExportPinRequest, ExportPinReply, _of_the_cluster("export_pin"))
EXPORT_RELEASE = Method(
    51, "export_release", ExportReleaseRequest, ExportReleaseReply, _of_the_cluster("export_release")
)
PREFIX_PIN = Method(52, "prefix_pin", PrefixPinRequest, ExportPinReply, _of_the_cluster("prefix_pin"))
EXPORT_WATCH = Method(53, "export_watch", ExportWatchRequest, ExportWatchReply, _of_the_cluster("export_watch"))
