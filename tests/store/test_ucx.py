"""The store over ucx, where NIXL is installed; and what a node and a client say where it is not."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import tanghulu
from tanghulu.errors import ChunkNotFound, NodeUnavailable
from tanghulu.transfer_engine.transports.ucx.agent import probe
from tests.store.cluster import _RUN, Cluster

SIZES = (100, 70_000, (5 << 20) + 3)


@pytest.mark.skipif(bool(probe()), reason=f"extra: {probe()}")
def test_values_go_and_come_by_ucx():
    with Cluster(1, "64MiB", "--transports", "shm,ucx,tcp") as cluster:
        values = {f"k{size}": np.random.default_rng(size).bytes(size) for size in SIZES}
        with tanghulu.connect(cluster.address, transport="ucx") as writer:
            for key, value in values.items():
                writer.put(key, value)
        with tanghulu.connect(cluster.address, transport="ucx") as reader:
            for key, value in values.items():
                landing = reader.register(np.zeros(len(value) + 1, np.uint8))
                assert reader.get_into(key, landing) == len(value)
                assert bytes(landing.view(0, len(value))) == value
                assert reader.get(key).bytes() == value
            assert reader.remove("k100")
            with pytest.raises(ChunkNotFound):
                reader.get("k100")
        with tanghulu.connect(cluster.address) as other:
            assert other.get(f"k{SIZES[-1]}").bytes() == values[f"k{SIZES[-1]}"]


def test_a_node_that_offers_no_ucx():
    with Cluster(1, "64MiB") as cluster, tanghulu.connect(cluster.address, transport="ucx") as client:
        with pytest.raises(NodeUnavailable, match="ucx"):
            client.put("large", bytes(1 << 20))


@pytest.mark.skipif(not probe(), reason="NIXL is here")
def test_a_node_without_nixl_says_so():
    with Cluster(0) as cluster:
        command = [sys.executable, "-c", _RUN, "tanghulu.store.node.main", "--port", "0"]
        command += ["--master", cluster.address, "--transports", "shm,ucx,tcp"]
        node = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert node.returncode == 1
    assert "NIXL cannot be imported" in node.stderr
