"""What messages say of other workers, as the engine gets it."""

from __future__ import annotations

import pytest

from tanghulu.protos import session_pb2
from tanghulu.runtime.process import host_id
from tanghulu.workers.sessions.wire import peer_of, split_instance


@pytest.mark.parametrize(("host", "path"), [(host_id(), "/run/w/worker.sock"), ("another", ""), ("", "")])
def test_a_unix_path_counts_on_its_own_host_alone(host: str, path: str) -> None:
    """Elsewhere the same path leads to another worker."""
    source = session_pb2.KvSource(address="10.0.0.7:7430", unix_path="/run/w/worker.sock", export_id=5, host_id=host)
    assert split_instance(peer_of(source).instance) == ("10.0.0.7:7430", path)
