from __future__ import annotations

from collections.abc import Iterator

import pytest

import tanghulu
from tanghulu.store.client import Client
from tests.store.cluster import Cluster


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
        client.remove_matching("^")
