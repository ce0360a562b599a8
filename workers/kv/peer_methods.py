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


class SharedCache(FastMessage, frozen=True):
    """A cache on a GPU, ``num_blocks`` rows of ``block_bytes``, for other processes of the host to open.

    The fields after the shape are torch's, of CUDA's inter-process memory: the cache lies at ``offset`` of the
    allocation ``handle``; its openers are counted at ``counter_offset`` of the shared memory ``counter``.
    """

    device_uuid: str
    num_blocks: U32
    block_bytes: U64
    handle: bytes
    offset: U64
    counter: bytes
    counter_offset: U64


class SharedCacheRequest(FastMessage, frozen=True):
    """A request of a reader on the same host for the description of the worker's cache."""


class SharedCacheReply(FastMessage, frozen=True):
    """None where the caller is on another host or the cache cannot be shared: blocks are read from the segment."""

    cache: SharedCache | None = None


class ExportPinRequest(FastMessage, frozen=True):
    """Blocks of an export to be held while the caller reads them: ``max_blocks`` from ``first_block`` on; 0 means all.

    ``fingerprint`` is the reader's; KV of another model, type or split is refused. ``in_place``: the caller reads the
    blocks from the shared cache, and confirms them afterwards.
    """

    export_id: U64
    first_block: U32 = 0
    fingerprint: bytes = b""
    max_blocks: U32 = 0
    in_place: bool = False


class PrefixPinRequest(FastMessage, frozen=True):
    """The cached blocks of the longest leading run of the hashes become an export of their own, pinned as above."""

    block_hashes: Sequence[BlockHash]
    fingerprint: bytes = b""
    in_place: bool = False


class ExportedBlock(FastMessage, frozen=True):
    """A block in the exporter's segment, readable under the lease; ``checksums`` (XXH3-64) of each ``part_bytes``.

    One to be read in place is in the shared cache, whose bytes follow those of the segment; it has no checksums.
    """

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


class ExportConfirmRequest(FastMessage, frozen=True):
    """The caller has read the blocks in place under these leases, which end now."""

    lease_ids: Sequence[U64]


class ExportConfirmReply(FastMessage, frozen=True):
    """The number of leading leases that had not ended before: their blocks did not change while they were read."""

    num_valid: U32


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
SHARED_CACHE = Method(48, "shared_cache", SharedCacheRequest, SharedCacheReply, _of_the_cluster("shared_cache"))
EXPORT_CONFIRM = Method(
    49, "export_confirm", ExportConfirmRequest, ExportConfirmReply, _of_the_cluster("export_confirm")
)
