from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from store_cluster import Cluster

import tanghulu
from tanghulu.store.client import Client


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """One master, one node of 256 MiB; for tests that leave both alive."""
    with Cluster(1) as cluster:
        yield cluster
        for process in [*cluster.nodes, cluster.master]:
            assert process.alive, process.log_text()


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with tanghulu.connect(cluster.address) as client:
        yield client
        client.remove_matching("")


def eventually(condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
    """Wait for another process; the pause only bounds how often it is asked."""
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)
