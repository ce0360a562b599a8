"""A store for the tests of this folder, and engines' environments with ``mooncake.store`` of ours in front."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tanghulu.compat.mooncake import __file__ as package
from tanghulu.compat.mooncake.store import MooncakeDistributedStore
from tests.store.cluster import Cluster

ROOT = Path(__file__).parents[3]
ENVIRONMENTS = Path.home() / ".cache" / "tanghulu" / "engines"
SHIM = str(Path(package).parent / "shim")
DEADLINE_S = 300


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with Cluster(1) as cluster:
        yield cluster


@pytest.fixture
def arguments(cluster: Cluster) -> dict[str, Any]:
    """The arguments of ``setup``."""
    return {
        "local_hostname": "localhost",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": 0,
        "local_buffer_size": 16 << 20,
        "protocol": "tcp",
        "rdma_devices": "",
        "master_server_addr": cluster.address,
    }


@pytest.fixture
def store(arguments: dict[str, Any]) -> Iterator[MooncakeDistributedStore]:
    store = MooncakeDistributedStore()
    assert store.setup(**arguments) == 0
    yield store
    assert store.remove_all() >= 0
    store.close()


def run_in(engine: str, script: Path, *arguments: str, ours: bool = True, **variables: str) -> str:
    """Run a script in an engine's environment, by default with our ``mooncake``; return its standard output."""
    python = ENVIRONMENTS / engine / "bin" / "python"
    if not python.exists():
        pytest.skip(f"extra: the environment is missing; tools/engine_venv.py {engine} builds it")
    folders = [SHIM, str(ROOT / "src")] if ours else []
    env = {**os.environ, "PYTHONPATH": ":".join(folders), **variables}
    done = subprocess.run(
        [python, script, *arguments], env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout
