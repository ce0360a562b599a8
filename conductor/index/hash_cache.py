"""A cache of block hashes of earlier prompts, so that the next turn of a session is not rehashed block by block.

Owns a bounded table with LRU eviction: run of RUN_BLOCKS blocks after a parent -> their hashes. A run's key is its
parent with *one* hash over all its tokens, by the same function as the block hashes, so a wrong answer is as unlikely
as two blocks with the same name. Example with blocks of 64 tokens: a session of 8,192 tokens is two runs; its next turn
of 8,448 costs two hashes over 16 KiB (half a microsecond each) and four block hashes, instead of 132. After the first
unknown run all are unknown, as each key contains the hash of the preceding block.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from tanghulu.hashing import TOKEN_BYTES, Tokens, chain_hashes, hash_function
from tanghulu.types import BlockHash

RUN_BLOCKS = 64
#: 32 M tokens in blocks of 64; each run takes 5 kB.
DEFAULT_MAX_RUNS = 8192

#: Parent, hash of the run's tokens, tokens per block, name of the hash.
_Key = tuple[BlockHash, BlockHash, int, str]


class HashCache:
    """The cache; pass its ``chain`` to a TokenSequence. One cache serves all tenants and block sizes."""

    def __init__(self, max_runs: int = DEFAULT_MAX_RUNS) -> None:
        assert max_runs > 0
        self._max_runs = max_runs
        self._runs: OrderedDict[_Key, list[BlockHash]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._runs)

    def chain(self, parent: BlockHash, tokens: Tokens, block_tokens: int, algorithm: str) -> list[BlockHash]:
        """Hash as ``hashing.chain_hashes`` does."""
        run_tokens = RUN_BLOCKS * block_tokens
        if len(tokens) < run_tokens:
            return chain_hashes(parent, tokens, block_tokens, algorithm)
        digest = hash_function(algorithm)
        data = np.ascontiguousarray(tokens, dtype="<u4").data.cast("B")
        hashes: list[BlockHash] = []
        size = run_tokens * TOKEN_BYTES
        for start in range(0, len(data) - size + 1, size):
            key = (parent, digest(data[start : start + size]), block_tokens, algorithm)
            known = self._runs.get(key)
            if known is None:
                behind = chain_hashes(parent, tokens[start // TOKEN_BYTES :], block_tokens, algorithm)
                self._remember(key, data[start + size :], behind)
                return hashes + behind
            self._runs.move_to_end(key)
            hashes += known
            parent = known[-1]
        return hashes + chain_hashes(parent, tokens[len(hashes) * block_tokens :], block_tokens, algorithm)

    def check(self) -> None:
        assert len(self._runs) <= self._max_runs
        assert all(len(hashes) == RUN_BLOCKS for hashes in self._runs.values())

    def _remember(self, key: _Key, behind: memoryview, hashes: list[BlockHash]) -> None:
        """Store the runs of ``hashes``: the first under ``key``; ``behind`` are the bytes of the following runs."""
        _, _, block_tokens, algorithm = key
        digest, size = hash_function(algorithm), RUN_BLOCKS * block_tokens * TOKEN_BYTES
        for number in range(len(hashes) // RUN_BLOCKS):
            own = hashes[number * RUN_BLOCKS : (number + 1) * RUN_BLOCKS]
            self._runs[key] = own
            key = (own[-1], digest(behind[number * size : (number + 1) * size]), block_tokens, algorithm)
        while len(self._runs) > self._max_runs:
            self._runs.popitem(last=False)
