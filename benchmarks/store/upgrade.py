"""A cluster of another version, upgraded process by process to this one under load: no request may fail.

    git worktree add /tmp/before 4e1ed2c
    python -m benchmarks.store.upgrade --old /tmp/before [--etcd] [--logs DIRECTORY]

Masters, nodes and clients are real processes. Three nodes and four clients, two of them of this version from the
beginning (see ``upgrade_load``), work all the time while every other process is replaced, in the order that
docs/guides/upgrade.md asks of operators: the master, or with ``--etcd`` two of them, first the one that follows; then
each node, drained first; then the clients. The two masters share the keys as soon as no node is of the version before,
while clients are. In the end all keys that were kept are read. Prints JSON; the exit code is 1 if
one request failed, by a typed error, by wrong bytes, or by calling a key missing that is there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import tanghulu
from benchmarks.store import upgrade_load
from tanghulu.store.admin import orders
from tanghulu.store.admin.orders import perform
from tests.free_ports import free_port
from tests.store.cluster import Process, eventually
from tests.store.elected_cluster import EtcdServer

THIS = Path(__file__).parents[2]
LOAD = Path(upgrade_load.__file__)
NUM_NODES = 3
NODE_MEMORY = "1GiB"
#: No step takes longer.
STEP_S = 120.0


class LoadProcess:
    """One client process of the given version."""

    def __init__(self, source: Path, master: str, name: str, directory: Path, threads: int) -> None:
        self.name = name
        flags = ["--master", master, "--name", name, "--directory", str(directory), "--threads", str(threads)]
        self._popen = subprocess.Popen(
            [sys.executable, "-P", str(LOAD), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(source / "src")},
        )
        assert self._popen.stdout is not None
        assert self._popen.stdout.readline() == "ready\n", f"client {name} did not start"

    def stop(self) -> dict[str, Any]:
        """End it in good order; returns what it tells."""
        printed, _ = self._popen.communicate(timeout=STEP_S)
        result: dict[str, Any] = json.loads(printed)
        return result

    def kill(self) -> None:
        if self._popen.poll() is None:
            self._popen.kill()
            self._popen.communicate()


class Upgrade:
    """The cluster, and the steps of its upgrade; ``steps`` are their times and names."""

    def __init__(self, old: Path, etcd: EtcdServer | None, arguments: argparse.Namespace) -> None:
        self._old, self._arguments = old, arguments
        self._directory = Path(tempfile.mkdtemp(prefix="th-upgrade-"))
        self._keys = self._directory / "keys"
        self._keys.mkdir()
        self._clients: list[LoadProcess] = []
        self._processes: dict[int, Process] = {}  # by their ports
        self.steps: list[tuple[float, str]] = []
        self.results: dict[str, dict[str, Any]] = {}
        self._election = () if etcd is None else ("--etcd", etcd.address, "--election-ttl-s", "2")
        self._masters = [free_port() for _ in range(1 if etcd is None else 2)]
        self.address = ",".join(f"127.0.0.1:{port}" for port in self._masters)
        self._nodes: list[int] = []

    def start(self) -> None:
        """The cluster of the version before, with clients of both."""
        for port in self._masters:
            self._start_master(port, self._old)
        for index in range(NUM_NODES):
            self._nodes.append(free_port())
            self._start_node(index, self._old)
        for index, source in enumerate((self._old, self._old, THIS, THIS)):
            self._start_client(f"{'old' if source == self._old else 'new'}{index}", source)

    def run(self) -> None:
        """All steps."""
        self._step("all of the version before, and new clients")
        leader = self._leader()
        for port in sorted(self._masters, key=lambda port: port == leader):
            self._step(f"master {port}{' (leads)' if port == leader else ''}")
            self._processes.pop(port).stop()
            self._start_master(port, THIS)
            eventually(lambda: self._is_known(), STEP_S)
        for index, port in enumerate(self._nodes):
            name = self._processes[port].name
            self._step(f"drain of node {index}")
            eventually(partial(self._is_drained, name), STEP_S)
            self._step(f"node {index}")
            self._processes.pop(port).stop()
            self._start_node(index, THIS)
        if self._election:
            self._step("all masters own a part")
            eventually(self._is_shared, STEP_S)
        for client in self._clients[:2]:
            self._step(f"client {client.name}")
            self.results[client.name] = client.stop()
            self._clients.remove(client)
            self._start_client(client.name.replace("old", "upgraded"), THIS)
        self._step("all of this version")
        time.sleep(self._arguments.seconds)
        for client in self._clients:
            self.results[client.name] = client.stop()

    def _is_drained(self, name: str) -> bool:
        """Drain that node; False if no master led long enough."""
        try:
            with tanghulu.connect(self.address, deadline_s=30.0) as client:
                perform(orders.drain, client, name, wait=True, timeout_s=STEP_S)
        except tanghulu.errors.MasterUnavailable:
            return False
        return True

    def verify(self) -> tuple[int, list[str]]:
        """Read what was kept; returns how many keys that were, and what was wrong with them."""
        wrong: list[str] = []
        keys = [key for path in self._keys.iterdir() for key in path.read_text().split()]
        with tanghulu.connect(self.address, deadline_s=30.0) as client:
            for key in keys:
                try:
                    with client.get(key) as chunk:
                        if chunk.bytes() != upgrade_load.value_of(key):
                            wrong.append(f"wrong bytes of {key}")
                except tanghulu.errors.TanghuluError as error:
                    wrong.append(f"{key}: {error}")
        return len(keys), wrong

    def close(self) -> None:
        """End all processes, the nodes first."""
        for client in self._clients:
            client.kill()
        for port in reversed(self._processes):
            with contextlib.suppress(AssertionError):
                self._processes[port].stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def step_at(self, at_s: float) -> str:
        """The name of the step at ``at_s``."""
        return max((step for step in self.steps if step[0] <= at_s), default=(0.0, "start"))[1]

    def _step(self, name: str) -> None:
        if self.steps:
            time.sleep(self._arguments.seconds)
        print(f"{name} ...", file=sys.stderr, flush=True)
        self.steps.append((time.time(), name))

    def _start_master(self, port: int, source: Path) -> None:
        flags = ("--port", str(port), *self._election)
        self._start(port, "tanghulu.store.master.main", flags, source)

    def _start_node(self, index: int, source: Path) -> None:
        port = self._nodes[index]
        flags = ["--port", str(port), "--master", self.address, "--memory", NODE_MEMORY]
        self._start(port, "tanghulu.store.node.main", flags, source)

    def _start(self, port: int, module: str, flags: Iterable[str], source: Path) -> None:
        process = self._processes[port] = Process(module, *flags, source=source)
        if self._arguments.logs is not None:  # a link: what the process writes later is there, and stays
            name = f"{process.name}-{'new' if source == THIS else 'old'}.log"
            os.link(process.run_dir / "log", self._arguments.logs / name)

    def _start_client(self, name: str, source: Path) -> None:
        self._clients.append(LoadProcess(source, self.address, name, self._keys, self._arguments.threads))

    def _leader(self) -> int:
        """The port of the master that leads."""
        if not self._election:
            return self._masters[0]
        leading: list[int] = []
        eventually(lambda: bool(leading.extend(p for p in self._masters if self._leads(p)) or leading))
        return leading[0]

    def _leads(self, port: int) -> bool:
        return self._processes[port].metric("tanghulu_master_leading") == 1.0

    def _is_shared(self) -> bool:
        """Whether each master owns as many ranges as another, and knows all keys of its own."""
        masters = [self._processes[port] for port in self._masters]
        owned = {master.metric("tanghulu_master_owned_ranges") for master in masters}
        return owned == {64 / len(masters)} and not any(m.metric("tanghulu_master_rebuilding") for m in masters)

    def _is_known(self) -> bool:
        """Whether the master that leads knows all keys."""
        return self._processes[self._leader()].metric("tanghulu_master_rebuilding") == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old", type=Path, required=True, help="a checkout of the version before")
    parser.add_argument("--etcd", action="store_true", help="two masters, that find each other in an etcd")
    parser.add_argument("--threads", type=int, default=2, help="of each client, over each of shm and tcp")
    parser.add_argument("--seconds", type=float, default=4.0, help="of load between two steps")
    parser.add_argument("--logs", type=Path, help="a new directory for what the processes log")
    arguments = parser.parse_args()
    if arguments.logs is not None:
        arguments.logs.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        etcd = stack.enter_context(EtcdServer()) if arguments.etcd else None
        upgrade = Upgrade(arguments.old.resolve(), etcd, arguments)
        stack.callback(upgrade.close)
        upgrade.start()
        upgrade.run()
        num_kept, wrong = upgrade.verify()
    failures = [[upgrade.step_at(f[0]), c, *f[1:]] for c, result in upgrade.results.items() for f in result["failures"]]
    long = [
        [upgrade.step_at(each[0]), c, *each[1:]] for c, result in upgrade.results.items() for each in result["long"]
    ]
    calls = {client: result["calls"] for client, result in upgrade.results.items()}
    print(json.dumps({"calls": calls, "failures": failures, "kept": num_kept, "wrong": wrong, "long": long}, indent=1))
    return 1 if failures or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
