"""Chained block hashes: the properties that prefix sharing stands on."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.errors import InvalidRequest
from tanghulu.hashing import HASH_FUNCTIONS, TokenSequence, as_tokens, chain_hashes, root_hash
from tanghulu.types import Fingerprint

MODEL = Fingerprint(b"m" * 16)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=300)


@given(tokens, st.lists(st.integers(0, 100), max_size=5), st.sampled_from(sorted(HASH_FUNCTIONS)))
def test_appending_in_pieces_names_the_same_blocks_as_at_once(values, cuts, algorithm):
    root = root_hash(MODEL, algorithm=algorithm)
    whole = TokenSequence(root, 16, values, algorithm)
    pieces = TokenSequence(root, 16, algorithm=algorithm)
    announced = []
    bounds = sorted({min(c, len(values)) for c in cuts} | {0, len(values)})
    for start, end in itertools.pairwise(bounds):
        announced += pieces.append(values[start:end])
        pieces.check()
    assert announced == whole.block_hashes == pieces.block_hashes
    assert len(whole.block_hashes) == len(values) // 16
    assert whole.tokens.tolist() == values


@given(tokens.filter(lambda t: len(t) >= 16), st.data())
def test_a_changed_token_changes_its_block_and_all_behind_it(values, data):
    root = root_hash(MODEL)
    position = data.draw(st.integers(0, len(values) - 1))
    changed = list(values)
    changed[position] ^= 1
    before = TokenSequence(root, 16, values).block_hashes
    after = TokenSequence(root, 16, changed).block_hashes
    first = position // 16
    assert before[:first] == after[:first]
    assert not set(before[first:]) & set(after[first:])


def test_model_and_tenant_separate_equal_prompts():
    prompt = as_tokens(range(64))
    roots = [root_hash(MODEL), root_hash(Fingerprint(b"n" * 16)), root_hash(MODEL, b"tenant")]
    names = {chain_hashes(root, prompt, 64)[0] for root in roots}
    assert len(names) == 3


def test_bytes_and_arrays_name_the_same_blocks():
    values = np.arange(128, dtype=np.uint32)
    root = root_hash(MODEL)
    assert TokenSequence(root, 64, values.tobytes()).block_hashes == TokenSequence(root, 64, values).block_hashes


def test_the_names_are_fixed_for_ever():
    """Chunks on disk and other engines rely on these; a change must be a new version of the root."""
    sequence = TokenSequence(root_hash(MODEL), 4, range(8))
    assert [h.hex() for h in sequence.block_hashes] == KNOWN


KNOWN = ["5233a51c3fa8521241140c8611d2b0fd", "e89ed0ed514da71b1316917b2303926e"]


def test_the_tokens_view_cannot_be_written():
    sequence = TokenSequence(root_hash(MODEL), 4, [1, 2])
    with pytest.raises(ValueError, match="read-only"):
        sequence.tokens[0] = 9


@pytest.mark.parametrize("bad", [b"123", b"12345"])
def test_ragged_bytes_are_refused(bad):
    with pytest.raises(InvalidRequest, match="multiple of 4"):
        as_tokens(bad)


def test_unknown_algorithm_names_the_known_ones():
    with pytest.raises(InvalidRequest, match="xxh3_128, sha256"):
        root_hash(MODEL, algorithm="md5")


def test_a_block_has_at_least_one_token():
    with pytest.raises(InvalidRequest, match="block_tokens is 0"):
        TokenSequence(root_hash(MODEL), 0)
