"""Nodes and clients in namespaces as containers of one machine have them: where memory is mapped, and whose it is.

Each container has a PID and a mount namespace of its own, as compose and Kubernetes make them; deploy/ lets them share
the IPC namespace and the directory of the Unix sockets.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tanghulu
from tanghulu.rpc.sockets import inode_of_process
from tanghulu.store.node.rpc.sessions import OTHER_NAMESPACE
from tests.free_ports import free_port
from tests.hosts.lan import child_of
from tests.store.cluster import Process

pytestmark = [pytest.mark.slow, pytest.mark.netns, pytest.mark.timeout(300)]

MIB = 1 << 20
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc")
IPC_OF_ITS_OWN = ("unshare", "--ipc")
#: Puts and gets values, and says whether it did so in mapped memory.
CLIENT = """
import json, sys, tanghulu
with tanghulu.connect(sys.argv[1]) as store:
    for node in store.nodes():
        store.put(f"from {node.id}", b"c" * (1 << 20), prefer_node=node.id)
    found = {}
    for key in sys.argv[2:]:
        with store.get(key) as chunk:
            found[key] = bytes(memoryview(chunk.view)).count(b"x")
    with open("/proc/self/maps") as maps:
        print(json.dumps({"mapped": "memfd:tanghulu-store" in maps.read(), "found": found}))
"""


def _missing() -> str:
    tried = subprocess.run([*CONTAINER, "true"], check=False, capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"namespaces need root and unshare: {tried.stderr.strip()}"


@pytest.fixture
def master() -> Iterator[str]:
    if reason := _missing():
        pytest.skip(f"hardware: {reason}")
    process = Process("tanghulu.store.master.main", "--port", str(free_port()))
    yield process.address
    process.stop()


def _command(*parts: str) -> list[str]:
    return [*parts, sys.executable]


@contextlib.contextmanager
def node(
    master: str, run_dir: Path, *, wrapped: tuple[str, ...] = CONTAINER, first: str = ""
) -> Iterator[tuple[int, Path]]:
    """A node in a container, in which the shell runs ``first``; gives its pid out here and its log."""
    words = ["-m", "tanghulu", "node", "--master", master, "--port", str(free_port()), "--memory", "256MiB"]
    words += ["--run-dir", str(run_dir)]
    log = run_dir.with_suffix(".log")
    known = _num_nodes(master)
    with log.open("w") as out:
        shell = ["sh", "-c", f"{first or 'true'} && exec {shlex.join([sys.executable, *words])}"]
        popen = subprocess.Popen([*wrapped, *shell], stdout=out, stderr=out)
    try:
        until_s = time.monotonic() + 60
        while _num_nodes(master) == known:
            assert popen.poll() is None, log.read_text()
            assert time.monotonic() < until_s, log.read_text()
            time.sleep(0.05)
        yield child_of(popen.pid) if wrapped else popen.pid, log
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child_of(popen.pid) or popen.pid, signal.SIGTERM)
        popen.wait(60)


def _num_nodes(master: str) -> int:
    with tanghulu.connect(master) as store:
        return len(store.nodes())


def client(master: str, *keys: str, wrapped: tuple[str, ...] = CONTAINER, first: str = "") -> dict:
    shell = ["sh", "-c", f"{first or 'true'} && exec {shlex.join([sys.executable, '-c', CLIENT, master, *keys])}"]
    done = subprocess.run([*wrapped, *shell], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def fill(master: str, *keys: str) -> None:
    with tanghulu.connect(master, transport="tcp") as store:
        nodes = [one.id for one in store.nodes()]
        for key, where in zip(keys, nodes, strict=True):
            store.put(key, b"x" * MIB, prefer_node=where)


def is_recognised() -> bool:
    """Whether the kernel tells processes of other PID namespaces apart (Linux 6.9)."""
    pidfd = os.pidfd_open(os.getpid())
    try:
        return inode_of_process(pidfd) != 0
    finally:
        os.close(pidfd)


@pytest.mark.parametrize("of_node", [(), CONTAINER], ids=["node outside", "node in a container"])
@pytest.mark.parametrize("of_client", [(), CONTAINER], ids=["client outside", "client in a container"])
def test_memory_is_mapped_between_containers_that_share_ipc_and_sockets(
    master: str, tmp_path: Path, of_node: tuple[str, ...], of_client: tuple[str, ...]
) -> None:
    with node(master, tmp_path / "node", wrapped=of_node) as (_, log):
        fill(master, "k")
        told = client(master, "k", wrapped=of_client)
        assert told["found"] == {"k": MIB}
        apart = bool(of_client) or bool(of_node)
        assert told["mapped"] is (is_recognised() or not apart)
        assert (OTHER_NAMESPACE in log.read_text()) is not told["mapped"]


def test_without_a_shared_ipc_namespace_values_are_copied(master: str, tmp_path: Path) -> None:
    with node(master, tmp_path / "node"):
        fill(master, "k")
        told = client(master, "k", wrapped=(*IPC_OF_ITS_OWN, *CONTAINER))
        assert told == {"mapped": False, "found": {"k": MIB}}


def test_two_nodes_with_one_path_for_their_sockets_are_both_reached(master: str, tmp_path: Path) -> None:
    """Each container has a directory of its own at that path; a client in one of them sees that one's node there."""
    for name in ("run", "a", "b"):
        (tmp_path / name).mkdir()
    own = {name: f"mount --bind {tmp_path / name} {tmp_path / 'run'}" for name in "ab"}
    run_dir = tmp_path / "run" / "node"
    (tmp_path / "run" / "x").touch()  # the logs lie beside the directory that is mounted over
    with node(master, run_dir, first=own["a"]), node(master, run_dir, first=own["b"]):
        fill(master, "k0", "k1")
        for name in "ab":
            assert client(master, "k0", "k1", first=own[name])["found"] == {"k0": MIB, "k1": MIB}


def test_a_node_is_charged_for_what_it_holds(master: str, tmp_path: Path) -> None:
    with node(master, tmp_path / "node", wrapped=()) as (pid, _):
        with tanghulu.connect(master) as store:
            for number in range(32):
                store.put(f"k{number}", bytes(2 * MIB))
        status = Path(f"/proc/{pid}/status").read_text()
        shared_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssShmem"))
        assert shared_kib << 10 >= 64 * MIB, "its client touched pages first, and pays for them"


def test_a_small_dev_shm_is_no_bound(master: str, tmp_path: Path) -> None:
    small = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    with node(master, tmp_path / "node", first=small), tanghulu.connect(master) as store:
        for number in range(3):
            store.put(f"k{number}", bytes([number]) * (50 * MIB))
        for number in range(3):
            with store.get(f"k{number}") as chunk:
                assert chunk.view[-1] == number
