"""Starting and stopping the servers of each store, on free ports of the loopback, with how long it takes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import environments
from .jsonlines import Worker, cpu_s

WORKER = Path(__file__).parent / "store_worker.py"
START_TIMEOUT_S = 30
_TANGHULU = "import importlib, sys; importlib.import_module(sys.argv.pop(1)).COMMAND()"


@dataclass
class Cluster:
    """Servers that run: how a client connects, and whose CPU time is the servers'."""

    store: str
    python: Path
    pids: list[int]
    #: From the first command to the moment when every server said that it serves.
    ready_s: float
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    def client(self, name: str, **more: Any) -> Worker:
        """A client in a process of its own, connected; ``more`` are the adapter's settings."""
        worker = Worker(self.python, WORKER, environments.logs() / f"{name}.log", self.environment, name)
        worker.call("open", store=self.store, **self.settings, **more)
        return worker

    def cpu_s(self) -> float:
        """CPU seconds of all servers so far."""
        return cpu_s(self.pids)


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str | Path], log: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A server whose output goes to ``log``, ended behind the block."""
    with (environments.logs() / log).open("wb") as output:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, **options)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def wait_for_port(port: int, child: subprocess.Popen[bytes], log: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Return when somebody listens there. Raises Missing."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until and child.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.002)
    raise environments.Missing(f"nothing listens on {port}, see {environments.logs() / log}")


# --- tanghulu


def _installed() -> dict[str, str]:
    """The environment of a process that finds its modules compiled, as those of an installed wheel are.

    Without it a process compiles our 200 modules anew where PYTHONDONTWRITEBYTECODE is set.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": str(environments.BENCH / "bytecode")}


@contextlib.contextmanager
def _tanghulu_process(module: str, *flags: str) -> Iterator[tuple[int, socket.socket]]:
    ours, theirs = socket.socketpair()
    fd = theirs.fileno()
    command = [sys.executable, "-c", _TANGHULU, module, *flags, "--log-level", "error", "--status-fd", str(fd)]
    with ours, running(command, f"{module}.log", pass_fds=[fd], env=_installed()) as child:
        theirs.close()
        yield child.pid, ours


def _ready(module: str, status: socket.socket) -> str:
    with status.makefile() as lines:
        for line in lines:
            event = json.loads(line)
            if event["event"] == "ready":
                return str(event["address"])
    raise environments.Missing(f"{module} did not start, see {environments.logs() / module}.log")


@contextlib.contextmanager
def tanghulu(segment_bytes: int) -> Iterator[Cluster]:
    """A master and a node, started together."""
    port = free_port()
    master, node = "tanghulu.store.master.main", "tanghulu.store.node.main"
    address = f"127.0.0.1:{port}"
    flags = ("--port", "0", "--master", address, "--memory", str(segment_bytes))
    begun = time.perf_counter()
    with _tanghulu_process(master, "--port", str(port)) as (master_pid, master_status):
        with _tanghulu_process(node, *flags) as (node_pid, node_status):
            _ready(master, master_status)
            _ready(node, node_status)
            took = time.perf_counter() - begun
            yield Cluster("tanghulu", Path(sys.executable), [master_pid, node_pid], took, {"master": address})


# --- Mooncake


@contextlib.contextmanager
def mooncake(segment_bytes: int) -> Iterator[Cluster]:
    """mooncake_master and a client in a process of its own that holds the memory."""
    python = environments.interpreter("mooncake")
    rpc, metadata, metrics = free_port(), free_port(), free_port()
    command = [
        environments.packages_folder("mooncake") / "mooncake" / "mooncake_master",
        f"--rpc_port={rpc}", "--rpc_address=127.0.0.1", f"--metrics_port={metrics}",
        "--enable_http_metadata_server=true", "--http_metadata_server_host=127.0.0.1",
        f"--http_metadata_server_port={metadata}",
    ]  # fmt: skip
    settings = {"host": "127.0.0.1", "metadata": f"http://127.0.0.1:{metadata}/metadata", "master": f"127.0.0.1:{rpc}"}
    environment = os.environ | {"GLOG_minloglevel": "2", "MC_LOG_LEVEL": "error"}
    begun = time.perf_counter()
    with running(command, "mooncake_master.log", env=environment) as child:
        wait_for_port(rpc, child, "mooncake_master.log")
        wait_for_port(metadata, child, "mooncake_master.log")
        log = environments.logs() / "mooncake_holder.log"
        holder = Worker(python, WORKER, log, environment, "mooncake holder")
        try:
            holder.call("open", store="mooncake", segment_bytes=segment_bytes, buffer_bytes=16 << 20, **settings)
            took = time.perf_counter() - begun
            yield Cluster("mooncake", python, [child.pid, holder.pid], took, settings, environment)
        finally:
            holder.close()


# --- redis


@contextlib.contextmanager
def redis(segment_bytes: int) -> Iterator[Cluster]:
    """redis-server without persistence, on a Unix socket."""
    python = environments.interpreter("redis")
    folder = Path(tempfile.mkdtemp(prefix="bench-redis-"))
    path, log = folder / "redis.sock", "redis-server.log"
    command = [
        "redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no",
        "--maxmemory", str(2 * segment_bytes), "--dir", folder,
    ]  # fmt: skip
    begun = time.perf_counter()
    try:
        with running(command, log) as child:
            until = time.monotonic() + START_TIMEOUT_S
            while not path.exists():
                if child.poll() is not None or time.monotonic() > until:
                    raise environments.Missing(f"redis-server did not start, see {environments.logs() / log}")
                time.sleep(0.002)
            yield Cluster("redis", python, [child.pid], time.perf_counter() - begun, {"path": str(path)})
    finally:
        shutil.rmtree(folder)


CLUSTERS = {"tanghulu": tanghulu, "mooncake": mooncake, "redis": redis}
