"""The history of prompts beside a list of all of them."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tanghulu.conductor.explain.history import Namespace, PromptHistory, Use
from tanghulu.hashing import TokenSequence, root_hash
from tanghulu.types import Fingerprint, InstanceId

SIZE = 4
FINGERPRINT = Fingerprint(b"f" * 16)


class Lives:
    """A history, and all prompts added to it."""

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self.history = PromptHistory(max_bytes)
        self.prompts: list[tuple[bytes, list[int]]] = []
        self.now_s = 0.0

    def sequence(self, tokens: list[int], salt: bytes = b"") -> TokenSequence:
        return TokenSequence(root_hash(FINGERPRINT, salt), SIZE, tokens)

    def add(self, tokens: list[int], salt: bytes = b""):
        self.now_s += 1
        sequence = self.sequence(tokens, salt)
        self.prompts.append((salt, tokens))
        return self.history.add(sequence, Use(Namespace("m", FINGERPRINT, salt), "c", InstanceId("w"), self.now_s))

    def known(self, tokens: list[int], salt: bytes = b"") -> int:
        return self.history.num_known(self.sequence(tokens, salt).block_hashes)

    def break_of(self, tokens: list[int], salt: bytes = b""):
        sequence = self.sequence(tokens, salt)
        names = sequence.block_hashes[: self.known(tokens, salt)]
        return self.history.break_of(sequence.root, names, sequence.tokens, SIZE)


def test_a_break_is_found_at_the_token():
    lives = Lives()
    lives.add([1, 2, 3, 4, 5, 6, 7, 8, 9])
    found = lives.break_of([1, 2, 3, 4, 5, 6, 0, 8, 9])
    assert (found.shared, found.continues) == (6, False)
    assert found.theirs.tolist() == [7, 8, 9]


def test_a_break_in_a_partial_last_block_is_found():
    lives = Lives()
    lives.add([1, 2, 3, 4, 5, 6])
    assert lives.break_of([1, 2, 3, 4, 5, 7, 7, 7]).theirs.tolist() == [6]


def test_a_prompt_that_goes_on_continues_the_earlier_one():
    lives = Lives()
    lives.add([1, 2, 3, 4, 5, 6])
    found = lives.break_of([1, 2, 3, 4, 5, 6, 7, 8])
    assert found.shared == 6
    assert found.continues


def test_the_same_tokens_are_found_under_another_salt():
    lives = Lives()
    lives.add([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9], b"a")
    sequence = lives.sequence([1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0], b"b")
    namespace, _, num_blocks = lives.history.same_elsewhere(sequence.root, sequence.tokens, SIZE, "")
    assert (namespace.salt, num_blocks) == (b"a", 2)


@pytest.mark.parametrize("seed", range(6))
def test_random_prompts(seed):
    rng, lives = Random(seed), Lives()
    for _ in range(150):
        base = rng.choice(lives.prompts)[1] if lives.prompts and rng.random() < 0.8 else []
        tokens = base[: rng.randrange(len(base) + 1)] + [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
        salt = rng.choice((b"", b"s"))
        same = [other for other_salt, other in lives.prompts if other_salt == salt]
        shared = max((_num_equal(tokens, other) for other in same), default=0)
        blocks = max((_num_equal(tokens, other) // SIZE for other in same if len(other) >= SIZE), default=0)
        assert lives.known(tokens, salt) == blocks
        found = lives.break_of(tokens, salt)
        assert (found.shared if found is not None else 0) == shared
        elsewhere = [_num_equal(tokens, other) // SIZE for other_salt, other in lives.prompts if other_salt != salt]
        sequence = lives.sequence(tokens, salt)
        there = lives.history.same_elsewhere(sequence.root, sequence.tokens, SIZE, "")
        assert (there[2] if there is not None else 0) == max(elsewhere, default=0)
        lives.add(tokens, salt)
        lives.history.check()


@pytest.mark.parametrize("seed", range(3))
def test_memory_is_bounded_and_what_was_requested_last_is_kept(seed):
    rng, lives = Random(seed), Lives(max_bytes=40_000)
    for _ in range(400):
        base = rng.choice(lives.prompts[-5:])[1] if lives.prompts and rng.random() < 0.5 else []
        lives.add(base + [rng.randrange(1000) for _ in range(rng.randrange(4, 60))])
        lives.history.check()
        assert lives.known(lives.prompts[-1][1]) == len(lives.prompts[-1][1]) // SIZE
    assert lives.history.forgotten_s > 0


def _num_equal(one: list[int], other: list[int]) -> int:
    num = min(len(one), len(other))
    differs = np.flatnonzero(np.array(one[:num]) != np.array(other[:num]))
    return int(differs[0]) if len(differs) else num
