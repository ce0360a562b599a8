"""The store as the connector sees it: blocks by hash in, bytes out. Opens its client when it is first needed."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import structlog

from tanghulu.errors import ChunkNotFound, DirectoryIncomplete, InvalidRequest, MasterUnavailable, TanghuluError
from tanghulu.masters import Masters
from tanghulu.store.client.client import Client
from tanghulu.store.client.settings import ENGINE_ANSWER_S, Settings
from tanghulu.types import BlockHash, ChunkKey, Fingerprint, kv_chunk_key
from tanghulu.workers.kv.ports import wipe

#: A prefix that takes longer than this to load is computed instead.
LOAD_DEADLINE_S = 5.0
SAVE_DEADLINE_S = 10.0
_MASTER_AWAY = (MasterUnavailable, DirectoryIncomplete)

_log = structlog.get_logger(__name__)


def _is_odd(result: int | TanghuluError, num_bytes: int) -> bool:
    """Whether the chunk is there and has not the size that its block has: less, or more than fits (InvalidRequest)."""
    return isinstance(result, InvalidRequest) or (not isinstance(result, TanghuluError) and result != num_bytes)


class StoreAdapter:
    """Blocks of one model (``fingerprint``), a chunk for each of the ``num_parts`` ranks. Threads share it."""

    def __init__(self, master: Masters, fingerprint: Fingerprint, layer_bytes: int, num_parts: int = 1) -> None:
        self._master = master
        self._fingerprint = fingerprint
        self._layer_bytes = layer_bytes
        self._num_parts = num_parts
        self._lock = threading.Lock()
        self._client: Client | None = None

    def load(self, hashes: Sequence[BlockHash], buffers: Sequence[memoryview]) -> int:
        """Fill ``buffers``; returns how many leading ones arrived whole, checksums verified.

        A missing block ends the run and is no failure; nor is one of another size, which is removed, so that it can be
        put anew: the first put of a key stands. Raises what else went wrong with the first block, and what says that
        the master cannot tell where a block is: to ask it for others costs as much time each.
        """
        parts, keys = self._split(buffers), self._keys(hashes)
        try:
            results = list(self._open().get_many_into(keys, parts, deadline_s=LOAD_DEADLINE_S))
        except TanghuluError:
            wipe(parts)
            raise
        odd = [at for at, (result, part) in enumerate(zip(results, parts, strict=True)) if _is_odd(result, len(part))]
        if odd:
            _log.warning("store.chunks_of_another_size", first=keys[odd[0]], found=str(results[odd[0]]), num=len(odd))
            wipe([parts[at] for at in odd])
            self._open().remove_many([keys[at] for at in odd], deadline_s=LOAD_DEADLINE_S)
            for at in odd:
                results[at] = ChunkNotFound(f"{keys[at]!r} had another size")
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

    def _open(self) -> Client:
        with self._lock:
            if self._client is None:
                self._client = Client(Settings(master=self._master, master_answer_s=ENGINE_ANSWER_S))
            return self._client

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None
