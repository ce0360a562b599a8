"""Holders that have a chunk in memory are asked before those that have it on their SSD; those of this host first."""

from __future__ import annotations

from pathlib import Path

import pytest

import tanghulu
from tanghulu.store.client.logic import directory_client, messages
from tanghulu.store.client.logic.effects import MASTER, PeerId
from tanghulu.store.protocol.messages import LocateRequest
from tanghulu.store.protocol.methods import LOCATE
from tests.store.cluster import Cluster, eventually

MIB = 1 << 20
A, B, C, D = map(PeerId, "abcd")


@pytest.mark.parametrize("key", [f"k{n}" for n in range(8)])
def test_near_before_warm_before_cold(key: str) -> None:
    order = directory_client._in_order(key, (A, B, C, D), 2, frozenset({B, D}))
    assert order[:3] == (B, D, A)
    assert directory_client._in_order(key, (A, B, C, D), 2, frozenset())[:2] in ((A, B), (B, A))
    assert set(directory_client._in_order(key, (A, B), 0, frozenset())) == {A, B}


def test_equals_share_the_reads() -> None:
    firsts = {directory_client._in_order(f"k{n}", (A, B, C), 3, frozenset())[0] for n in range(64)}
    assert firsts == {A, B, C}


@pytest.mark.slow
def test_a_replica_in_memory_serves_what_another_node_has_on_its_ssd(tmp_path: Path) -> None:
    with Cluster(1, "16MiB") as cluster:
        flags = ("--ssd-path", str(tmp_path / "tier"), "--ssd-size", "64MiB")
        tiered = cluster.add_node("16MiB", *flags)
        warm = cluster.nodes[0]
        with tanghulu.connect(cluster.address, transport="tcp") as client:
            eventually(lambda: len(client.nodes()) == 2)
            keys = [f"k{n}" for n in range(6)]
            for key in keys:
                assert client.put(key, bytes(MIB), replicas=2).num_replicas == 2
            assert client.evict(tiered.name, keys).num_chunks == 6

            def told() -> bool:
                (answer,) = client._driver._call([(MASTER, LOCATE.call(LocateRequest(keys, False)))], 5.0)
                return [num_warm for _, num_warm in messages.locations(answer)[0]] == [1] * len(keys)

            eventually(told)
            before = warm.metric("tanghulu_node_hits_total")
            with tanghulu.connect(cluster.address, transport="tcp") as reader:  # both are on its host
                assert all(chunk.bytes() == bytes(MIB) for chunk in reader.get_many(keys))  # by the master's answer
            assert warm.metric("tanghulu_node_hits_total") == before + len(keys)
            assert tiered.metric("tanghulu_node_chunks") == 0, "nothing had to come up"
