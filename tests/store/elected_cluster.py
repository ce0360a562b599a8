"""A real etcd of one member, and masters that elect their leader in it."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

import pytest

from tanghulu.discovery.masters import MasterFinder
from tanghulu.errors import MasterUnavailable
from tests.free_ports import free_port
from tests.store.cluster import Cluster, Process, eventually

#: etcd grants no lease shorter than one and a half election time-outs.
_FAST = ("--heartbeat-interval", "20", "--election-timeout", "200", "--log-level", "error")


class EtcdServer:
    """A context manager; ``address`` answers once it is entered."""

    def __init__(self) -> None:
        if shutil.which("etcd") is None:
            pytest.skip("etcd is missing: apt-get install etcd-server")
        self.address = f"127.0.0.1:{free_port()}"

    def __enter__(self) -> EtcdServer:
        self._directory = tempfile.mkdtemp(prefix="th-etcd-")
        url, peer = f"http://{self.address}", f"http://127.0.0.1:{free_port()}"
        urls = ["--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", peer]
        self.popen = subprocess.Popen(
            ["etcd", "--data-dir", self._directory, *urls, *_FAST],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        eventually(self._answers)
        return self

    def _answers(self) -> bool:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            with urllib.request.urlopen(f"http://{self.address}/health", timeout=5) as answer:
                return b'"true"' in answer.read()
        return False

    def __exit__(self, *error: object) -> None:
        self.popen.kill()
        self.popen.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


class ElectedCluster(Cluster):
    """Several masters with their etcd, and nodes that find the leader; ``address`` lists all masters."""

    def __init__(
        self, num_masters: int = 3, num_nodes: int = 2, memory: str = "64MiB", ttl_s: float = 2.0, *flags: str
    ) -> None:
        """``flags`` are for masters and nodes."""
        self.flags = flags
        self.etcd = EtcdServer().__enter__()
        self.ttl_s = ttl_s
        self.ports = [free_port() for _ in range(num_masters)]
        self.masters = [self._start_master(port) for port in self.ports]
        self.finder_spec = f"etcd://{self.etcd.address}"
        self.node_flags = ("--debug", "checks=true", *flags)
        self.nodes = []
        self.leader()
        for index in range(num_nodes):
            self.add_node(memory, *(("--master", self.finder_spec) if index % 2 else ()))

    def _start_master(self, port: int) -> Process:
        flags = ("--port", str(port), "--etcd", self.etcd.address, "--election-ttl-s", str(self.ttl_s))
        return Process("tanghulu.store.master.main", *flags, *self.flags)

    @property
    def address(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def leader(self, other_than: str = "", deadline_s: float = 30.0) -> Process:
        """The master that etcd names, once it is another than that at the given address and says so itself."""
        until = time.monotonic() + deadline_s
        while time.monotonic() < until:
            with contextlib.suppress(MasterUnavailable):
                found = str(MasterFinder(self.finder_spec).find_blocking())
                master = next(m for m in self.masters if m.address == found)
                if found != other_than and master.metric("tanghulu_master_leading") == 1.0:
                    return master
            time.sleep(0.02)
        raise AssertionError(f"no leader other than {other_than!r} after {deadline_s} s")

    def replace(self, master: Process) -> None:
        """Start a killed master again at its port."""
        port = int(master.address.rpartition(":")[2])
        self.masters[self.masters.index(master)] = self._start_master(port)

    def __exit__(self, *error: object) -> None:
        try:
            for process in [*self.nodes, *self.masters]:
                if process.alive:
                    with contextlib.suppress(ProcessLookupError):
                        process.popen.send_signal(signal.SIGCONT)
                        process.stop()
        finally:
            self.etcd.__exit__()
