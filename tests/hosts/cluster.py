"""A cluster with its processes on several hosts, at the same ports and in directories of the same names."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import httpx

from tests.e2e.faults.parts import Part, Together
from tests.e2e.faults.standing import MOCK, until
from tests.hosts.lan import Host, Lan, child_of

ETCD_PORT, MASTER_PORT, NODE_PORT, WORKER_PORT, HTTP_PORT = 2379, 7400, 7410, 7430, 8000


class HostedPart(Part):
    """A process on ``host``, at whose own address the others reach it."""

    def __init__(self, host: Host, folder: Path, name: str, command: str, *flags: str, port: int) -> None:
        super().__init__(folder, name, command, "--host", "0.0.0.0", *flags, port=port)
        self.host = host
        self.run_dir.rmdir()
        self.run_dir = Path("/tmp/run") / ("worker" if command in ("prefill", "decode") else command)

    @property
    def program(self) -> list[str]:
        return [*self.host.inside, *super().program]

    @property
    def known_host(self) -> str:
        return self.host.address

    @property
    def pid(self) -> int:
        """Of the process itself, behind the one that has entered the host."""
        assert self.popen is not None
        until_s = time.monotonic() + 30
        while not (pid := child_of(self.popen.pid)) and self.alive:
            assert time.monotonic() < until_s, f"{self} is not on its host"
        return pid


class Etcd:
    """An etcd on ``host``."""

    def __init__(self, host: Host) -> None:
        self.host, self.address = host, f"{host.address}:{ETCD_PORT}"

    def __enter__(self) -> Self:
        import subprocess

        url = f"http://{self.address}"
        command = ["etcd", "--data-dir", "/tmp/etcd", "--listen-client-urls", url, "--advertise-client-urls", url]
        command += ["--heartbeat-interval", "20", "--election-timeout", "200", "--log-level", "error"]
        self._popen = subprocess.Popen(
            (*self.host.inside, *command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child_of(self._popen.pid) or self._popen.pid, signal.SIGKILL)
        self._popen.wait()


class SpreadCluster:
    """etcd, a master and a conductor on ``head``; a node and a worker on ``left`` (prefill) and ``right`` (decode)."""

    def __init__(self, lan: Lan, folder: Path) -> None:
        self.lan, self.folder = lan, folder
        head, left, right = (lan.hosts[name] for name in ("head", "left", "right"))
        self.etcd = Etcd(head)
        self.finder = f"etcd://{self.etcd.address}"
        elected = ("--etcd", self.etcd.address, "--election-ttl-s", "2")
        self.master = self._part(head, "master", *elected, port=MASTER_PORT)
        memory = ("--memory", "64MiB")
        self.nodes = [self._part(host, "node", *self._at, *memory, port=NODE_PORT) for host in (left, right)]
        engine = (*self._at, *MOCK, "--debug", "mock_speedup=20", "--grace-s", "2")
        self.prefill = self._part(left, "prefill", *engine, port=WORKER_PORT)
        self.decode = self._part(right, "decode", *engine, port=WORKER_PORT)
        self.conductor = self._part(head, "conductor", *self._at, "--notice-s", "0", port=HTTP_PORT)
        self._ends = contextlib.ExitStack()

    @property
    def _at(self) -> tuple[str, ...]:
        return ("--master", self.finder)

    def _part(self, host: Host, command: str, *flags: str, port: int) -> HostedPart:
        return HostedPart(host, self.folder, f"{host.name}-{command}", command, *flags, port=port)

    @property
    def workers(self) -> list[HostedPart]:
        return [self.prefill, self.decode]

    @property
    def parts(self) -> list[HostedPart]:
        return [self.master, *self.nodes, *self.workers, self.conductor]

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.etcd)
            stack.enter_context(Together(*self.parts))
            self._ends = stack.pop_all()
        self.run(self.whole())
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.close()

    def run(self, work: Any) -> Any:
        """Run a coroutine on the bridge."""
        return self.lan.run(work)

    def logs(self) -> str:
        return "\n".join(part.log() for part in self.parts)

    async def whole(self) -> None:
        """Wait until the conductor is connected to all workers and has nothing under way, and all parts are known.

        A node whose host was out of reach for long has left the cluster, and comes back by itself.
        """
        async with httpx.AsyncClient(timeout=30, trust_env=False) as http:

            async def is_whole() -> bool:
                info = (await http.get(f"{self.conductor.url}/server_info")).json()
                connected = {each["id"] for each in info["workers"] if each["connected"]}
                return not info["num_requests"] and connected == {worker.id for worker in self.workers}

            await until(is_whole, what="all workers are connected, nothing is under way")

        async def is_known() -> bool:
            return {part.id for part in self.parts if part is not self.master} <= await asyncio.to_thread(self.known)

        await until(is_known, what="all parts are known")

    def known(self) -> set[str]:
        """The ids of the parts that are registered, as the command line tells them."""
        words = (*self.lan.hosts["head"].inside, sys.executable, "-m", "tanghulu", "status", "--master", self.finder)
        done = subprocess.run((*words, "--json"), check=False, capture_output=True, text=True, timeout=60)
        return {one["id"] for one in json.loads(done.stdout)["parts"]} if done.stdout else set()  # 1 if one is missing

    async def metric(self, part: Part, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry ``labels``."""
        async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
            lines = (await http.get(part.metrics_url)).text.splitlines()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = [line for line in lines if line.startswith((f"{name} ", name + "{")) and all(w in line for w in wanted)]
        return sum(float(line.rpartition(" ")[2]) for line in found)
