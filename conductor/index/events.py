"""Apply cache events to the prefix indexes: the workers' own events, and the store's directory.

Owns both indexes, the queues of events, and the sequence numbers of the workers' events. A worker's events are
numbered; if a number is missing, the index of that worker cannot be trusted, so its events are skipped until a snapshot
arrives. The session, and with it the worker's requests, continues. The directory's follower repairs its own gaps and
restarts with RESET.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import structlog

from tanghulu.conductor.index.prefix_index import Cleared, PrefixEvent, PrefixIndex, Removed, Stored
from tanghulu.masters import Masters
from tanghulu.session.messages import SessionWelcome
from tanghulu.session.outputs import KvChange
from tanghulu.store.directory_feed import DirectoryEvent, DirectoryEventKind, follow_directory
from tanghulu.types import Address, BlockHash, Fingerprint, InstanceId, parse_kv_chunk_key

_log = structlog.get_logger(__name__)
KEY_PREFIX = "kv/"
#: Blocks applied between two checks for other work: about a millisecond.
SLICE_BLOCKS = 2048
MAX_WAITING_BLOCKS = 4_000_000
#: Most models remembered as having several chunks per block.
MAX_MODELS = 4096


class EventQueues:
    """Events not applied yet, by holder: large ones in slices, so that no decision waits for a snapshot. Pure.

    A connecting worker reports its whole cache, hundreds of thousands of blocks, which the index processes at a few
    million a second: every request arriving meanwhile would wait for all of it. So an event of more than
    ``SLICE_BLOCKS`` is cut and queued, and a task of the event loop applies a slice at a time (``apply_some``), of the
    holders in turn. A small event of a holder with nothing queued is applied at once, as nearly all are.

    Example: a reports 5,000 blocks: 2,048 + 2,048 + 904. Then b reports 64: applied at once. a removes 32: after its
    three slices, since events of one holder stay in order.

    Beyond ``max_waiting_blocks``, a holder's events are applied at once, after its queued ones; the index lags no
    further.
    """

    def __init__(self, apply: Callable[[PrefixEvent], None], max_waiting_blocks: int = MAX_WAITING_BLOCKS) -> None:
        self._apply = apply
        self._queues: dict[InstanceId, deque[PrefixEvent]] = {}  # the first is served next
        self._max_waiting_blocks = max_waiting_blocks
        self.waiting_blocks = 0

    def put(self, event: PrefixEvent) -> bool:
        """Apply or queue ``event``; return whether events are waiting for ``apply_some``."""
        queue, size = self._queues.get(event.holder), _size(event)
        if queue is None and size <= SLICE_BLOCKS:
            self._apply(event)
        elif self.waiting_blocks + size > self._max_waiting_blocks:
            for queued in self._queues.pop(event.holder, ()):
                self._apply_queued(queued)
            self._apply(event)
        else:
            self.waiting_blocks += size
            self._queues.setdefault(event.holder, deque()).extend(_slices(event))
        return self.waits

    @property
    def waits(self) -> bool:
        return bool(self._queues)

    @property
    def waiting_holders(self) -> Set[InstanceId]:
        return self._queues.keys()

    def apply_some(self) -> bool:
        """Apply events of the next holder, up to a slice's blocks; return whether there are more."""
        if self._queues:
            holder = next(iter(self._queues))
            queue, left = self._queues.pop(holder), SLICE_BLOCKS
            while queue and left > 0:
                left -= max(1, self._apply_queued(queue.popleft()))
            if queue:
                self._queues[holder] = queue
        return self.waits

    def check(self) -> None:
        assert all(self._queues.values())
        assert self.waiting_blocks == sum(_size(event) for queue in self._queues.values() for event in queue)
        assert self.waiting_blocks <= self._max_waiting_blocks

    def _apply_queued(self, event: PrefixEvent) -> int:
        size = _size(event)
        self.waiting_blocks -= size
        self._apply(event)
        return size


def _size(event: PrefixEvent) -> int:
    return 0 if isinstance(event, Cleared) else len(event.blocks)


def _slices(event: PrefixEvent) -> list[PrefixEvent]:
    """Split ``event`` into parts of at most SLICE_BLOCKS."""
    if isinstance(event, Cleared) or len(event.blocks) <= SLICE_BLOCKS:
        return [event]
    parts = [event.blocks[at : at + SLICE_BLOCKS] for at in range(0, len(event.blocks), SLICE_BLOCKS)]
    return [type(event)(event.holder, part) for part in parts]


def events_of(worker: InstanceId, change: KvChange) -> Iterator[PrefixEvent]:
    """Yield ``change`` of a worker's cache as events of the index."""
    if change.cleared:
        yield Cleared(worker)
    if change.removed:
        yield Removed(worker, change.removed)
    if change.stored:
        yield Stored(worker, change.stored)


@dataclass(frozen=True, slots=True)
class Hits:
    """Holders of a prompt's blocks: hit blocks of each worker, and of the store as a whole."""

    workers: dict[InstanceId, int]
    store: int


class CacheWatcher(Protocol):
    """Follows what the holders lose."""

    def removed(self, holder: InstanceId, blocks: Iterable[BlockHash], *, is_store: bool) -> None:
        """Record that ``holder``, of the store or a worker, has removed ``blocks``."""

    def gone(self, holder: InstanceId) -> None:
        """Record that ``holder`` has nothing any more."""


_ALL_GONE = KvChange(cleared=True)


class CacheMirror:
    """A mirror of all caches: the blocks of each worker and of each store node."""

    def __init__(self) -> None:
        self.workers = PrefixIndex()
        self.events = EventQueues(self.workers.apply)
        self._waiting = asyncio.Event()
        self.store = PrefixIndex()
        self._next_sequence: dict[InstanceId, int] = {}
        #: Workers whose events are skipped until their snapshot arrives.
        self._behind: set[InstanceId] = set()
        self._num_parts: dict[str, int] = {}
        #: Notified of removed blocks (of a store node or not), and of holders that are gone or empty; if set.
        self.watcher: CacheWatcher | None = None

    def hits(self, block_hashes: Sequence[BlockHash]) -> Hits:
        return Hits(self.workers.match(block_hashes), self.store.leading_blocks(block_hashes))

    def num_parts(self, fingerprint: Fingerprint) -> int:
        """Return the number of chunks per block of the model in the store: one for each tensor-parallel rank."""
        return self._num_parts.get(fingerprint[:8].hex(), 1)

    def welcome(self, worker: InstanceId, welcome: SessionWelcome) -> None:
        """Begin a session: its snapshot replaces everything recorded of the worker."""
        self._behind.discard(worker)
        self._put(Cleared(worker))
        self._put(Stored(worker, welcome.cached_blocks))
        self._next_sequence[worker] = welcome.event_sequence

    def snapshot(self, worker: InstanceId, welcome: SessionWelcome) -> None:
        """Correct the mirror from a snapshot of a continuing session."""
        if worker in self._behind:
            self.welcome(worker, welcome)
            return
        known, reported = self.workers.blocks_of(worker), set(welcome.cached_blocks)
        self._put(Removed(worker, list(known - reported)))
        self._put(Stored(worker, [block for block in welcome.cached_blocks if block not in known]))
        self._next_sequence[worker] = welcome.event_sequence

    def worker_events(self, worker: InstanceId, first_sequence: int, changes: Sequence[KvChange]) -> bool:
        """Apply the events of one step; False if earlier ones were lost, so that a snapshot must be requested.

        The worker's events are skipped until it arrives.
        """
        expected = self._next_sequence[worker]
        if worker in self._behind:
            return True
        if first_sequence != expected:
            _log.warning("kv_events.gap", worker=worker, expected=expected, first=first_sequence)
            self._behind.add(worker)
            return False
        self._next_sequence[worker] = expected + len(changes)
        for change in changes:
            self._watch(worker, change)
            for event in events_of(worker, change):
                self._put(event)
        return True

    def _watch(self, worker: InstanceId, change: KvChange) -> None:
        if self.watcher is not None:
            if change.cleared:
                self.watcher.gone(worker)
            if change.removed:
                self.watcher.removed(worker, change.removed, is_store=False)

    def worker_gone(self, worker: InstanceId) -> None:
        """Forget a worker whose session ended."""
        self._watch(worker, _ALL_GONE)
        self._put(Cleared(worker))
        self._next_sequence.pop(worker, None)
        self._behind.discard(worker)

    async def apply_events(self) -> None:
        """Apply queued events until cancelled, a slice at a time, so that other work of the loop gets its turn."""
        while True:
            await self._waiting.wait()
            self._waiting.clear()
            while self.events.apply_some():  # noqa: ASYNC110 - it is work between the turns, not a wait
                await asyncio.sleep(0)

    def directory_event(self, event: DirectoryEvent) -> None:
        """Apply one event of the master's directory; holders are store nodes."""
        holder = InstanceId(event.node_id)
        match event.kind:
            case DirectoryEventKind.RESET:
                self.store = PrefixIndex()
                self._num_parts.clear()
            case DirectoryEventKind.STORED:
                self.store.apply(Stored(holder, self._stored_blocks(event.keys)))
            case DirectoryEventKind.REMOVED:
                blocks = _blocks(event.keys)
                self.store.apply(Removed(holder, blocks))
                if self.watcher is not None:
                    self.watcher.removed(holder, blocks, is_store=True)
            case DirectoryEventKind.NODE_GONE:
                self.store.remove_holder(holder)
                self._watch(holder, _ALL_GONE)

    async def follow_master(self, master: Masters | Address) -> None:
        """Mirror the directory of the master, or of all masters sharing the keys, until cancelled."""
        async for batch in follow_directory(master, KEY_PREFIX, self.store.max_blocks):
            for event in batch:
                self.directory_event(event)

    def check(self) -> None:
        self.workers.check()
        self.store.check()
        self.events.check()
        assert self._behind <= set(self._next_sequence)
        assert set(self.workers.holders) - self.events.waiting_holders <= set(self._next_sequence)

    def _stored_blocks(self, keys: Sequence[str]) -> list[BlockHash]:
        """Return the blocks named by ``keys``. Of a tensor-parallel block, rank 0's part stands for all."""
        blocks = []
        for model, block, part in filter(None, map(parse_kv_chunk_key, keys)):
            if part == 0:
                blocks.append(block)
            elif part >= self._num_parts.get(model, 1) and len(self._num_parts) < MAX_MODELS:
                self._num_parts[model] = part + 1
        return blocks

    def _put(self, event: PrefixEvent) -> None:
        if self.events.put(event):
            self._waiting.set()


def _blocks(keys: Sequence[str]) -> list[BlockHash]:
    """Return the blocks named by ``keys``. Of a tensor-parallel block, rank 0's part stands for all."""
    parsed = (parse_kv_chunk_key(key) for key in keys)
    return [what[1] for what in parsed if what is not None and what[2] == 0]
