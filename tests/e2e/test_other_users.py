"""What another user of the machine can reach of a cluster: nothing that is kept in files, memory or Unix sockets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tanghulu.store.client import connect
from tests.e2e.cluster import LiveCluster, running_cluster

NOBODY = 65534
#: Runs as another user: for each path, what came of opening it, or of connecting to it.
TRIES = """
import json, os, socket, stat, sys
user = int(sys.argv[1])  # not by exec as that user, who may not even be allowed to run this Python
os.setgroups([]), os.setgid(user), os.setuid(user)
outcome = {}
for path in json.load(sys.stdin):
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX) as there:
                there.settimeout(5)
                there.connect(path)
                outcome[path] = "connected"
        else:
            with open(path, "rb") as file:
                file.read(1)
            outcome[path] = "read"
    except OSError as error:
        outcome[path] = type(error).__name__
print(json.dumps(outcome))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LiveCluster]:
    if os.getuid() != 0:
        pytest.skip("hardware: only root can become another user")
    flags = ("--engine", "mock", "--model", "mock", "--prefill", "1", "--decode", "1", "--node-ssd", "64MiB")
    # A folder that all may enter, unlike pytest's own: what keeps others out has to be the cluster's doing.
    with tempfile.TemporaryDirectory(prefix="th-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as environment:
        os.chmod(folder, 0o755)
        environment.setenv("TMPDIR", folder)
        with running_cluster(Path(folder) / "new" / "state", *flags) as live:
            yield live


def _tried(paths: list[str]) -> dict[str, str]:
    command = [sys.executable, "-I", "-c", TRIES, str(NOBODY)]
    run = subprocess.run(command, input=json.dumps(paths), capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    outcome: dict[str, str] = json.loads(run.stdout)
    return outcome


def _of_the_cluster(cluster: LiveCluster) -> tuple[set[str], set[str]]:
    """(files, Unix sockets) that its processes have open, memory files by way of /proc included."""
    files, sockets = set[str](), set[str]()
    for process in [psutil.Process(cluster.process.pid), *psutil.Process(cluster.process.pid).children(recursive=True)]:
        descriptors = Path(f"/proc/{process.pid}/fd")
        for name in descriptors.iterdir():
            target = os.readlink(name)
            if "tanghulu" in target and "memfd" in target:
                files.add(str(name))
        # Abstract names are as open as the TCP ports beside which they stand: who calls there has to show a token.
        sockets |= {each.laddr for each in process.net_connections("unix") if each.laddr.startswith("/")}
        files |= {f"/proc/{process.pid}/mem", f"/proc/{process.pid}/environ"}
    files |= {str(path) for path in Path("/dev/shm").glob("tanghulu*")}
    return files, sockets


@pytest.mark.slow
def test_another_user_reads_nothing(cluster: LiveCluster) -> None:
    cluster.generate("a secret of mine " * 200, 4)
    with connect(cluster.master) as store:
        store.put("secret", os.urandom(1 << 16))
        with store.get("secret"):
            files, sockets = _of_the_cluster(cluster)
            files |= {
                str(path) for path in cluster.state_dir.rglob("*") if path.is_file() and path.name != "up.log"
            }  # the last is this test's
            assert any("/fd/" in path for path in files)
            assert any(path.endswith(".tier") for path in files)
            assert any(path.endswith("segment.sock") for path in sockets)
            tried = _tried(sorted(files | sockets))
    assert {path: outcome for path, outcome in tried.items() if outcome in ("read", "connected")} == {}
    assert _tried([__file__, "/etc/hostname"])["/etc/hostname"] == "read"
