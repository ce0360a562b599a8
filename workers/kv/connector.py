"""Between the engine and the outside: prefixes are fetched before they are computed, new blocks saved afterwards.

The engine names the blocks that it wants (`FetchWanted`) and those that it made (`CommittedBlock`) and continues;
threads of the connector move the bytes, straight into and out of the cache's blocks. Whatever fails, the engine is
informed of the number of leading blocks that arrived whole (0 is always an answer), and computes the rest.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import structlog

from tanghulu.errors import NodeUnavailable, TanghuluError
from tanghulu.session.outputs import KvLoad, KvSource, PrefixHolder
from tanghulu.session.speed import SpeedMeter
from tanghulu.types import BlockHash, RequestId
from tanghulu.workers.engine.engine import EngineCore, KvTransfers
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.engine.pulls import MAX_PULLS
from tanghulu.workers.engine.step import CommittedBlock, FetchWanted
from tanghulu.workers.engine.thread import EngineThread
from tanghulu.workers.kv.peer_reader import TURN_BYTES, ExportPart, PeerReader, Watch, cut
from tanghulu.workers.kv.ports import BlockPort
from tanghulu.workers.kv.store_adapter import StoreAdapter
from tanghulu.workers.kv.store_policy import make_store_policy
from tanghulu.workers.metrics import WorkerMetrics

_log = structlog.get_logger(__name__)

#: Fetches some wanted blocks, starting from a number, into these ids; returns the number of leading ones that arrived.
Fill = Callable[[int, Sequence[int]], int]

#: Deferred blocks written at a time: a request arriving meanwhile has the rest of the memory's bandwidth.
_IDLE_BLOCKS = 16
#: Threads that load; on a GPU each has pinned memory of its own.
NUM_FETCH_THREADS = 2

#: Hashes remembered as written; forgotten ones are at worst written again, which the store finds a hit.
_MAX_WRITTEN = 65_536


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """Selection of blocks to keep in the store, and limits.

    ``max_pending_bytes`` bounds the bytes on their way to the store; beyond it new blocks are not kept.
    ``max_deferred_bytes`` bounds those of blocks waiting to be written (store policy *defer*).
    """

    store_policy: str = "all"
    max_pending_bytes: int = 512 << 20
    max_deferred_bytes: int = 512 << 20


class KvConnector(KvTransfers):
    """Performs the engine's fetches and keeps its blocks, which ``port`` gives access to; of ``layout``."""

    can_fetch = True

    def __init__(
        self,
        store: StoreAdapter | None,
        peers: PeerReader,
        metrics: WorkerMetrics,
        speed: SpeedMeter,
        layout: KvLayout,
        port: BlockPort,
        config: ConnectorConfig = ConnectorConfig(),
    ) -> None:
        self._store = store
        self._peers = peers
        self._metrics = metrics
        self._speed = speed
        self._layout = layout
        self._port = port
        self._max_pending_blocks = config.max_pending_bytes // layout.block_bytes
        self._policy = make_store_policy(config.store_policy, config.max_deferred_bytes // layout.block_bytes)
        self._engine: EngineThread
        self._fetchers = ThreadPoolExecutor(NUM_FETCH_THREADS, "kv-fetch")
        self._handed: deque[FetchWanted] = deque()  # hand-overs not begun by any fetcher
        self._taking = threading.Lock()  # of some of them
        # Calls of peers that wait: each pull has a thread, and releases have one. The fetchers move the blocks.
        self._waiters = ThreadPoolExecutor(MAX_PULLS + 1, "kv-wait")
        self._closing = False  # pulls end
        self._writer = ThreadPoolExecutor(1, "kv-save")
        self._pending_blocks = 0  # changed by the engine's thread alone
        self._num_dropped = 0
        self._written: OrderedDict[BlockHash, None] = OrderedDict()  # or on its way; the engine's thread alone

    def attach(self, engine: EngineThread) -> None:
        """Report to ``engine``, whose core has this connector; before its first step."""
        self._engine = engine

    def close(self) -> None:
        """Wait for transfers under way; the executors refuse later ones."""
        self._closing = True
        for pool in (self._waiters, self._fetchers, self._writer):
            pool.shutdown(wait=True, cancel_futures=True)

    # --- in the engine's thread

    def fetch(self, wanted: FetchWanted) -> None:
        if wanted.peer is None and wanted.holder is None and not self._store_answers:
            skipped = [KvLoad("store", 0, NodeUnavailable.code)] if self._store is not None else []
            self._done([(wanted.request_id, 0, skipped)])
            return
        if wanted.peer is None:
            self._fetchers.submit(self._fetch, wanted)
        else:
            self._handed.append(wanted)
            self._fetchers.submit(self._fetch_handed)

    def decline(self, peer: KvSource) -> None:
        self._waiters.submit(self._released, peer, 0, keep=False)

    def pull(self, wanted: FetchWanted) -> None:
        self._waiters.submit(self._pull, wanted)

    def blocks_committed(self, blocks: Sequence[CommittedBlock]) -> None:
        """Keep in the store, after the computation, the blocks selected by the policy."""
        if self._store is not None:
            self._keep(self._policy.committed(blocks))

    def blocks_reused(self, blocks: Sequence[CommittedBlock]) -> None:
        """Keep in the store the blocks that the policy selects now that they were used again."""
        if self._store is not None:
            self._keep(self._policy.reused(blocks))

    def blocks_preempted(self, blocks: Sequence[CommittedBlock]) -> None:
        """Move to the store the blocks not there yet, within the bound on bytes under way, prefixes first.

        The following step may overwrite the blocks, so their bytes are copied: a block of 1.5 MB in about 0.2 ms.
        """
        missing = [block for block in blocks if block.block_hash not in self._written]
        taken = missing[: self._num_writable] if self._store_answers else []
        for name, count in ("there", len(blocks) - len(missing)), ("store", len(taken)):
            self._metrics.preempted_blocks.labels(name).inc(count)
        self._metrics.preempted_blocks.labels("dropped").inc(len(missing) - len(taken))
        if taken:
            hashes, copies = [block.block_hash for block in taken], self._copies([block.block_id for block in taken])
            self._write(hashes, lambda store: store.save(hashes, copies), held=[])

    def _copies(self, block_ids: list[int]) -> list[memoryview]:
        copies: list[memoryview] = []

        def copy(at: int, buffers: Sequence[memoryview]) -> int:
            copies.extend(memoryview(bytes(buffer)) for buffer in buffers)
            return len(buffers)

        self._port.drain(block_ids, copy)
        return copies

    def engine_idle(self) -> None:
        """Write deferred blocks, a batch at a time: the end of one starts the next, if the engine is still idle."""
        if self._store_answers and self._pending_blocks == 0:
            self._keep(self._policy.idle(_IDLE_BLOCKS))

    def _keep(self, blocks: Sequence[CommittedBlock]) -> None:
        self._metrics.store_deferred_blocks.set(self._policy.num_deferred)
        self._metrics.store_dropped.inc(self._policy.num_dropped - self._num_dropped)
        self._num_dropped = self._policy.num_dropped
        blocks = [block for block in blocks if self._engine.core.pool.block_of(block.block_hash) == block.block_id]
        num_kept = self._num_writable if self._store_answers else 0
        blocks, skipped = blocks[:num_kept], blocks[num_kept:]
        self._metrics.store_skipped.inc(len(skipped))
        self._policy.lost(block.block_hash for block in skipped)
        if not blocks:
            return
        block_ids, hashes = [block.block_id for block in blocks], [block.block_hash for block in blocks]
        self._engine.core.exports.hold(block_ids)
        self._write(hashes, lambda store: self._drain(store, hashes, block_ids), block_ids)

    def _drain(self, store: StoreAdapter, hashes: list[BlockHash], block_ids: list[int]) -> int:
        """Save the blocks; called in the writer's thread."""
        return self._port.drain(
            block_ids, lambda at, buffers: store.save(hashes[at : at + len(buffers)], buffers), shareable=True
        )

    @property
    def _num_writable(self) -> int:
        """Number of blocks that may still be sent."""
        return self._max_pending_blocks - self._pending_blocks

    def _write(self, hashes: list[BlockHash], save: Callable[[StoreAdapter], int], held: list[int]) -> None:
        """Run ``save`` in the writer's thread, which returns the number kept; ``held`` blocks are given back then."""
        self._count_pending(len(hashes))
        self._written.update(dict.fromkeys(hashes))
        while len(self._written) > _MAX_WRITTEN:
            self._written.popitem(last=False)
        self._writer.submit(self._save, hashes, save, held)

    def _count_pending(self, change: int) -> None:
        self._pending_blocks += change
        self._metrics.store_pending_blocks.set(self._pending_blocks)

    @property
    def _store_answers(self) -> bool:
        """Whether there is a store that has not just failed: requests do not wait for its deadlines."""
        return self._store is not None and self._store.is_available

    # --- in the connector's threads

    def _fetch_handed(self) -> None:
        """Fetch the hand-overs waiting for one worker, as many as fit one turn.

        Requests handed over together are read, and then decoded, together: otherwise each would have its own round
        trip, and its own steps.
        """
        wanted = self._take_handed()
        left = self._fetch_together(wanted) if len(wanted) > 1 else wanted
        for each in left[1:]:
            self._fetchers.submit(self._fetch, each)
        for each in left[:1]:
            self._fetch(each)

    def _take_handed(self) -> list[FetchWanted]:
        """Take the next waiting one, and those right behind it to be read with it; [] if another fetcher has them."""
        taken: list[FetchWanted] = []
        with self._taking:
            num_free = self._turn_blocks
            while self._handed:
                wanted = self._handed[0]
                num_free -= len(wanted.block_ids)
                if taken and (num_free < 0 or _address(wanted) != _address(taken[0])):
                    break
                taken.append(self._handed.popleft())
        return taken

    def _fetch_together(self, wanted: Sequence[FetchWanted]) -> list[FetchWanted]:
        """Fetch hand-overs of one worker by one read; return those that did not arrive whole."""
        started_s = time.monotonic()
        parts = [ExportPart(each.peer, each.first_block, len(each.block_ids)) for each in wanted if each.peer]
        num_ok = 0
        try:
            block_ids = [block for each in wanted for block in each.block_ids]
            num_ok = self._fill_exports(parts, block_ids)
        except TanghuluError as error:  # each is fetched once more, alone, and then counted
            _log.info("fetch.together_failed", code=error.code, error=error.message)
        except Exception:  # noqa: BLE001 - as in `_fetch`
            _log.exception("fetch.together_failed")
        num_came = num_blocks = 0
        for each in wanted:
            if num_blocks + len(each.block_ids) > num_ok:
                break
            num_came, num_blocks = num_came + 1, num_blocks + len(each.block_ids)
        came, seconds = wanted[:num_came], time.monotonic() - started_s
        if came:
            for each in came:
                self._count_fetch(each, "peer", 0, len(each.block_ids), seconds)
            self._note_speed(came[0], "peer", num_blocks, seconds)
            self._done([(each.request_id, len(each.block_ids), [self._loaded(each, "peer")]) for each in came])
        for each in came:
            self._release_read(each, len(each.block_ids))
        return list(wanted[num_came:])

    @property
    def _turn_blocks(self) -> int:
        return max(1, TURN_BYTES // self._layout.block_bytes)

    def _fetch(self, wanted: FetchWanted) -> None:
        num_ok = num_peer = 0
        loads: list[KvLoad] = []
        from_ssd: set[BlockHash] = set()
        try:
            for source, end, fill in self._sources(wanted, from_ssd):
                if num_ok < end:
                    num_came, error = self._fill_or_fail(source, wanted, range(num_ok, end), fill)
                    loads += self._loads(wanted, source, range(num_ok, num_ok + num_came), error, from_ssd)
                    num_ok += num_came
                if source == "peer":
                    num_peer = num_ok
        except Exception:  # noqa: BLE001 - a bug here must not leave the request waiting for ever: it is computed
            _log.exception("fetch.failed", request=wanted.request_id)
        finally:
            self._done([(wanted.request_id, num_ok, loads)])
        self._release_read(wanted, num_peer)  # the request need not wait for that

    def _sources(self, wanted: FetchWanted, from_ssd: set[BlockHash]) -> Iterator[tuple[str, int, Fill]]:
        """Yield each source in order: its name, the end of the blocks it may have, and a function that fetches them.

        After a peer's export, which alone has the partial last block, the others are tried for the missing blocks.
        ``from_ssd`` receives those that the store reads from an SSD.
        """
        peer, holder, store, hashes = wanted.peer, wanted.holder, self._store, wanted.block_hashes
        if peer is not None:
            yield "peer", len(wanted.block_ids), self._filling(wanted)
        if holder is not None and (held := min(holder.num_blocks - wanted.first_block, len(hashes))) > 0:
            named = hashes[:held]
            yield "peer_cache", held, lambda first, ids: self._fill_prefix(holder, named[first : first + len(ids)], ids)
        if store is not None and self._store_answers:
            load = partial(self._load, store, from_ssd)
            yield "store", len(hashes), lambda first, ids: load(hashes[first : first + len(ids)], ids)

    def _pull(self, wanted: FetchWanted) -> None:
        """Fetch blocks of a growing export as they are computed there, until it has ended or the pull is dropped."""
        peer, name = wanted.peer, wanted.request_id
        assert peer is not None
        try:
            with self._peers.watch(peer) as watch:
                self._pull_turns(wanted, watch)
        except TanghuluError as error:  # ended, or unreachable: the request fetches the rest from any source
            _log.debug("pull.ended", name=name, code=error.code, error=error.message)
        except Exception:  # noqa: BLE001 - a bug here must not keep the blocks for ever: the request fetches them
            _log.exception("pull.failed", name=name)
        finally:
            # Before the request's own read of the export, which is under the same session.
            self._released(peer, 0, keep=True)
            self._engine.post(lambda core: core.pulls.done(name))

    def _pull_turns(self, wanted: FetchWanted, watch: Watch) -> None:
        assert wanted.ending is not None
        at, ids, is_ending = 0, wanted.block_ids, wanted.ending.is_set
        # After each turn a pull reports the arrived blocks, and ends if it is no longer wanted.
        while at < len(ids) and not is_ending() and not self._closing:
            shown = watch(wanted.first_block + at)
            until = min(shown.num_blocks - wanted.first_block, len(ids), at + self._turn_blocks)
            if until <= at or is_ending():
                if shown.complete:
                    return
                continue
            num_ok = self._fetchers.submit(self._pull_turn, wanted, at, until).result()
            if num_ok < until - at:
                return
            at = until

    def _pull_turn(self, wanted: FetchWanted, at: int, until: int) -> int:
        """Fetch the wanted blocks from number ``at`` up to ``until``, called in a fetcher's thread."""
        num_ok = self._fill("peer", wanted, range(at, until), self._filling(wanted))
        if num_ok:
            self._engine.post(lambda core: core.pulls.arrived(wanted.request_id, num_ok))
        return num_ok

    def _filling(self, wanted: FetchWanted) -> Fill:
        """Return a function that fetches the wanted blocks of the peer's export."""
        assert wanted.peer is not None
        parts = [ExportPart(wanted.peer, wanted.first_block, len(wanted.block_ids))]
        return lambda first, ids: self._fill_exports(cut(parts, first, len(ids)), ids)

    def _fill_exports(self, parts: Sequence[ExportPart], ids: Sequence[int]) -> int:
        """Fetch from one worker's exports, in order: on the device where both workers can, else through the port."""
        num_ok = self._peers.read_in_place(parts, ids)
        if num_ok is None:
            num_ok = self._port.fill(ids, lambda at, buffers: self._peers.read(cut(parts, at, len(buffers)), buffers))
        return num_ok

    def _fill_prefix(self, holder: PrefixHolder, hashes: Sequence[BlockHash], ids: Sequence[int]) -> int:
        """Fetch from a worker's cache, as `_fill_exports` does."""

        def read(at: int, buffers: Sequence[memoryview]) -> int:
            return self._peers.read_prefix(holder, hashes[at : at + len(buffers)], buffers)

        num_ok = self._peers.read_prefix_in_place(holder, hashes, ids)
        return self._port.fill(ids, read) if num_ok is None else num_ok

    def _load(
        self, store: StoreAdapter, from_ssd: set[BlockHash], hashes: Sequence[BlockHash], ids: Sequence[int]
    ) -> int:
        """Fetch from the store, which serves several calls at once."""
        return self._port.fill(
            ids, lambda at, buffers: store.load(hashes[at : at + len(buffers)], buffers, from_ssd), shareable=True
        )

    def _fill_or_fail(self, source: str, wanted: FetchWanted, numbers: range, fill: Fill) -> tuple[int, str]:
        """Do `_fill`; return its result, or 0 and the code of the error, which is counted."""
        try:
            return self._fill(source, wanted, numbers, fill), ""
        except TanghuluError as error:
            self._metrics.fetch_failures.labels(source).inc()
            _log.warning("fetch.failed", source=source, code=error.code, error=error.message)
            return 0, error.code

    def _fill(self, source: str, wanted: FetchWanted, numbers: range, fill: Fill) -> int:
        """Fetch the wanted blocks of these ``numbers``; return the number of leading ones that arrived."""
        started_s, first = time.monotonic(), numbers.start
        num_ok = fill(first, wanted.block_ids[first : numbers.stop])
        if num_ok:
            seconds = time.monotonic() - started_s
            self._count_fetch(wanted, source, first, num_ok, seconds)
            self._note_speed(wanted, source, num_ok, seconds)
        return num_ok

    def _release_read(self, wanted: FetchWanted, num_blocks: int) -> None:
        """Release the peer's export, if the fetch has one, after reading ``num_blocks`` of it."""
        if wanted.peer is not None:
            self._released(wanted.peer, num_blocks * self._layout.block_bytes, keep=False)

    def _released(self, peer: KvSource, bytes_read: int, *, keep: bool) -> None:
        try:
            self._peers.release(peer, bytes_read, keep=keep)
        except TanghuluError as error:
            about = {"worker": peer.instance_id, "export": peer.export_id}
            _log.warning("export.release_failed", **about, code=error.code, error=error.message)

    def _count_fetch(self, wanted: FetchWanted, source: str, at: int, num_ok: int, seconds: float) -> None:
        tokens = self._loaded(wanted, source, at, num_ok).tokens
        self._metrics.fetch_seconds.labels(source).observe(seconds)
        self._metrics.fetch_bytes.labels(source).inc(num_ok * self._layout.block_bytes)
        self._metrics.prefix_tokens.labels(source).inc(tokens)

    def _loads(
        self, wanted: FetchWanted, source: str, numbers: range, error: str, from_ssd: set[BlockHash]
    ) -> Iterator[KvLoad]:
        """Yield the loads of the wanted blocks of these ``numbers``, in order, or the one that brought nothing."""
        if source != "store" or not numbers:
            yield self._loaded(wanted, source, numbers.start, len(numbers), error)
            return
        for is_cold, run in groupby(numbers, lambda number: wanted.block_hashes[number] in from_ssd):
            blocks = list(run)
            yield self._loaded(wanted, "ssd" if is_cold else source, blocks[0], len(blocks))

    def _loaded(
        self, wanted: FetchWanted, source: str, at: int = 0, num_blocks: int | None = None, error: str = ""
    ) -> KvLoad:
        """Return the load of ``num_blocks`` (None: all) of the wanted blocks, from number ``at`` on."""
        size, count = self._layout.block_tokens, len(wanted.block_ids) if num_blocks is None else num_blocks
        tokens = min(count * size, wanted.num_tokens - (wanted.first_block + at) * size)
        return KvLoad(source.removesuffix("_cache"), tokens, error)

    def _note_speed(self, wanted: FetchWanted, source: str, num_blocks: int, seconds: float) -> None:
        num_bytes = num_blocks * self._layout.block_bytes
        if source == "store":
            self._speed.fetched(num_bytes, seconds)
            return
        peer = wanted.peer if source == "peer" else wanted.holder
        self._speed.read_from_peer(num_bytes, seconds, peer.address if peer is not None else "")

    def _done(self, ended: Sequence[tuple[RequestId, int, Sequence[KvLoad]]]) -> None:
        """Report the ends of fetches to the engine, in one command: each makes its thread report."""

        def done(core: EngineCore) -> None:
            for request_id, num_ok, loads in ended:
                core.fetch_done(request_id, num_ok, loads)

        self._engine.post(done)

    def _save(self, hashes: list[BlockHash], save: Callable[[StoreAdapter], int], held: list[int]) -> None:
        assert self._store is not None
        num_saved = 0
        try:
            num_saved = save(self._store)
        except Exception:  # noqa: BLE001 - as above: the blocks must be given back
            _log.exception("save.failed")
        self._metrics.store_bytes.inc(num_saved * self._layout.block_bytes)
        self._metrics.store_failures.inc(len(hashes) - num_saved)
        lost = hashes if num_saved < len(hashes) else []
        # Blocks waiting to be written while the engine is idle continue when these are there.
        post = self._engine.post if self._policy.num_deferred else self._engine.post_lazily
        post(lambda core: self._saved(core, len(hashes), lost, held))

    def _saved(self, core: EngineCore, num_blocks: int, lost: list[BlockHash], held: list[int]) -> None:
        core.exports.unhold(held)
        self._count_pending(-num_blocks)
        self._policy.lost(lost)
        for block_hash in lost:
            self._written.pop(block_hash, None)


def _address(wanted: FetchWanted) -> str:
    """Return the address of the worker whose export the fetch names."""
    return wanted.peer.address if wanted.peer is not None else ""
