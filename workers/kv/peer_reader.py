"""Reads KV held ready by another worker into this worker's blocks. Blocking; thread-safe."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import structlog
import xxhash

from tanghulu.auth.credentials import NOTHING_TO_SHOW, Credentials
from tanghulu.errors import ChecksumMismatch, LeaseExpired, Overloaded, TanghuluError, TransferFailed
from tanghulu.rpc.fast_client import Call
from tanghulu.runtime.clock import Clock, SystemClock
from tanghulu.session.outputs import KvSource, PrefixHolder
from tanghulu.transfer_engine.client.requests import TransferBatch, TransferRequest
from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.transfer_engine.engine import TransferEngine
from tanghulu.types import BlockHash, Fingerprint
from tanghulu.workers.kv.peer_links import PeerLink, PeerLinks, SilenceWatch, link_of
from tanghulu.workers.kv.peer_methods import (
    EXPORT_CONFIRM,
    EXPORT_PIN,
    EXPORT_RELEASE,
    EXPORT_WATCH,
    PREFIX_PIN,
    ExportConfirmRequest,
    ExportedBlock,
    ExportPinReply,
    ExportPinRequest,
    ExportReleaseRequest,
    ExportWatchReply,
    ExportWatchRequest,
    PrefixPinRequest,
)
from tanghulu.workers.kv.ports import wipe

if TYPE_CHECKING:
    import torch

    from tanghulu.workers.kv.device_sharing import DeviceSharing

_log = structlog.get_logger(__name__)

#: Limit for a cached prefix to arrive; a slower one is computed, or loaded from the store, instead.
PREFIX_DEADLINE_S = 5.0
#: Of every other call, and of each turn of a read: a whole export takes as long as the wire needs.
DEADLINE_S = 10.0
#: Bytes of one turn, which has at least a block.
TURN_BYTES = 16 << 20
#: The same of a read in place, which a GPU does in some tens of microseconds.
IN_PLACE_TURN_BYTES = 64 << 20
#: Of a release for which a request waits: one not sent in time takes effect by the leases' time limit.
RELEASE_S = 1.0
#: Of one request for more of an export, after which the reader may reconsider.
WATCH_S = 0.2
#: Pause before retrying a peer whose pinned memory is in use by others.
OVERLOADED_PAUSE_S = 0.1


#: Waits for an export to have more blocks than the given number, or to be complete.
Watch = Callable[[int], ExportWatchReply]

#: Loads blocks held by the worker of a link; returns the number of leading ones that came whole.
_Load = Callable[[PeerLink, Sequence[ExportedBlock]], int]


class ExportPart(NamedTuple):
    """Neighbouring blocks of an export."""

    peer: KvSource
    first_block: int
    num_blocks: int


def cut(parts: Sequence[ExportPart], at: int, num_blocks: int) -> list[ExportPart]:
    """Return the part of ``parts`` with ``num_blocks`` blocks from number ``at`` on, counted over all of them."""
    found: list[ExportPart] = []
    for peer, first_block, length in parts:
        first, last = max(at, 0), min(at + num_blocks, length)
        if first < last:
            found.append(ExportPart(peer, first_block + first, last - first))
        at -= length
    return found


class _Pin(NamedTuple):
    """A call that pins at most ``num_blocks`` blocks."""

    call: Call[ExportPinReply]
    num_blocks: int
    export_id: int = 0


class PeerReader:
    """Reads of other workers' exports and cached prefixes.

    Only KV of ``fingerprint`` is read: peers refuse KV of another model, type or tensor-parallel split. With
    ``sharing``, blocks of this host's workers are read in place, from one device's memory to the other's, where both
    can. Such a read takes no part in the memory that it reads, so it is followed by a call that confirms the leases:
    a block counts only if its lease had not ended by then.
    """

    def __init__(
        self,
        engine: TransferEngine,
        client_id: str,
        fingerprint: Fingerprint,
        clock: Clock | None = None,
        credentials: Credentials = NOTHING_TO_SHOW,
        sharing: DeviceSharing | None = None,
    ) -> None:
        self._engine = engine
        self._sharing = sharing
        self._fingerprint = fingerprint
        self._watch = SilenceWatch()
        self._links = PeerLinks(engine, client_id, clock or SystemClock(), credentials, sharing)

    def read(self, parts: Sequence[ExportPart], buffers: Sequence[memoryview]) -> int:
        """Fill ``buffers`` with these parts of one worker's exports, one behind the other.

        Returns the number of leading blocks that arrived whole, checksums verified; the peer shows some at a time, and
        holds the exports until `release`. Raises NodeUnavailable, ChunkNotFound, TransferFailed or DeadlineExceeded
        when none did.
        """
        turn_blocks = max(1, TURN_BYTES // len(buffers[0])) if buffers else 0

        def read(at: int) -> int:
            wanted = buffers[at : at + turn_blocks]
            return self._read_exports(cut(parts, at, len(wanted)), self._into(wanted, DEADLINE_S), in_place=False)

        return _in_turns(read, len(buffers))

    def read_in_place(self, parts: Sequence[ExportPart], block_ids: Sequence[int]) -> int | None:
        """Do `read` to blocks of the own cache, from the worker's cache; None where only `read` can.

        Raises LeaseExpired too, when the worker no longer held the first blocks at the end of their copies.
        """
        if not self._is_shared(parts[0].peer):
            return None

        def read(at: int) -> int:
            wanted = block_ids[at : at + self._turn_in_place]
            return self._read_exports(cut(parts, at, len(wanted)), self._onto(wanted), in_place=True)

        return _in_turns(read, len(block_ids))

    def _read_exports(self, parts: Sequence[ExportPart], load: _Load, *, in_place: bool) -> int:
        pins = [self._pin(part, in_place=in_place) for part in parts]
        return self._links.use(link_of(parts[0].peer), lambda link: self._read(link, pins, load, DEADLINE_S))

    def _pin(self, part: ExportPart, *, in_place: bool) -> _Pin:
        export_id = part.peer.export_id
        request = ExportPinRequest(export_id, part.first_block, self._fingerprint, part.num_blocks, in_place)
        return _Pin(EXPORT_PIN.call(request), part.num_blocks, export_id)

    def read_prefix(self, holder: PrefixHolder, hashes: Sequence[BlockHash], buffers: Sequence[memoryview]) -> int:
        """Fill ``buffers`` with the blocks of ``hashes`` that ``holder`` has in its cache now.

        Returns the number of leading ones that arrived whole, 0 if it has none (any more). Raises as `read` does, and
        Overloaded.
        """

        def read(at: int) -> int:
            request = PrefixPinRequest(hashes[at:], self._fingerprint)
            pin = _Pin(PREFIX_PIN.call(request), len(buffers) - at)
            load = self._into(buffers[at:], PREFIX_DEADLINE_S)
            return self._links.use(link_of(holder), lambda link: self._read(link, [pin], load, PREFIX_DEADLINE_S))

        return _in_turns(read, len(buffers))

    def read_prefix_in_place(
        self, holder: PrefixHolder, hashes: Sequence[BlockHash], block_ids: Sequence[int]
    ) -> int | None:
        """Do `read_prefix` to blocks of the own cache, as `read_in_place` does `read`."""
        if not self._is_shared(holder):
            return None

        def read(at: int) -> int:
            wanted = block_ids[at : at + self._turn_in_place]
            request = PrefixPinRequest(hashes[at : at + len(wanted)], self._fingerprint, in_place=True)
            pin, load = _Pin(PREFIX_PIN.call(request), len(wanted)), self._onto(wanted)
            return self._links.use(link_of(holder), lambda link: self._read(link, [pin], load, PREFIX_DEADLINE_S))

        return _in_turns(read, len(block_ids))

    def _is_shared(self, peer: KvSource | PrefixHolder) -> bool:
        if self._sharing is None:
            return False
        return self._links.use(link_of(peer), lambda link: link.cache is not None)

    @property
    def _turn_in_place(self) -> int:
        assert self._sharing is not None
        return max(1, IN_PLACE_TURN_BYTES // self._sharing.own.block_bytes)

    def _read(self, link: PeerLink, pins: Sequence[_Pin], load: _Load, deadline_s: float) -> int:
        """Pin and ``load`` the blocks that the peer shows at once; return the number of leading whole ones.

        Blocks behind a pin that fell short are released unread, as is an export made by a pin.
        """
        blocks, made, error, is_whole = list[ExportedBlock](), list[int](), None, True
        for pin, outcome in zip(
            pins, link.connection.call_many([p.call for p in pins], deadline_s=deadline_s), strict=True
        ):
            if isinstance(outcome, TanghuluError):
                error, is_whole = error or outcome, False
                continue
            shown = outcome.message.blocks[: pin.num_blocks]
            if is_whole:
                blocks += shown
            elif shown:
                _release(link, pin.export_id, 0, keep=True)
            if outcome.message.export_id:
                made.append(outcome.message.export_id)
            is_whole = is_whole and len(shown) == pin.num_blocks
        if error is not None and not blocks:
            raise error
        num_whole = 0
        try:
            num_whole = load(link, blocks)
        finally:
            for export_id in made:
                self._release_prefix(link, export_id, sum(block.length for block in blocks[:num_whole]))
        return num_whole

    def _into(self, buffers: Sequence[memoryview], deadline_s: float) -> _Load:
        """Return a function that copies blocks from the worker's segment to ``buffers``, and verifies them."""

        def load(link: PeerLink, blocks: Sequence[ExportedBlock]) -> int:
            num_whole = 0
            try:
                self._transfer(link, blocks, buffers, deadline_s)
                num_whole = _count_whole(blocks, buffers)
            finally:
                wipe(buffers[num_whole : len(blocks)])
            return num_whole

        return load

    def _onto(self, block_ids: Sequence[int]) -> _Load:
        """Return a function that copies blocks of the worker's cache to ``block_ids``, and confirms their leases."""
        sharing = self._sharing
        assert sharing is not None

        def load(link: PeerLink, blocks: Sequence[ExportedBlock]) -> int:
            own, num_valid = block_ids[: len(blocks)], 0
            if not own:
                return 0
            try:
                sharing.copy(_cache_of(link), _blocks_of(link, blocks), own)
                request = ExportConfirmRequest([block.lease_id for block in blocks])
                reply = link.connection.call(
                    EXPORT_CONFIRM.number, request, EXPORT_CONFIRM.reply, deadline_s=DEADLINE_S
                )
                num_valid = min(reply.message.num_valid, len(own))
            finally:
                sharing.wipe(own[num_valid:])
            if num_valid == 0:
                raise LeaseExpired(f"none of {len(own)} blocks was held until its copy had ended; compute the prompt")
            return num_valid

        return load

    @contextlib.contextmanager
    def watch(self, peer: KvSource) -> Iterator[Watch]:
        """Return a function that waits for an export to have more blocks than its argument ``num_known``.

        It returns after ``WATCH_S`` also if none came; it raises ChunkNotFound when the export was withdrawn. No other
        read waits meanwhile. Raises NodeUnavailable or DeadlineExceeded, as the function does.
        """
        connection = self._links.open_apart(link_of(peer))

        def wait(num_known: int) -> ExportWatchReply:
            request = ExportWatchRequest(peer.export_id, num_known, self._fingerprint, int(1000 * WATCH_S))
            reply = connection.call(EXPORT_WATCH.number, request, EXPORT_WATCH.reply, deadline_s=WATCH_S + DEADLINE_S)
            return reply.message

        try:
            yield wait
        finally:
            connection.close()

    def release(self, peer: KvSource, bytes_read: int = 0, *, keep: bool = False) -> None:
        """Notify the export's holder that this worker has stopped reading it, without waiting for its answer.

        Raises NodeUnavailable or DeadlineExceeded. ``keep``: another worker, or a later read of this one, still needs
        the export; nothing is sent if the session of the reads is gone.
        """

        def send(link: PeerLink) -> None:
            _release(link, peer.export_id, bytes_read, keep=keep)

        if keep:
            self._links.use_open(link_of(peer), send)
        else:
            self._links.use(link_of(peer), send)

    def _transfer(
        self,
        link: PeerLink,
        blocks: Sequence[ExportedBlock],
        buffers: Sequence[memoryview],
        deadline_s: float,
    ) -> None:
        requests = [
            TransferRequest(
                Opcode.READ,
                self._engine.register(buffer),
                link.segment,
                target_offset=block.offset,
                length=block.length,
                lease_id=block.lease_id,
            )
            for block, buffer in zip(blocks, buffers, strict=False)
        ]
        if not requests:
            return
        if link.segment.transport == "shm":
            self._engine.transfer(requests, deadline_s)
            return
        handle = self._engine.submit(TransferBatch(requests))
        with self._watch.over(link.connection, handle.cancel) as lost:
            result = handle.wait(deadline_s)
        if lost:
            raise lost[0]
        result.raise_first()

    def _release_prefix(self, link: PeerLink, export_id: int, bytes_read: int) -> None:
        """Notify the peer that its blocks are free; its own time limit would free them too."""
        try:
            _release(link, export_id, bytes_read)
        except TanghuluError as error:
            _log.warning("export.release_failed", export=export_id, error=error.message)

    def close(self) -> None:
        self._links.close()
        self._watch.close()


def _cache_of(link: PeerLink) -> torch.Tensor:
    """Return the worker's cache; raises TransferFailed if it came back without one."""
    if link.cache is None:
        raise TransferFailed(f"worker {link.connection.peer} no longer shares its cache; read its segment")
    return link.cache


def _blocks_of(link: PeerLink, blocks: Sequence[ExportedBlock]) -> list[int]:
    """Return the rows of ``blocks`` in the worker's cache; raises TransferFailed for one that is none."""
    num_rows, size = _cache_of(link).shape
    places = [divmod(block.offset - link.segment.descriptor.size_bytes, size) for block in blocks]
    if any(rest or not 0 <= row < num_rows for row, rest in places):
        raise TransferFailed(f"worker {link.connection.peer} named blocks outside its cache of {num_rows}")
    return [row for row, _ in places]


def _release(link: PeerLink, export_id: int, bytes_read: int, *, keep: bool = False) -> None:
    request = ExportReleaseRequest(export_id, bytes_read, keep)
    deadline_s = RELEASE_S if keep else DEADLINE_S
    link.connection.post(EXPORT_RELEASE.call(request), deadline_s=deadline_s)  # a lost one ends by its time limit


def _in_turns(read: Callable[[int], int], count: int) -> int:
    """Call ``read`` until ``count`` blocks arrived, or a turn failed or brought none; return the number of blocks."""
    num_ok = 0
    while num_ok < count:
        try:
            arrived = _read_or_retry(read, num_ok)
        except TanghuluError as error:
            if num_ok == 0:
                raise
            _log.warning("export.ended_early", num_blocks=num_ok, code=error.code, error=error.message)
            break
        if not arrived:
            break
        num_ok += arrived
    return num_ok


def _read_or_retry(read: Callable[[int], int], at: int) -> int:
    try:
        return read(at)
    except Overloaded:
        time.sleep(OVERLOADED_PAUSE_S)  # the window is full; wait for another reader to release some of it
        return read(at)


def _count_whole(blocks: Sequence[ExportedBlock], buffers: Sequence[memoryview]) -> int:
    """Count the leading blocks whose checksums match; raises ChecksumMismatch if the first one's does not."""
    for count, (block, buffer) in enumerate(zip(blocks, buffers, strict=False)):
        step = block.part_bytes
        parts = [xxhash.xxh3_64_intdigest(buffer[i : i + step]) for i in range(0, len(buffer), step)]
        if parts != list(block.checksums):
            if count == 0:
                raise ChecksumMismatch(
                    "the first exported block arrived with a wrong checksum; compute the prompt instead"
                )
            return count
    return len(blocks)
