"""The store as the connector sees it: blocks by hash in, bytes out. Opens its client when it is first needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tanghulu.auth.cluster_secret import NO_SECRET, ClusterSecret
from tanghulu.errors import ChunkNotFound, DirectoryIncomplete, MasterUnavailable, TanghuluError
from tanghulu.masters import Masters
from tanghulu.store.client.settings import ENGINE_ANSWER_S, Settings
from tanghulu.store.client.signed_kv import KvClient
from tanghulu.types import BlockHash, ChunkKey, Fingerprint, kv_chunk_key
from tanghulu.workers.kv.ports import wipe

#: A prefix that takes longer than this to load is computed instead.
LOAD_DEADLINE_S = 5.0
SAVE_DEADLINE_S = 10.0
_MASTER_AWAY = (MasterUnavailable, DirectoryIncomplete)


class StoreAdapter:
    """Blocks of one model (``fingerprint``), a chunk for each of the ``num_parts`` ranks. Threads share it.

    ``secret`` signs what is saved; what is not signed with it is not loaded, and counted by ``on_refused``.
    """

    def __init__(
        self,
        master: Masters,
        fingerprint: Fingerprint,
        layer_bytes: int,
        num_parts: int = 1,
        secret: ClusterSecret = NO_SECRET,
        on_refused: Callable[[int], None] = lambda num: None,
    ) -> None:
        self._master, self._secret, self._on_refused = master, secret, on_refused
        self._fingerprint = fingerprint
        self._layer_bytes = layer_bytes
        self._num_parts = num_parts
        self._lock = threading.Lock()
        self._client: KvClient | None = None

    def load(self, hashes: Sequence[BlockHash], buffers: Sequence[memoryview]) -> int:
        """Fill ``buffers``; returns how many leading ones arrived whole, checksums and signatures verified.

        A missing block ends the run and is no failure; nor is one that this cluster has not signed. Raises what else
        went wrong with the first block, and what says that the master cannot tell where a block is: to ask it for
        others costs as much time each.
        """
        parts, keys = self._split(buffers), self._keys(hashes)
        try:
            results = self._open().get_many_into(keys, parts, deadline_s=LOAD_DEADLINE_S)
        except TanghuluError:
            wipe(parts)
            raise
        failed = [isinstance(result, TanghuluError) and not isinstance(result, ChunkNotFound) for result in results]
        wipe([part for part, is_failed in zip(parts, failed, strict=True) if is_failed])
        num_ok = next((i for i, result in enumerate(results) if isinstance(result, TanghuluError)), len(results))
        for position, result in enumerate(results):
            if isinstance(result, _MASTER_AWAY) or (position == 0 and failed[0] and isinstance(result, TanghuluError)):
                raise result
        return num_ok // self._num_parts

    def save(self, hashes: Sequence[BlockHash], buffers: Sequence[memoryview]) -> int:
        """Put the blocks, a checksum a layer; returns how many are in the store now."""
        items = list(zip(self._keys(hashes), self._split(buffers), strict=True))
        statuses = self._open().put_many(items, part_bytes=self._layer_bytes, visible=False, deadline_s=SAVE_DEADLINE_S)
        return sum(status.ok for status in statuses) // self._num_parts

    def _keys(self, hashes: Sequence[BlockHash]) -> list[ChunkKey]:
        parts = range(self._num_parts)
        return [kv_chunk_key(self._fingerprint, block_hash, part) for block_hash in hashes for part in parts]

    def _split(self, buffers: Sequence[memoryview]) -> list[memoryview]:
        """Cut every block into its parts, in the order of their keys."""
        return [
            block[index * len(block) // self._num_parts : (index + 1) * len(block) // self._num_parts]
            for block in buffers
            for index in range(self._num_parts)
        ]

    def _open(self) -> KvClient:
        with self._lock:
            if self._client is None:
                settings = Settings(master=self._master, master_answer_s=ENGINE_ANSWER_S)
                self._client = KvClient(settings, self._secret, self._on_refused)
            return self._client

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None
