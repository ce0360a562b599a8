"""How long puts waited for room is told by a running node, and how that ended."""

from __future__ import annotations

import threading
import time

import pytest

import tanghulu
from tanghulu.errors import StoreFull
from tests.store.cluster import Cluster, eventually

MIB = 1 << 20


def test_waits_for_leases_are_timed_by_their_end() -> None:
    with Cluster(1, "16MiB") as cluster, tanghulu.connect(cluster.address) as reader:
        node = cluster.nodes[0]

        def waits(outcome: str, part: str = "count") -> float:
            return node.metric(f"tanghulu_node_lease_wait_seconds_{part}", outcome=outcome)

        assert [waits(outcome) for outcome in ("served", "in_vain", "refused")] == [0, 0, 0]

        for number in range(6):
            reader.put(f"held/{number}", bytes(MIB))
        held = [reader.get(f"held/{number}") for number in range(6)]
        with tanghulu.connect(cluster.address, deadline_s=1.0) as writer:
            began_s = time.monotonic()
            with pytest.raises(StoreFull):
                writer.put("late", bytes(12 * MIB))
        eventually(lambda: waits("in_vain") == 1)
        assert 0.2 < waits("in_vain", "sum") < time.monotonic() - began_s
        with tanghulu.connect(cluster.address, deadline_s=20) as writer:
            putting = threading.Thread(target=writer.put, args=("patient", bytes(12 * MIB)))
            putting.start()
            eventually(lambda: node.metric("tanghulu_node_waiting_puts") == 1)
            for chunk in held:
                chunk.close()
            putting.join(20)
            assert not putting.is_alive()
            assert writer.exists("patient")
        assert waits("served") == 1
        assert node.metric("tanghulu_node_lease_waits_total") == 2
