"""What users are promised, with real processes: puts that do not fail, replicas that serve, masters that may die."""

from __future__ import annotations

import random
import time

import pytest

import tanghulu
from tanghulu.errors import ChunkNotFound, DirectoryIncomplete, MasterUnavailable, TanghuluError
from tanghulu.store.client import Client
from tests.store.cluster import Cluster, eventually
from tests.store.fault_tools import Background

MIB = 1 << 20
#: What is allowed while no master knows everything.
_PASSING = (MasterUnavailable, DirectoryIncomplete)


def test_back_to_back_puts_into_a_small_store_never_fail() -> None:
    with Cluster(1, "64MiB") as cluster, tanghulu.connect(cluster.address) as client:
        statuses = [client.put(f"k{i}", bytes([i]) * MIB) for i in range(200)]
        assert [status.key for status in statuses if not status.ok or status.existed] == []
        for i in range(150, 200):
            with client.get(f"k{i}") as chunk:
                assert chunk.numpy()[0] == chunk.numpy()[-1] == i


def test_puts_do_not_fail_while_another_client_probes() -> None:
    with (
        Cluster(1, "64MiB") as cluster,
        tanghulu.connect(cluster.address) as client,
        tanghulu.connect(cluster.address) as prober,
    ):
        keys = [f"k{i}" for i in range(248)]
        value = bytes(MIB)
        with Background(lambda: prober.exists_many(keys)) as probing:
            statuses = [client.put(key, value) for key in keys]

            def probed_often() -> bool:
                statuses.append(client.put(f"more{len(statuses)}", value))
                return probing.num_done > 10 or bool(probing.errors)

            eventually(probed_often)  # however fast the puts are and however slow the prober's thread
        assert not probing.errors
        assert [status.key for status in statuses if not status.ok] == []


def test_replicas_serve_every_get_at_once_when_a_holder_dies() -> None:
    with Cluster(2, "64MiB") as cluster, tanghulu.connect(cluster.address) as writer:
        keys = [f"k{i}" for i in range(40)]
        for i, key in enumerate(keys):
            assert writer.put(key, bytes([i]) * MIB, replicas=2).num_replicas == 2
        cluster.nodes[0].kill()
        with tanghulu.connect(cluster.address) as reader:
            for client in (writer, reader):
                # Within the gets' own deadlines: nobody waits for the master to notice.
                got = [bytes(client.get(key)) for key in keys]
                assert all(value == bytes([i]) * MIB for i, value in enumerate(got))


@pytest.mark.slow
def test_a_master_that_is_killed_and_restarted_knows_every_key_again() -> None:
    keys = [f"kv/{i:06d}" for i in range(100_000)]
    with Cluster(3, "64MiB", checked=False) as cluster, tanghulu.connect(cluster.address) as knowing:
        assert all(status.ok for status in knowing.put_many(((k, k.encode()) for k in keys), deadline_s=60))
        chance = random.Random(1)
        known = keys[::100]
        assert all(not isinstance(each, TanghuluError) for each in knowing.get_many(known))

        def read_known() -> None:
            key = chance.choice(known)
            assert bytes(knowing.get(key)) == key.encode()

        def read_unknown() -> None:
            key = chance.choice(keys)
            with tanghulu.connect(cluster.address, deadline_s=1.0) as fresh:
                assert bytes(fresh.get(key)) == key.encode()

        with Background(read_known) as reading, Background(read_unknown, _PASSING) as asking:
            cluster.master.kill()
            read_before = reading.num_done
            # Each of the keys once more, in the mean, while there is no master that a read could wait for.
            eventually(lambda: reading.num_done > read_before + len(known) or bool(reading.errors))
            cluster.restart_master()
            restarted = time.monotonic()
            with tanghulu.connect(cluster.address) as fresh:
                assert all(fresh.exists_many(keys, deadline_s=30.0))
                _read_all(fresh, keys)
            asked_since = asking.num_done
            while time.monotonic() < restarted + 4.0:  # beyond the end of REBUILDING, where a hole would show
                assert all(_found_by_a_stranger(cluster, keys))
            eventually(lambda: asking.num_done > asked_since or bool(asking.errors))
        assert not reading.errors, "reads with known locations never stop"
        assert not asking.errors, "no get says ChunkNotFound meanwhile"
        assert _sees_through_absence(cluster)


def _read_all(client: Client, keys: list[str]) -> None:
    """Every key has its value."""
    for key, chunk in zip(keys, client.get_many(keys, deadline_s=30.0), strict=True):
        assert not isinstance(chunk, TanghuluError), f"{key}: {chunk!r}"
        assert bytes(chunk) == key.encode()


def _found_by_a_stranger(cluster: Cluster, keys: list[str]) -> list[bool]:
    with tanghulu.connect(cluster.address) as client:
        return client.exists_many(keys, deadline_s=30.0)


def _sees_through_absence(cluster: Cluster) -> bool:
    """A key that never was is denied again once the directory is complete."""
    with tanghulu.connect(cluster.address, deadline_s=10.0) as client, pytest.raises(ChunkNotFound):
        client.get("never")
    return True
