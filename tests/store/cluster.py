"""Real master and node processes for the store's tests, ready when the constructor returns."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from tanghulu.runtime.scraping import metrics_url
from tests.free_ports import free_port

START_DEADLINE_S = 60.0
_RUN = "import importlib, sys; importlib.import_module(sys.argv.pop(1)).COMMAND()"


class Process:
    """One `tanghulu master` or `tanghulu node`; its status stream tells when it is ready.

    ``source``: the checkout to run it from, if it is another one than this.
    """

    def __init__(self, module: str, *flags: str, source: Path | None = None) -> None:
        self.run_dir = Path(tempfile.mkdtemp(prefix="th-"))
        self.status, theirs = socket.socketpair()
        self.status.settimeout(START_DEADLINE_S)
        fd = theirs.fileno()
        command = [sys.executable, "-c", _RUN, module, *flags, "--run-dir", str(self.run_dir), "--status-fd", str(fd)]
        self.log = (self.run_dir / "log").open("wb")
        env = None if source is None else {**os.environ, "PYTHONPATH": str(source / "src")}
        self.popen = subprocess.Popen(command, pass_fds=[fd], stdout=self.log, stderr=self.log, env=env)
        theirs.close()
        try:
            ready = json.loads(self.status.makefile().readline() or "{}")
            assert ready.get("event") == "ready", f"{module} did not start: {ready} {self.log_text()}"
        except BaseException:  # an interrupt, too: the process would stay behind; all is raised on
            self.kill()
            raise
        self.name: str = ready["name"]
        self.address: str = ready["address"]
        self.metrics_address: str = ready["metrics_address"]
        self.token = os.environ.get("TANGHULU_TOKEN", "")  # which it shows itself, and which shows its metrics

    def log_text(self) -> str:
        return (self.run_dir / "log").read_text()

    def kill(self) -> None:
        """SIGKILL: no good-byes."""
        self.popen.kill()
        self._clean_up()

    def stop(self) -> None:
        """SIGTERM, and the exit code must be 0."""
        self.popen.send_signal(signal.SIGTERM)
        self._clean_up()
        assert self.popen.returncode == 0

    def _clean_up(self) -> None:
        self.popen.wait(START_DEADLINE_S)
        self.status.close()
        self.log.close()
        shutil.rmtree(self.run_dir, ignore_errors=True)

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def metric(self, name: str, **labels: str) -> float:
        """A sample from GET /metrics."""
        wanted = name + ("{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "}" if labels else "")
        shown = {"authorization": f"Bearer {self.token}"} if self.token else {}
        with urllib.request.urlopen(urllib.request.Request(metrics_url(self.metrics_address), headers=shown)) as answer:
            for line in answer.read().decode().splitlines():
                if line.rpartition(" ")[0] == wanted:
                    return float(line.rpartition(" ")[2])
        raise KeyError(wanted)


class Cluster:
    """A master and nodes; a context manager. ``checked`` nodes assert their invariants all the time: O(chunks)."""

    def __init__(self, num_nodes: int = 1, memory: str = "256MiB", *node_flags: str, checked: bool = True) -> None:
        self.node_flags = (*node_flags, "--debug", "checks=true") if checked else node_flags
        self.nodes: list[Process] = []
        self.masters = [Process("tanghulu.store.master.main", "--port", str(free_port()))]
        for _ in range(num_nodes):
            self.add_node(memory)

    @property
    def master(self) -> Process:
        return self.masters[-1]

    @property
    def address(self) -> str:
        return self.master.address

    def add_node(self, memory: str = "256MiB", *flags: str) -> Process:
        node = Process(
            "tanghulu.store.node.main",
            *("--port", "0", "--master", self.address, "--memory", memory),
            *self.node_flags,
            *flags,
        )
        self.nodes.append(node)
        return node

    def complete(self) -> None:
        """Wait until the master takes what it knows for everything, as it does a second after its start."""
        eventually(lambda: self.master.metric("tanghulu_master_rebuilding") == 0)

    def restart_master(self) -> None:
        """Kill the master and start another one at the same address."""
        port = self.address.rpartition(":")[2]
        self.master.kill()
        self.masters.append(Process("tanghulu.store.master.main", "--port", port))

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        for process in [*self.nodes, self.masters[-1]]:
            if process.alive:
                with contextlib.suppress(ProcessLookupError):
                    process.stop()


def num_fds() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def eventually(condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    """Wait for another process; the pause only bounds how often it is asked."""
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)
