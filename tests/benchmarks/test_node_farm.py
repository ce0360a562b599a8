"""Nodes of a farm hold generated keys as nodes hold what clients put: masters know them, and clients read them."""

from __future__ import annotations

import pytest

import tanghulu
from benchmarks.master.node_farm import Farm, key_of, value_of
from tests.store.cluster import Cluster, eventually

pytestmark = pytest.mark.slow
KEYS = 600


def test_generated_keys_of_many_nodes_in_a_process_are_known_again_after_the_master_is_killed() -> None:
    with Cluster(0) as cluster:
        flags = ("--num-nodes", "3", "--first-key", "5", "--keys-per-node", str(KEYS // 3), "--memory", "4MiB")
        farm = Farm("--master", cluster.address, "--port", "0", *flags)
        try:
            farm.wait("ready")
            eventually(lambda: cluster.master.metric("tanghulu_master_keys") == KEYS)
            cluster.restart_master()
            with tanghulu.connect(cluster.address, deadline_s=30.0, transport="tcp") as client:
                assert client.exists_many([key_of(n) for n in range(4, KEYS + 6)]) == [False, *[True] * KEYS, False]
                assert len({info.nodes for info in map(client.stat, map(key_of, (5, KEYS // 2, KEYS)))}) == 3
                for number in (5, KEYS // 2, KEYS + 4):
                    with client.get(key_of(number)) as chunk:
                        assert chunk.bytes() == value_of(number)
        finally:
            farm.stop()
