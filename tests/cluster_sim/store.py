"""The store as workers and conductors of a simulated cluster see it: chunks by their hash, sometimes away."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from tanghulu.errors import ChunkNotFound, DeadlineExceeded, NodeUnavailable
from tanghulu.store.client.block_store import BlockStore
from tanghulu.store.client.model import Status
from tanghulu.store.directory_feed import DirectoryEvent, DirectoryEventKind
from tanghulu.types import BlockHash, ChunkKey, Fingerprint, kv_chunk_key
from tanghulu.workers.kv.store_adapter import StoreAdapter
from tests.cluster_sim import text

HOST = "store"
#: How long the store's client tries while nobody answers.
AWAY_S = 1.0
_NODE = "node-0"
_MOST_CHUNKS = 400


class SimStore:
    """All chunks; forgets the oldest. ``away``: it does not answer. Conductors hear of changes after a while.

    ``late_after``: of each call only so many chunks come before its deadline.
    """

    def __init__(self, world: Any, rng: Random) -> None:
        self._world, self._rng = world, rng
        self.chunks: dict[BlockHash, bytes] = {}
        self.away = False
        self.late_after: int | None = None

    def seen_by(self, host: str, fingerprint: Fingerprint) -> StoreAdapter:
        """The store as the connector of a worker with this ``fingerprint`` reaches it."""
        client: Any = _SeenStore(self._world, self, host)
        return StoreAdapter(BlockStore(client), fingerprint, text.LAYOUT.layer_bytes)

    def put(self, block_hash: BlockHash, data: bytes) -> None:
        if block_hash in self.chunks:
            return
        self.chunks[block_hash] = data
        self._tell(DirectoryEventKind.STORED, block_hash)
        if len(self.chunks) > _MOST_CHUNKS:
            self.evict(next(iter(self.chunks)))

    def evict(self, block_hash: BlockHash) -> None:
        del self.chunks[block_hash]
        self._tell(DirectoryEventKind.REMOVED, block_hash)

    def _tell(self, kind: DirectoryEventKind, block_hash: BlockHash) -> None:
        event = DirectoryEvent(0, kind, _NODE, (kv_chunk_key(text.FINGERPRINT, block_hash, 0),))
        for conductor in self._world.conductors:
            self._world.loop.call_later(0.01, conductor.store_event, event)

    def snapshot(self) -> list[DirectoryEvent]:
        """What a conductor hears first."""
        keys = tuple(kv_chunk_key(text.FINGERPRINT, block_hash, 0) for block_hash in self.chunks)
        first = [DirectoryEvent(0, DirectoryEventKind.RESET, "", ())]
        return first + ([DirectoryEvent(0, DirectoryEventKind.STORED, _NODE, keys)] if keys else [])


class _SeenStore:
    """A client of the store: blocking, in the threads of one worker."""

    def __init__(self, world: Any, store: SimStore, host: str) -> None:
        self._world, self._store, self._host = world, store, host

    def get_many_into(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview], **_: object) -> list[Any]:
        self._travel()
        found: list[Any] = []
        for key, buffer in zip(keys, buffers, strict=True):
            if self._store.late_after is not None and len(found) >= self._store.late_after:
                found.append(DeadlineExceeded(f"{key!r} did not come in time"))
                continue
            data = self._store.chunks.get(_hash_of(key))
            if data is not None:
                buffer[:] = data
            found.append(ChunkNotFound(key) if data is None else len(data))
            self._world.threads.sleep(1e-4)
        return found

    def put_many(self, items: Sequence[tuple[ChunkKey, memoryview]], **_: object) -> list[Status]:
        self._travel()
        for key, value in items:
            self._world.threads.sleep(1e-4)
            self._store.put(_hash_of(key), bytes(value))
        return [Status(key) for key, _ in items]

    def _travel(self) -> None:
        network, threads = self._world.network, self._world.threads
        threads.sleep(2 * network.latency_s(self._host, HOST))
        if self._store.away:
            threads.sleep(AWAY_S)
            raise NodeUnavailable("the store is away")
        if network.is_cut(self._host, HOST):
            threads.sleep(AWAY_S)
            raise DeadlineExceeded("the store did not answer")


def _hash_of(key: ChunkKey) -> BlockHash:
    return BlockHash(bytes.fromhex(key.split("/")[2]))
