"""Reads KV held ready by another worker into this worker's blocks. Blocking; thread-safe."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import structlog
import xxhash

from tanghulu.auth.credentials import NOTHING_TO_SHOW, Credentials
from tanghulu.errors import ChecksumMismatch, Overloaded, TanghuluError
from tanghulu.rpc.fast_client import Call
from tanghulu.runtime.clock import Clock, SystemClock
from tanghulu.session.outputs import KvSource, PrefixHolder
from tanghulu.transfer_engine.client.requests import TransferBatch, TransferRequest
from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.transfer_engine.engine import TransferEngine
from tanghulu.types import BlockHash, Fingerprint
from tanghulu.workers.kv.peer_links import PeerLink, PeerLinks, SilenceWatch, link_of
from tanghulu.workers.kv.peer_methods import (
    EXPORT_PIN,
    EXPORT_RELEASE,
    EXPORT_WATCH,
    PREFIX_PIN,
    ExportedBlock,
    ExportPinReply,
    ExportPinRequest,
    ExportReleaseRequest,
    ExportWatchReply,
    ExportWatchRequest,
    PrefixPinRequest,
)
from tanghulu.workers.kv.ports import wipe

_log = structlog.get_logger(__name__)

#: Limit for a cached prefix to arrive; a slower one is computed, or loaded from the store, instead.
PREFIX_DEADLINE_S = 5.0
#: Of every other call, and of each turn of a read: a whole export takes as long as the wire needs.
DEADLINE_S = 10.0
#: Bytes of one turn, which has at least a block.
TURN_BYTES = 16 << 20
#: Of a release for which a request waits: one not sent in time takes effect by the leases' time limit.
RELEASE_S = 1.0
#: Of one request for more of an export, after which the reader may reconsider.
WATCH_S = 0.2
#: Pause before retrying a peer whose pinned memory is in use by others.
OVERLOADED_PAUSE_S = 0.1


#: Waits for an export to have more blocks than the given number, or to be complete.
Watch = Callable[[int], ExportWatchReply]


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

    Only KV of ``fingerprint`` is read: peers refuse KV of another model, type or tensor-parallel split.
    """

    def __init__(
        self,
        engine: TransferEngine,
        client_id: str,
        fingerprint: Fingerprint,
        clock: Clock | None = None,
        credentials: Credentials = NOTHING_TO_SHOW,
    ) -> None:
        self._engine = engine
        self._fingerprint = fingerprint
        self._watch = SilenceWatch()
        self._links = PeerLinks(engine, client_id, clock or SystemClock(), credentials)

    def read(self, parts: Sequence[ExportPart], buffers: Sequence[memoryview]) -> int:
        """Fill ``buffers`` with these parts of one worker's exports, one behind the other.

        Returns the number of leading blocks that arrived whole, checksums verified; the peer shows some at a time, and
        holds the exports until `release`. Raises NodeUnavailable, ChunkNotFound, TransferFailed or DeadlineExceeded
        when none did.
        """
        turn_blocks = max(1, TURN_BYTES // len(buffers[0])) if buffers else 0

        def read(at: int) -> int:
            wanted = buffers[at : at + turn_blocks]
            pins = [self._pin(part) for part in cut(parts, at, len(wanted))]
            return self._links.use(link_of(parts[0].peer), lambda link: self._read(link, pins, wanted, DEADLINE_S))

        return _in_turns(read, len(buffers))

    def _pin(self, part: ExportPart) -> _Pin:
        export_id = part.peer.export_id
        request = ExportPinRequest(export_id, part.first_block, self._fingerprint, part.num_blocks)
        return _Pin(EXPORT_PIN.call(request), part.num_blocks, export_id)

    def read_prefix(self, holder: PrefixHolder, hashes: Sequence[BlockHash], buffers: Sequence[memoryview]) -> int:
        """Fill ``buffers`` with the blocks of ``hashes`` that ``holder`` has in its cache now.

        Returns the number of leading ones that arrived whole, 0 if it has none (any more). Raises as `read` does, and
        Overloaded.
        """

        def read(at: int) -> int:
            request = PrefixPinRequest(hashes[at:], self._fingerprint)
            pin = _Pin(PREFIX_PIN.call(request), len(buffers) - at)
            return self._links.use(
                link_of(holder), lambda link: self._read(link, [pin], buffers[at:], PREFIX_DEADLINE_S)
            )

        return _in_turns(read, len(buffers))

    def _read(self, link: PeerLink, pins: Sequence[_Pin], buffers: Sequence[memoryview], deadline_s: float) -> int:
        """Pin, copy and verify the blocks that the peer shows at once; return the number of leading whole ones.

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
            self._transfer(link, blocks, buffers, deadline_s)
            num_whole = _count_whole(blocks, buffers)
        finally:
            wipe(buffers[num_whole : len(blocks)])
            for export_id in made:
                self._release_prefix(link, export_id, num_whole * len(buffers[0]))
        return num_whole

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
