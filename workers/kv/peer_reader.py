"""Reads KV that another worker holds ready, into this worker's blocks. Blocking; threads share it.

One connection a peer stays open, as its session: under it the peer grants leases. A connection that fails is
dropped and the next read opens another.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import structlog
import xxhash

from tanghulu.errors import ChecksumMismatch, NodeUnavailable, TanghuluError
from tanghulu.protos import session_pb2, store_pb2
from tanghulu.rpc.fast_client import Call, FastConnection
from tanghulu.rpc.methods import HELLO
from tanghulu.rpc.versions import SPOKEN, settled
from tanghulu.runtime.process import host_id
from tanghulu.transfer_engine.client.remote import RemoteSegment
from tanghulu.transfer_engine.client.requests import TransferRequest
from tanghulu.transfer_engine.core.descriptor_wire import from_proto
from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.transfer_engine.engine import TransferEngine
from tanghulu.types import Address, BlockHash, Fingerprint
from tanghulu.workers.engine.requests import PeerExport, PeerPrefix
from tanghulu.workers.kv.peer_methods import EXPORT_PIN, EXPORT_RELEASE, PREFIX_PIN
from tanghulu.workers.kv.ports import wipe
from tanghulu.workers.sessions.wire import split_instance

_log = structlog.get_logger(__name__)

#: A cached prefix that takes longer than this to come is computed, or loaded from the store, instead.
PREFIX_DEADLINE_S = 5.0
#: Of every other call and read.
DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class _Peer:
    connection: FastConnection
    segment: RemoteSegment


class _Arrived(NamedTuple):
    """What one turn brought: leading whole blocks, whether they are all that the peer showed, and the peer's export."""

    num_whole: int
    all_whole: bool
    export_id: int


class PeerReader:
    """Connections to other workers and the reads over them.

    Only KV of ``fingerprint`` is read: peers refuse what is of another model, type or tensor-parallel split.
    """

    def __init__(self, engine: TransferEngine, client_id: str, fingerprint: Fingerprint) -> None:
        self._engine = engine
        self._client_id = client_id
        self._fingerprint = fingerprint
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}

    def read(self, peer: PeerExport, first_block: int, buffers: Sequence[memoryview]) -> int:
        """Fill ``buffers`` with the export's blocks from ``first_block`` on.

        Returns how many leading ones arrived whole, checksums verified; the peer may show some at a time, and holds
        the export until `release`. Raises NodeUnavailable, ChunkNotFound, TransferFailed or DeadlineExceeded when none
        did.
        """
        opened = self._open(peer.instance)

        def read(at: int) -> _Arrived:
            request = session_pb2.ExportPinRequest(
                export_id=int(peer.export_id), first_block=first_block + at, fingerprint=self._fingerprint
            )
            with self._dropped_if_gone(peer.instance):
                return self._copy(opened, EXPORT_PIN.call(request), buffers[at:], DEADLINE_S)

        return _in_turns(read, len(buffers))

    def read_prefix(self, holder: PeerPrefix, hashes: Sequence[BlockHash], buffers: Sequence[memoryview]) -> int:
        """Fill ``buffers`` with the blocks of ``hashes`` that ``holder`` has in its cache now.

        Returns how many leading ones arrived whole, 0 if it has none (any more). Raises as `read` does, and Overloaded.
        """
        opened = self._open(holder.instance)

        def read(at: int) -> _Arrived:
            request = session_pb2.PrefixPinRequest(block_hashes=hashes[at:], fingerprint=self._fingerprint)
            with self._dropped_if_gone(holder.instance):
                arrived = self._copy(opened, PREFIX_PIN.call(request), buffers[at:], PREFIX_DEADLINE_S)
            if arrived.export_id:
                self._release(opened, arrived.export_id, arrived.num_whole * len(buffers[0]))
            return arrived

        return _in_turns(read, len(buffers))

    def _copy(
        self,
        opened: _Peer,
        call: Call[session_pb2.ExportPinReply],
        buffers: Sequence[memoryview],
        deadline_s: float,
    ) -> _Arrived:
        """Pin, copy and verify the blocks that the peer shows at once."""
        pinned = opened.connection.call(call.method, call.request, call.reply_type, deadline_s=deadline_s)
        reply = pinned.message
        blocks = reply.blocks[: len(buffers)]
        num_whole = 0
        try:
            self._transfer(opened.segment, blocks, buffers, deadline_s)
            num_whole = _count_whole(blocks, buffers)
        finally:
            wipe(buffers[num_whole : len(blocks)])
        return _Arrived(num_whole, bool(blocks) and num_whole == len(blocks), reply.export_id)

    @contextlib.contextmanager
    def _dropped_if_gone(self, instance: str) -> Iterator[None]:
        try:
            yield
        except NodeUnavailable:
            self._drop(instance)
            raise

    def release(self, peer: PeerExport, bytes_read: int = 0) -> None:
        with self._dropped_if_gone(peer.instance):
            self._release(self._open(peer.instance), int(peer.export_id), bytes_read)

    def _transfer(
        self,
        segment: RemoteSegment,
        blocks: Sequence[session_pb2.ExportedBlock],
        buffers: Sequence[memoryview],
        deadline_s: float,
    ) -> None:
        requests = [
            TransferRequest(
                Opcode.READ,
                self._engine.register(buffer),
                segment,
                target_offset=block.offset,
                length=block.length,
                lease_id=block.lease_id,
            )
            for block, buffer in zip(blocks, buffers, strict=False)
        ]
        if requests:
            self._engine.transfer(requests, deadline_s)

    def _release(self, opened: _Peer, export_id: int, bytes_read: int) -> None:
        """Tell the peer that its blocks are free; it would find out by its own time limit too."""
        request = session_pb2.ExportReleaseRequest(export_id=export_id, bytes_read=bytes_read)
        try:
            opened.connection.call(EXPORT_RELEASE.number, request, EXPORT_RELEASE.reply, deadline_s=DEADLINE_S)
        except TanghuluError as error:
            _log.warning("export.release_failed", export=export_id, error=error.message)

    def _open(self, instance: str) -> _Peer:
        address, unix_path = split_instance(instance)
        with self._lock:
            known = self._peers.get(instance)
            if known is not None and not known.connection.closed:
                return known
            connection = FastConnection(Address.parse(address), unix_path or None)
            try:
                known = self._peers[instance] = self._greet(connection)
            except BaseException:  # an interrupt, too: nobody else would close it; raised on
                connection.close()
                raise
            return known

    def _greet(self, connection: FastConnection) -> _Peer:
        hello = store_pb2.HelloRequest(
            protocol_version=SPOKEN.lowest,
            highest_version=SPOKEN.highest,
            client_id=self._client_id,
            pid=os.getpid(),
            host_id=host_id(),
            wants_shm=True,
        )
        reply = connection.call(HELLO.number, hello, HELLO.reply, deadline_s=DEADLINE_S)
        settled(reply.message, connection.peer)
        segment = self._engine.open_segment(from_proto(reply.message.segment), reply.message.session_id)
        return _Peer(connection, segment)

    def _drop(self, instance: str) -> None:
        with self._lock:
            peer = self._peers.pop(instance, None)
        if peer is not None:
            peer.connection.close()
            peer.segment.close()

    def close(self) -> None:
        for instance in list(self._peers):
            self._drop(instance)


def _in_turns(read: Callable[[int], _Arrived], count: int) -> int:
    """Call ``read`` until ``count`` blocks arrived or a turn failed or brought less than was shown; return how many."""
    num_ok = 0
    while num_ok < count:
        try:
            arrived = read(num_ok)
        except TanghuluError as error:
            if num_ok == 0:
                raise
            _log.warning("export.ended_early", num_blocks=num_ok, code=error.code, error=error.message)
            break
        num_ok += arrived.num_whole
        if not arrived.all_whole:
            break
    return num_ok


def _count_whole(blocks: Sequence[session_pb2.ExportedBlock], buffers: Sequence[memoryview]) -> int:
    """Count the leading blocks whose checksums match; raises ChecksumMismatch if the first one's does not."""
    for count, (block, buffer) in enumerate(zip(blocks, buffers, strict=False)):
        step = block.checksums.part_bytes
        parts = [xxhash.xxh3_64_intdigest(buffer[i : i + step]) for i in range(0, len(buffer), step)]
        if parts != list(block.checksums.parts):
            if count == 0:
                raise ChecksumMismatch("the first exported block did not arrive as it was sent")
            return count
    return len(blocks)
