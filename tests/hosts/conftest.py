"""Three hosts and the cluster that is spread over them, as fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.cluster import SpreadCluster
from tests.hosts.lan import Lan, missing


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpreadCluster]:
    reason = missing()
    if reason:
        pytest.skip(f"hardware: {reason}")
    with Lan("head", "left", "right") as lan, SpreadCluster(lan, tmp_path_factory.mktemp("hosts")) as cluster:
        yield cluster
