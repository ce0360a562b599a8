"""Random and mutated frames and gRPC messages against a real node and a real master: they live on and serve."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import pytest
from store_cluster import Cluster, eventually
from store_fuzzer import Fuzzer, Mutator, decode_in_process, fuzz

import tanghulu
from tanghulu.errors import TanghuluError

MIB = 1 << 20
#: Private memory that neither process may ever have: some 40 MiB when empty, and bounded queues and tables beyond.
MOST_BYTES = 320 * MIB


def canary(key: str) -> bytes:
    return random.Random(key).randbytes(50_000 if key.endswith("0") else 300)


@contextlib.contextmanager
def attacked(seconds: float, seed: int, least: int) -> Iterator[Fuzzer]:
    """A cluster that was attacked, and serves right bytes afterwards."""
    keys = [f"canary{i}" for i in range(40)]
    with Cluster(1, "64MiB", "--lease-ms", "1000") as cluster, tanghulu.connect(cluster.address) as client:
        for key in keys:
            client.put(key, canary(key), pin="hard")
        fuzzer = fuzz(cluster, seconds, seed, MOST_BYTES, least)
        node = cluster.nodes[0]
        with tanghulu.connect(cluster.address) as fresh:
            for each in (client, fresh):
                for key in keys:
                    assert bytes(each.get(key)) == canary(key)
                assert _puts(each)
        eventually(lambda: node.metric("tanghulu_node_leases") == 0)
        yield fuzzer


def _puts(client: tanghulu.store.client.Client) -> bool:
    """A put that goes through, once the instances are gone that the fuzzer had registered."""

    def put() -> bool:
        try:
            return client.put(f"after{random.random()}", bytes(100_000), deadline_s=2).ok
        except TanghuluError:
            return False

    eventually(put)
    return True


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
