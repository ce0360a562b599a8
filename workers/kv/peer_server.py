"""Serves KV to other workers: the fast-lane calls on exports, and the leases under which their blocks are read.

Runs on the process's event loop. The reader (shm) or the segment server (tcp) moves the bytes; this module grants the
leases, adds the checksums and gives blocks back.

Pinned blocks are copied to where they are read, and checksummed, in threads (`ShownBlocks`). Pins that arrive together
are small and many: each by itself would wake a thread, and the event loop once more for its result. So those of one
turn of the loop share a thread, as long as they are small; a large one has its own. Example: pins of 4, 4 and 64 blocks
of 1 MiB arrive at once; the first two, 8 MiB, share a thread, the third has its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import xxhash
from msgspec import structs

from tanghulu.errors import InvalidRequest, NodeUnavailable, Overloaded, TanghuluError
from tanghulu.rpc.fast_server import FastService, Peer
from tanghulu.rpc.methods import PROTOCOL_VERSION
from tanghulu.runtime.clock import Clock
from tanghulu.runtime.process import host_id
from tanghulu.session.outputs import KvSource
from tanghulu.transfer_engine.core.access import AccessTable, Freed, unguessable_numbers
from tanghulu.transfer_engine.core.segment import SegmentHello, SegmentWelcome
from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.transfer_engine.server import SegmentServer
from tanghulu.types import Fingerprint, InstanceId, LeaseId, RequestId
from tanghulu.workers.engine.exports import ExportState, KvExport
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.engine.thread import EngineThread
from tanghulu.workers.kv.exports import Export, ExportTable
from tanghulu.workers.kv.peer_methods import (
    EXPORT_CONFIRM,
    EXPORT_PIN,
    EXPORT_RELEASE,
    EXPORT_WATCH,
    HELLO,
    PREFIX_PIN,
    SHARED_CACHE,
    ExportConfirmReply,
    ExportConfirmRequest,
    ExportedBlock,
    ExportPinReply,
    ExportPinRequest,
    ExportReleaseReply,
    ExportReleaseRequest,
    ExportWatchReply,
    ExportWatchRequest,
    PrefixPinRequest,
    SharedCacheReply,
    SharedCacheRequest,
)
from tanghulu.workers.kv.ports import ExportWindow
from tanghulu.workers.metrics import WorkerMetrics

EXPORT_TTL_S = 30.0
#: Cached prefixes that other workers may read at a time; further readers compute, or load from the store.
MAX_PREFIXES = 16
SWEEP_S = 1.0
#: Longest time for which a reader's request for more of an export is left open.
MAX_WATCH_S = 1.0


class KvIdentity(NamedTuple):
    """Identity of exported KV: this worker, this run of its process, and the fingerprint that readers must present.

    Readers connect to ``address``, or on this host to ``unix_path``.
    """

    instance_id: InstanceId
    generation: int
    fingerprint: Fingerprint
    address: str = ""
    unix_path: str = ""


class PeerServer:
    """Exports of this worker, whose blocks ``engine`` holds and ``window`` shows to readers."""

    def __init__(
        self,
        identity: KvIdentity,
        layout: KvLayout,
        window: ExportWindow,
        access: AccessTable,
        clock: Clock,
        metrics: WorkerMetrics,
        engine: EngineThread,
    ) -> None:
        self._identity = identity
        self._layout = layout
        self._window = window
        self._access = access
        self._clock = clock
        self._metrics = metrics
        self._engine = engine
        self._prefix_numbers = itertools.count(1)
        self._prefixes: set[RequestId] = set()
        self._exports = ExportTable(EXPORT_TTL_S, unguessable_numbers())
        self._session_ids = unguessable_numbers()
        self._changed = asyncio.Event()  # replaced when it was set
        self._shown = ShownBlocks(window, layout.layer_bytes, layout.block_bytes)
        self._closed = False
        self._segment: SegmentServer
        self.idle = asyncio.Event()
        self.idle.set()

    def serve(self, service: FastService, segment: SegmentServer) -> None:
        """Answer the fast lane's calls; peers read from ``segment``, where the window shows blocks."""
        self._segment, self._segment_bytes = segment, segment.descriptor().size_bytes
        service.register(HELLO, self._hello)
        service.register(EXPORT_PIN, self._pin)
        service.register(PREFIX_PIN, self._pin_prefix)
        service.register(EXPORT_RELEASE, self._release)
        service.register(EXPORT_WATCH, self._watch)
        service.register(SHARED_CACHE, self._shared_cache)
        service.register(EXPORT_CONFIRM, self._confirm)

    async def close(self) -> None:
        """Refuse new readers, and wait until no thread copies into the segment: its memory can be unmapped then."""
        self._closed = True
        await self._shown.close()

    # --- exports of this worker's own requests

    def add_exports(self, exports: Sequence[KvExport]) -> dict[RequestId, KvSource]:
        """Show the changes in the exports of this worker's requests.

        Returns the source of each that must be announced to a reader: new, or complete.
        """
        now_s, sources = self._clock.now_s(), dict[RequestId, KvSource]()
        for kv in exports:
            if kv.state is ExportState.WITHDRAWN:
                self._gone(self._exports.withdraw(kv))
                continue
            known, export = len(self._exports), self._exports.add(kv, now_s)
            if len(self._exports) > known or not export.grows:
                sources[kv.request_id] = self._source(export)
            self.idle.clear()
        self._wake_watchers()
        return sources

    def _wake_watchers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _source(self, export: Export) -> KvSource:
        self._metrics.exports.set(len(self._exports))
        own, kv = self._identity, export.kv
        return KvSource(own.instance_id, own.address, own.unix_path, export.export_id, kv.num_tokens, host_id())

    def release(self, export_id: int) -> None:
        """Release the export: no worker will fetch it (any more)."""
        self._gone(self._exports.release(export_id))
        self._wake_watchers()

    def on_freed(self, freed: Sequence[Freed]) -> None:
        """Give back exports whose last lease has ended."""
        for each in freed:
            if each.offset < self._segment_bytes:
                self._window.give_back(each.offset)
            self._gone(self._exports.lease_freed(each.lease_id))

    async def sweep(self) -> None:
        """End expired leases and exports, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = self._clock.now_s()
            self.on_freed(self._access.expire(now_s))
            late = self._exports.expire(now_s)
            self._metrics.exports_expired.inc(len(late))
            self._gone(late)
            self._metrics.export_quarantined_bytes.set(self._access.quarantined_bytes)

    def _gone(self, names: Sequence[RequestId]) -> None:
        for name in names:
            self._prefixes.discard(name)
            self._give_back(name)
        self._metrics.exports.set(len(self._exports))
        if len(self._exports) == 0:
            self.idle.set()

    def _give_back(self, name: RequestId) -> None:
        self._engine.post_lazily(lambda core: core.exports.release(name))

    # --- calls of peers

    def _hello(self, peer: Peer, request: SegmentHello, _: memoryview) -> SegmentWelcome:
        if peer.state is not None:
            raise InvalidRequest("this connection has already sent HELLO; send it once")
        session_id = next(self._session_ids)
        may_map = peer.is_unix and request.wants_shm and request.host_id == host_id()
        session = self._access.open_session(session_id, peer.pid if may_map else None)
        peer.state = session_id
        peer.on_close.append(lambda: self.on_freed(self._access.close_session(session_id)))
        own = self._identity
        return SegmentWelcome(PROTOCOL_VERSION, own.instance_id, own.generation, session, self._segment.descriptor())

    async def _pin(self, peer: Peer, request: ExportPinRequest, _: memoryview) -> ExportPinReply:
        self._require_known(peer, request.fingerprint)
        export = self._exports.get(request.export_id)
        if request.first_block:
            self._drop_leases(request.export_id, peer.state)  # a reader returning for more has read the earlier blocks
        wanted = export.kv.block_ids[request.first_block :]
        return await self._pinned(peer, export, wanted[: request.max_blocks or None], in_place=request.in_place)

    async def _watch(self, peer: Peer, request: ExportWatchRequest, _: memoryview) -> ExportWatchReply:
        """Answer as soon as the export has more than the reader's known blocks, or is complete."""
        self._require_known(peer, request.fingerprint)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(request.wait_ms / 1000, MAX_WATCH_S)):
                while (export := self._exports.get(request.export_id)).grows and (
                    len(export.kv.block_ids) <= request.num_known
                ):
                    await self._changed.wait()
        export = self._exports.get(request.export_id)
        self._exports.watched(export, self._clock.now_s())
        return ExportWatchReply(len(export.kv.block_ids), not export.grows)

    async def _pin_prefix(self, peer: Peer, request: PrefixPinRequest, _: memoryview) -> ExportPinReply:
        self._require_known(peer, request.fingerprint)
        if len(self._prefixes) >= MAX_PREFIXES:
            raise Overloaded(
                f"{MAX_PREFIXES} prefixes of {self._identity.instance_id} are being read, the maximum; "
                "load from the store, or retry"
            )
        name = RequestId(f"prefix-{next(self._prefix_numbers)}")
        self._prefixes.add(name)
        try:
            kv = await self._engine.call(lambda core: core.exports.export_prefix(name, request.block_hashes))
        except asyncio.CancelledError:  # the reader disconnected; the engine may hold the blocks, now or soon
            self._prefixes.remove(name)
            self._give_back(name)
            raise
        if kv is None:
            self._prefixes.remove(name)
            return ExportPinReply()
        export = self._exports.add(kv, self._clock.now_s(), one_reader=True)
        self.idle.clear()
        self._metrics.exports.set(len(self._exports))
        try:
            reply = await self._pinned(peer, export, kv.block_ids, in_place=request.in_place)
        except BaseException:  # no reader has its name, or will; re-raised
            self.release(export.export_id)
            raise
        return structs.replace(reply, export_id=export.export_id)

    def _shared_cache(self, peer: Peer, request: SharedCacheRequest, _: memoryview) -> SharedCacheReply:
        return SharedCacheReply(self._window.shared if peer.is_unix else None)

    def _confirm(self, peer: Peer, request: ExportConfirmRequest, _: memoryview) -> ExportConfirmReply:
        """Count the leading leases that are still the reader's, so that no block of theirs was reused, and end all."""
        leases = [self._access.lease(LeaseId(lease_id)) for lease_id in request.lease_ids]
        own = [each if each is not None and each.session_id == peer.state else None for each in leases]
        valid = itertools.takewhile(lambda each: each is not None and self._access.is_active(each.lease_id), own)
        num_valid = sum(1 for _ in valid)
        for each in own:
            if each is not None:
                self.on_freed(self._access.release(each.lease_id))
        return ExportConfirmReply(num_valid)

    def _require_known(self, peer: Peer, fingerprint: bytes) -> None:
        if peer.state is None:
            raise InvalidRequest("send HELLO before other calls")
        own = self._identity
        if fingerprint != own.fingerprint:
            raise InvalidRequest(
                f"KV of {fingerprint.hex() or 'no fingerprint'} was requested, {own.instance_id} holds KV of "
                f"{own.fingerprint.hex()}: model, --dtype, --kv-dtype, block size and --tp must be equal on both sides"
            )

    async def _pinned(self, peer: Peer, export: Export, block_ids: Sequence[int], *, in_place: bool) -> ExportPinReply:
        """Lease as many leading ones of ``block_ids`` of ``export`` as there is room for, and add their checksums."""
        if self._closed:
            raise NodeUnavailable(f"worker {self._identity.instance_id} is shutting down; compute the prompt instead")
        if not block_ids:
            return ExportPinReply()
        if in_place:
            return self._pinned_in_place(peer, export, block_ids)
        offsets = self._window.take(block_ids)
        try:
            leases = self._grant(peer.state, offsets, shm=self._segment.maps(peer.state))
        except TanghuluError:
            self._window.leave(offsets)
            raise
        self._exports.pinned(export, leases, self._clock.now_s())
        checksums = await self._shown.show(block_ids[: len(offsets)], offsets)
        size, part_bytes = self._layout.block_bytes, self._layout.layer_bytes
        blocks = [
            ExportedBlock(offset, size, lease, parts, part_bytes)
            for offset, lease, parts in zip(offsets, leases, checksums, strict=True)
        ]
        return ExportPinReply(blocks)

    def _pinned_in_place(self, peer: Peer, export: Export, block_ids: Sequence[int]) -> ExportPinReply:
        """Lease all blocks where they lie, as if behind the segment: neither a slot nor a checksum is needed.

        The leases end by time although the reader maps the cache: it counts no block that it did not confirm.
        """
        if self._window.shared is None:
            raise InvalidRequest(f"{self._identity.instance_id} shares no cache; read its blocks from the segment")
        size = self._layout.block_bytes
        offsets = [self._segment_bytes + block * size for block in block_ids]
        leases = self._grant(peer.state, offsets, shm=False)
        self._exports.pinned(export, leases, self._clock.now_s())
        return ExportPinReply(
            [ExportedBlock(offset, size, lease, (), size) for offset, lease in zip(offsets, leases, strict=True)]
        )

    def _grant(self, session_id: int, offsets: Sequence[int], *, shm: bool) -> list[LeaseId]:
        """Grant a lease on each block, with ``shm`` as a mapped range."""
        size = self._layout.block_bytes
        granted: list[LeaseId] = []
        for offset in offsets:
            try:
                granted.append(self._access.grant(session_id, offset, size, Opcode.READ, shm=shm))
            except TanghuluError:
                for lease in granted:  # no reader has them yet
                    self._access.release(lease)
                raise
        return granted

    def _release(self, peer: Peer, request: ExportReleaseRequest, _: memoryview) -> ExportReleaseReply:
        self._metrics.export_bytes.inc(request.bytes_read)
        self._drop_leases(request.export_id, peer.state or 0)
        if not request.keep:
            self.release(request.export_id)
        return ExportReleaseReply()

    def _drop_leases(self, export_id: int, session_id: int) -> None:
        """End the session's leases on the export: their reader has read its pinned blocks."""
        for lease_id in self._exports.leases_of(export_id):
            lease = self._access.lease(lease_id)
            if lease is not None and lease.session_id == session_id:
                self.on_freed(self._access.release(lease_id))


#: Most bytes shown together; a larger pin has a thread to itself.
SHARED_BYTES = 8 << 20

#: The xxh3_64 of each layer of each block.
Checksums = list[list[int]]


class _Pins(NamedTuple):
    """Blocks, held meanwhile, the offsets at which to read them, and the future of their checksums."""

    block_ids: Sequence[int]
    offsets: Sequence[int]
    shown: asyncio.Future[Checksums]


class ShownBlocks:
    """Shows blocks of ``layer_bytes`` a layer in ``window``. To be used in the event loop alone."""

    def __init__(self, window: ExportWindow, layer_bytes: int, block_bytes: int) -> None:
        self._window = window
        self._layer_bytes = layer_bytes
        self._block_bytes = block_bytes
        self._waiting: list[_Pins] = []
        self._showing: set[asyncio.Future[None]] = set()

    def show(self, block_ids: Sequence[int], offsets: Sequence[int]) -> asyncio.Future[Checksums]:
        """Bring the blocks to their ``offsets``, even if the waiter is cancelled; return their checksums."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._begin)
        shown: asyncio.Future[Checksums] = loop.create_future()
        self._waiting.append(_Pins(block_ids, offsets, shown))
        return shown

    async def close(self) -> None:
        """Wait until no thread touches the blocks any more."""
        self._begin()
        await asyncio.gather(*self._showing)

    def _begin(self) -> None:
        for together in self._shares():
            task = asyncio.ensure_future(self._show(together))
            self._showing.add(task)
            task.add_done_callback(self._showing.discard)

    def _shares(self) -> Iterator[list[_Pins]]:
        """Return the pins since the last turn of the loop, in the parts that a thread shows at a time."""
        share: list[_Pins] = []
        num_free = max_blocks = SHARED_BYTES // self._block_bytes
        for each in self._waiting:
            if share and len(each.block_ids) > num_free:
                yield share
                share, num_free = [], max_blocks
            share.append(each)
            num_free -= len(each.block_ids)
        if share:
            yield share
        self._waiting.clear()

    async def _show(self, together: list[_Pins]) -> None:
        results = await asyncio.to_thread(lambda: [self._checksums(each) for each in together])
        for each, result in zip(together, results, strict=True):
            if each.shown.done():  # the waiter was cancelled
                continue
            if isinstance(result, Exception):
                each.shown.set_exception(result)
            else:
                each.shown.set_result(result)

    def _checksums(self, pins: _Pins) -> Checksums | Exception:
        """Show the blocks, in a thread. They are held, so their bytes stay."""
        step = self._layer_bytes
        try:
            views = self._window.show(pins.block_ids, pins.offsets)
            return [[xxhash.xxh3_64_intdigest(v[i : i + step]) for i in range(0, len(v), step)] for v in views]
        except Exception as error:  # noqa: BLE001 - raised where the pin waits; the others of its group are shown
            return error
