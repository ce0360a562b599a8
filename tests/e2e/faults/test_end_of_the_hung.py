"""A worker whose engine hangs ends when it is told to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.cluster import eventually
from tests.e2e.faults.parts import Part, Together, Worker
from tests.e2e.faults.standing import MOCK


@pytest.mark.slow
def test_a_worker_whose_engine_hangs_ends_on_sigterm(tmp_path: Path) -> None:
    master = Part(tmp_path, "master", "master")
    worker = Worker(tmp_path, "worker", "worker", "--master", master.address, *MOCK, "--grace-s", "1")
    with Together(master), Together(worker):
        worker.hang()
        worker.terminate()
        eventually(lambda: "worker.engine_hung" in worker.log(), 60, "it gives up its engine")
        assert worker.wait_ended() == 1
        assert not worker.run_dir.exists()
