"""Remembered block hashes are those that would have been computed, whatever was asked before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.conductor.index.hash_cache import RUN_BLOCKS, HashCache
from tanghulu.hashing import TokenSequence, chain_hashes, root_hash, vllm_root_hash
from tanghulu.types import Fingerprint

ROOTS = [*(root_hash(Fingerprint(bytes([n]) * 16)) for n in range(2)), vllm_root_hash(salt=b"tenant")]
RUN = RUN_BLOCKS * 2
#: Three conversations that part at different places.
TOKENS = np.random.default_rng(0).integers(0, 9, (3, 5 * RUN), dtype=np.uint32)
TOKENS[1, : 2 * RUN] = TOKENS[0, : 2 * RUN]
TOKENS[2, : RUN + 3] = TOKENS[0, : RUN + 3]


@settings(max_examples=40)
@given(
    asked=st.lists(
        st.tuples(
            st.sampled_from(ROOTS),
            st.integers(0, 2),
            st.integers(0, 5 * RUN),
            st.sampled_from([1, 2]),
            st.sampled_from(["xxh3_128", "sha256", "vllm_sha256_cbor"]),
        ),
        min_size=1,
        max_size=12,
    ),
    max_runs=st.integers(1, 12),
)
def test_the_same_hashes(asked, max_runs):
    cache = HashCache(max_runs)
    for root, which, length, block_tokens, algorithm in asked:
        tokens = TOKENS[which, :length]
        assert cache.chain(root, tokens, block_tokens, algorithm) == chain_hashes(root, tokens, block_tokens, algorithm)
        cache.check()


def test_a_sequence_grows_over_the_cache():
    cache = HashCache()
    sequence = TokenSequence(ROOTS[0], 2, TOKENS[0, : 2 * RUN + 7], chain=cache.chain)
    assert len(cache) == 2
    sequence.append(TOKENS[0, 2 * RUN + 7 : 4 * RUN])
    sequence.check()
    again = TokenSequence(ROOTS[0], 2, TOKENS[0, : 2 * RUN], chain=cache.chain)
    assert all(one is other for one, other in zip(again.block_hashes, sequence.block_hashes, strict=False))


@pytest.mark.parametrize("first", [0, 1])
def test_the_least_recently_used_run_goes(first):
    cache = HashCache(max_runs=2)
    one, two, three = (TOKENS[n, 3 * RUN : 4 * RUN] for n in range(3))
    kept = {number: cache.chain(ROOTS[0], tokens, 2, "xxh3_128") for number, tokens in enumerate((one, two))}
    cache.chain(ROOTS[0], (one, two)[first], 2, "xxh3_128")
    cache.chain(ROOTS[0], three, 2, "xxh3_128")
    again = cache.chain(ROOTS[0], (one, two)[first], 2, "xxh3_128")
    assert again[0] is kept[first][0]
