"""KV in a real store: what the cluster has not signed is not loaded, and makes room for what is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import tanghulu
from tanghulu.auth.cluster_secret import NO_SECRET, ClusterSecret
from tanghulu.errors import ChunkNotFound
from tanghulu.masters import Masters
from tanghulu.store.client.settings import Settings
from tanghulu.store.client.signed_kv import SIGNATURE_BYTES, KvClient, KvSigner
from tests.store.cluster import Cluster

SECRET, OTHER = ClusterSecret("s" * 32), ClusterSecret("t" * 32)
KEY, SIZE = "kv/0011223344556677/00/0", 1 << 20
VALUE = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)


class Refusals:
    """A worker's client and how many values it has refused."""

    def __init__(self, cluster: Cluster, secret: ClusterSecret = SECRET, transport: str | None = None) -> None:
        self.num = 0
        settings = Settings(master=Masters.parse(cluster.address), transport=transport)
        self.client = KvClient(settings, secret, self._refused)

    def _refused(self, num: int) -> None:
        self.num += num

    def load(self, key: str = KEY, size: int = SIZE) -> bytes | None:
        """What is loaded; None for a miss, which leaves nothing in the buffers."""
        first, rest = bytearray(size // 3), np.zeros(size - size // 3, np.uint8)
        (outcome,) = self.client.get_many_into([key], [[first, rest]])
        loaded = bytes(first) + rest.tobytes()
        if outcome == size:
            return loaded
        assert isinstance(outcome, ChunkNotFound)
        assert loaded == bytes(size)
        return None


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(1) as cluster:
        yield cluster


@pytest.fixture(params=["shm", "tcp"])
def worker(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Refusals]:
    worker = Refusals(cluster, transport=request.param)
    yield worker
    worker.client.remove_matching("^")
    worker.client.close()


@pytest.mark.parametrize("size", [1000, SIZE])
def test_what_the_cluster_stored_is_loaded(worker: Refusals, cluster: Cluster, size: int) -> None:
    value = VALUE[:size]
    assert all(worker.client.put_many([(KEY, [value[:7], value[7:]]), ("kv/1", value)], part_bytes=1 << 16))
    another = Refusals(cluster)
    assert another.load(KEY, size) == another.load("kv/1", size) == value.tobytes()
    assert another.num == 0
    another.client.close()


def forgeries(cluster: Cluster) -> dict[str, bytes]:
    """What somebody can put who reads and writes the store and does not know the secret."""
    honest = Refusals(cluster)
    honest.client.put_many([("kv/of-another", VALUE)])
    with tanghulu.connect(cluster.address) as client:
        signature = client.get("kv/of-another").bytes()[SIZE:]
    honest.client.close()
    value, changed = VALUE.tobytes(), b"\x5a" + VALUE.tobytes()[1:]
    by = {name: KvSigner(secret).sign(KEY, [value]) for name, secret in (("none", NO_SECRET), ("other", OTHER))}
    return {
        "unsigned": value,
        "of a block's size": value[SIGNATURE_BYTES:] + signature,
        "longer": value + bytes(SIGNATURE_BYTES + 1),
        "under another key": value + signature,
        "changed": changed + KvSigner(SECRET).sign(KEY, [value]),
        "without a secret": value + by["none"],
        "with another secret": value + by["other"],
    }


def test_forged_kv_is_not_loaded_and_makes_room(worker: Refusals, cluster: Cluster) -> None:
    with tanghulu.connect(cluster.address) as mallory:
        for number, (name, forged) in enumerate(forgeries(cluster).items(), 1):
            assert not mallory.put(KEY, forged).existed
            assert all(worker.client.put_many([(KEY, VALUE)])), "it exists: the first put stands"
            assert worker.load() is None, name
            assert worker.num == number
            assert not mallory.exists(KEY), name
            assert all(worker.client.put_many([(KEY, VALUE)]))
            assert worker.load() == VALUE.tobytes(), name
            mallory.remove(KEY)


def test_without_a_secret_what_was_not_stored_as_kv_is_refused(cluster: Cluster) -> None:
    worker = Refusals(cluster, NO_SECRET)
    with tanghulu.connect(cluster.address) as client:
        client.put(KEY, bytes(SIZE))
    assert worker.load() is None
    assert all(worker.client.put_many([(KEY, VALUE)]))
    assert worker.load() == VALUE.tobytes()
    worker.client.remove_matching("^")
    worker.client.close()
