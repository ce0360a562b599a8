"""The store as the connector sees it: blocks of one model by their hashes, each a chunk per rank."""

from __future__ import annotations

from collections.abc import Sequence

from tanghulu.errors import ChunkNotFound
from tanghulu.runtime.clock import Clock, SystemClock
from tanghulu.store.client.block_store import LOAD_DEADLINE_S, BlockStore
from tanghulu.types import BlockHash, ChunkKey, Fingerprint, kv_chunk_key
from tanghulu.workers.kv.ports import wipe


class StoreAdapter:
    """Blocks of one model (``fingerprint``), a chunk for each of the ``num_parts`` ranks. Thread-safe.

    A prefix that takes longer than ``LOAD_DEADLINE_S`` to load is computed instead.
    """

    def __init__(
        self,
        store: BlockStore,
        fingerprint: Fingerprint,
        layer_bytes: int,
        num_parts: int = 1,
        clock: Clock | None = None,
    ) -> None:
        self._store, self._clock = store, clock or SystemClock()
        self._fingerprint = fingerprint
        self._layer_bytes = layer_bytes
        self._num_parts = num_parts

    @property
    def is_available(self) -> bool:
        """Whether to load and save now: a store that did not answer is left alone for a moment."""
        return self._store.is_available

    def load(self, hashes: Sequence[BlockHash], buffers: Sequence[memoryview], from_ssd: set[BlockHash]) -> int:
        """Fill ``buffers``; return the number of leading ones that arrived whole, checksums and signatures verified.

        A missing block ends the run and is no failure; nor is one that this cluster has not signed. Raises any other
        error of the first block. ``from_ssd`` receives the blocks that nodes had to read from their SSDs.
        """
        parts, keys, cold = self._split(buffers), self._keys(hashes), set[str]()
        errors = self._store.load(keys, parts, self._clock.now_s() + LOAD_DEADLINE_S, from_ssd=cold)
        from_ssd.update(hashes[at // self._num_parts] for at, key in enumerate(keys) if key in cold)
        failures = [None if isinstance(error, ChunkNotFound) else error for error in errors]
        wipe([part for part, failure in zip(parts, failures, strict=True) if failure is not None])
        if failures and failures[0] is not None:
            raise failures[0]
        num_ok = next((at for at, error in enumerate(errors) if error is not None), len(errors))
        return num_ok // self._num_parts

    def save(self, hashes: Sequence[BlockHash], buffers: Sequence[memoryview]) -> int:
        """Put the blocks, a checksum per layer; return the number in the store now."""
        stored = self._store.save(self._keys(hashes), self._split(buffers), part_bytes=self._layer_bytes, visible=False)
        return sum(stored) // self._num_parts

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

    def close(self) -> None:
        self._store.close()
