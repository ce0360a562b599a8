"""Random and mutated frames and gRPC messages against a real node and a real master: they live on and serve."""

from __future__ import annotations

import random

import pytest

from tests.store.sim.fuzzer import Mutator, attacked, decode_in_process


def test_decoders_take_anything() -> None:
    frames = [b"\x05\0\0\0\0\0\0\0\x0e\0\0\0\x01\0\0\0\n\x03abc"]
    decode_in_process(Mutator(random.Random(7), frames), 1500)


def test_a_short_attack_leaves_everything_working() -> None:
    with attacked(2.0, seed=1, least=6):
        pass


@pytest.mark.slow
def test_half_a_minute_of_attacks() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    with attacked(30.0, seed, least=101) as fuzzer:
        print(f"seed {seed}: {fuzzer.counts}")
