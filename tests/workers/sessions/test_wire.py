"""What messages say of other workers, as the engine gets it."""

from __future__ import annotations

import pytest

from tanghulu.runtime.process import host_id
from tanghulu.session.outputs import KvSource
from tanghulu.types import InstanceId
from tanghulu.workers.kv.peer_links import link_of


@pytest.mark.parametrize(("host", "path"), [(host_id(), "/run/w/worker.sock"), ("another", ""), ("", "")])
def test_a_unix_path_counts_on_its_own_host_alone(host: str, path: str) -> None:
    """Elsewhere the same path leads to another worker."""
    source = KvSource(InstanceId("w"), "10.0.0.7:7430", "/run/w/worker.sock", 5, 9, host)
    assert link_of(source) == f"10.0.0.7:7430|{path}"
