"""The soak for two minutes: a node is killed, another one stopped. A person runs it for an hour (benchmarks/store)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_whole_cluster_for_some_minutes() -> None:
    command = [sys.executable, "-m", "benchmarks.store.soak", "--minutes", "2", "--no-keep", "--lenient"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-3000:]
