"""An upgrade between two releases of one version of the protocol: every process is replaced, under load.

Another tree under heavy load: ``benchmarks/store/upgrade.py``.
"""

from __future__ import annotations

import itertools

import pytest

import tanghulu
from tanghulu.errors import MasterUnavailable
from tanghulu.store.admin import orders
from tanghulu.store.admin.orders import perform
from tests.store.cluster import Cluster, eventually
from tests.store.fault_tools import Background

pytestmark = pytest.mark.slow

VALUE = b"value" * 1000


def test_no_request_fails_and_nothing_is_lost_while_every_process_is_replaced() -> None:
    with Cluster(2, "64MiB") as cluster, tanghulu.connect(cluster.address, transport="tcp", deadline_s=30) as client:
        cluster.complete()
        kept = [f"kept/{n}" for n in range(20)]
        assert all(each.ok for each in client.put_many([(key, VALUE) for key in kept]))
        numbers = itertools.count()

        def work() -> None:
            key = f"passing/{next(numbers)}"
            client.put(key, VALUE)
            with client.get(key) as chunk:
                assert chunk == VALUE
            assert client.exists_many([kept[0], "nobody's"]) == [True, False]
            client.remove(key)

        with Background(work, (MasterUnavailable,)) as load:
            cluster.restart_master()
            cluster.complete()
            for _ in range(2):
                old = cluster.nodes.pop(0)
                with tanghulu.connect(cluster.address, deadline_s=30) as operator:
                    perform(orders.drain, operator, old.name, wait=True)
                old.stop()
                cluster.add_node("64MiB")
                done = load.num_done
                eventually(lambda done=done: load.num_done > done or bool(load.errors))  # type: ignore[misc]
        assert not load.errors
        for key in kept:
            with client.get(key) as chunk:
                assert chunk == VALUE
