"""`tanghulu up --store-http-port`: the store over HTTP beside the rest, restarted like the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster import eventually, running_cluster
from tests.free_ports import free_port

MOCK = ("--engine", "mock", "--model", "mock", "--prefill", "0", "--decode", "0")


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
def test_the_store_is_served_and_said_so(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with running_cluster(tmp_path / "c", *MOCK, "--store-http-port", url.rpartition(":")[2]) as cluster:
        assert f"curl {url}/v1/stat" in (tmp_path / "c" / "up.log").read_text()
        assert "gateway" in {entry["role"] for entry in cluster.entries()}
        assert httpx.put(f"{url}/v1/values/k", content=b"x", trust_env=False).status_code == 201
        cluster.wait_restarted("gateway", cluster.kill("gateway"))
        eventually(lambda: _ready(url), what="it is back where it was")
        assert httpx.get(f"{url}/v1/values/k", trust_env=False).content == b"x"
        assert cluster.stop() == 0


def test_it_is_not_opened_to_everybody(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tanghulu", "up", "--state-dir", str(tmp_path)]
    command += ["--host", "0.0.0.0", "--store-http-port", "7480"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7
    assert "--require-token" in done.stderr
