"""Chained block hashes: the properties that prefix sharing stands on."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.errors import InvalidRequest
from tanghulu.hashing import HASH_FUNCTIONS, TokenSequence, as_tokens, chain_hashes, joined, root_hash
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


TEXTS = [b"", b"a", b"1:a,", b"@acme/", b"0:,"]


def test_no_two_texts_have_one_root():
    """Fields cannot be shifted into one another, and each key has roots of its own, whatever names the blocks."""
    for algorithm in HASH_FUNCTIONS:
        roots = [root_hash(MODEL, salt, algorithm, key) for salt in TEXTS for key in (b"", b"k" * 32)]
        assert len(set(roots)) == len(roots)
    split = [joined(one, other) for one in TEXTS for other in TEXTS] + [joined(one) for one in TEXTS]
    assert len(set(split)) == len(split)
    shifted = root_hash(Fingerprint(MODEL[:-1]), MODEL[-1:])
    assert shifted != root_hash(MODEL)


def test_the_names_are_fixed_for_ever():
    """Chunks on disk rely on these, as other engines do. Without a cluster secret."""
    sequence = TokenSequence(root_hash(MODEL), 4, range(8))
    assert [h.hex() for h in sequence.block_hashes] == KNOWN


KNOWN = ["106ff03e2a585aac93937bc7875c3b94", "9e630440edb10423be2606e2ccf97f40"]


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
