"""The soak: a whole cluster under every kind of call for an hour, with a node restarted each minute, seen from outside.

    PYTHONPATH=src python -m benchmarks.store.soak [--minutes 60] [--seed 1] [--fill] [--no-keep]

A master, three nodes with SSD files and tokens, eight client processes of three tenants that stay all the time (shm and
tcp, blocking and asyncio, one with two threads; see soak_client.py). Each minute a node is killed, or stopped by
SIGTERM the next time, and comes back with its file. The exit status is 1 if anything is not as it must be:

- every call gives the right bytes, or an error that it may give at such a time, by its deadline;
- no event loop stands still for more than 50 ms. A loop that got no processor did not stand still by itself: what the
  threads of the process waited for one is taken off (see soak_server.py), and a bare process beside tells how late a
  timer is on this machine anyhow. All stalls are counted, a loop's own apart;
- private memory, descriptors and mappings of the processes that stay, and the shared memory of all, do not grow
  after the warm-up where there are five minutes to judge by: the slope over all samples. Of nodes, which live for three
  minutes, the figures at the same age of each life are kept;
- when all clients are closed and still live, no lease is left, and `store check` finds nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import tanghulu
from benchmarks.common.report import keep
from benchmarks.store.soak_client import COUNTERS_BYTES, RESTARTS, RETURNS
from benchmarks.store.soak_server import MOST_STALL_S
from tanghulu.auth.tenants import hash_of
from tanghulu.runtime.stalls import PERIOD_S
from tanghulu.store.admin.check import check
from tanghulu.store.admin.orders import perform

MIB = 1 << 20
NODES, NODE_MEMORY, SSD_BYTES = 3, "128MiB", "256MiB"
#: Tenant, transport, asyncio, threads of each client.
CLIENTS = (
    ("red", "shm", False, 1),
    ("red", "tcp", False, 1),
    ("red", None, True, 1),
    ("green", "shm", False, 1),
    ("green", "tcp", True, 1),
    ("green", None, False, 2),
    ("blue", "tcp", False, 1),
    ("blue", None, False, 1),
)
TENANTS = {"red": "shared_memory = true", "green": "shared_memory = true", "blue": 'quota = "32MiB"'}
RESTART_S, SAMPLE_S, READY_S = 60.0, 1.0, 60.0
#: Caches, allocators and buffers have settled by then; tables are full only with --fill. Half of a shorter run.
WARM_UP_S = 180.0
#: The least time after the warm-up over which a slope says anything.
JUDGED_S = 300.0
#: What counts as flat: a growth over the whole time, by the slope, of less than this share or this much.
FLAT_SHARE, FLAT_BYTES, FLAT_COUNT = 0.1, 8 * MIB, 8
_CONTROL = """
import sys, time
while True:
    due = time.monotonic() + {period}
    time.sleep({period})
    late = time.monotonic() - due
    if late > {most}:
        print(round(late, 4), flush=True)
"""


def shared_bytes(pids: Sequence[int]) -> int:
    """The shared memory that these processes map, each file counted once, whether or not its owner still lives."""
    found: dict[int, int] = {}
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            inode = int(fields[4])
            if inode and inode not in found and ("/memfd:" in fields[-1] or "/dev/shm/" in fields[-1]):
                with contextlib.suppress(OSError):  # unmapped meanwhile
                    found[inode] = os.stat(f"/proc/{pid}/map_files/{fields[0]}").st_blocks * 512
    return sum(found.values())


class Server:
    """A master or node process that can go and come back."""

    def __init__(self, module: str, name: str, folder: Path, flags: list[str], environment: dict[str, str]) -> None:
        self.name = name
        self._module, self._flags, self._environment = module, flags, environment
        self.folder = folder / name
        self.folder.mkdir()
        self.life = 0
        self.start()

    def start(self) -> None:
        """Returns when the process says that it is ready."""
        self.life += 1
        ours, theirs = socket.socketpair()
        run_dir = self.folder / f"run-{self.life}"
        command = [sys.executable, str(Path(__file__).with_name("soak_server.py")), self._module, *self._flags]
        command += ["--run-dir", str(run_dir), "--status-fd", str(theirs.fileno())]
        with (self.folder / "log").open("ab") as log:
            self.popen = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdout=log, stderr=log, env=os.environ | self._environment
            )
        theirs.close()
        ours.settimeout(READY_S)
        self._status = ours
        ready = json.loads(ours.makefile().readline() or "{}")
        if ready.get("event") != "ready":
            raise RuntimeError(f"{self.name} did not start: {ready}, see {self.folder}/log")
        self.address, self._metrics = ready["address"], ready["metrics_address"]
        self.begun_s = time.monotonic()

    def end(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)
        self.popen.wait(READY_S)
        self._status.close()

    def metrics(self, token: str) -> dict[str, float]:
        shown = {"Authorization": f"Bearer {token}"}
        asked = urllib.request.Request(f"http://{self._metrics}/metrics", headers=shown)
        with urllib.request.urlopen(asked, timeout=READY_S) as answer:
            lines = (line.rpartition(" ") for line in answer.read().decode().splitlines() if line[:1] != "#")
            return {name: float(number) for name, _, number in lines}


@dataclass
class Usage:
    """What one process holds; each sample a second apart."""

    at_s: list[float] = field(default_factory=list)
    private_bytes: list[int] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    mappings: list[int] = field(default_factory=list)

    def take(self, pid: int, at_s: float) -> None:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        anonymous, lazy = (int(rollup.partition(name)[2].split()[0]) << 10 for name in ("Anonymous:", "LazyFree:"))
        fds = len(os.listdir(f"/proc/{pid}/fd"))
        mappings = Path(f"/proc/{pid}/maps").read_bytes().count(b"\n")
        self.at_s.append(at_s)
        self.private_bytes.append(anonymous - lazy)  # what is lazily free is the kernel's to take
        self.fds.append(fds)
        self.mappings.append(mappings)

    def at_age(self, from_s: float, to_s: float) -> list[int]:
        """Which samples were taken between these ages; none where the machine was too busy for samples."""
        return [i for i, at_s in enumerate(self.at_s) if from_s < at_s <= to_s]


#: What is kept of each life of a node.
_FIGURES: dict[str, Callable[[Usage], list[int]]] = {
    "private bytes": lambda usage: usage.private_bytes,
    "descriptors": lambda usage: usage.fds,
    "mappings": lambda usage: usage.mappings,
}


def growth(at_s: list[float], figures: list[int]) -> tuple[float, float]:
    """By how much the straight line through the figures rises from the first to the last, and their mean."""
    if len(figures) < 3:
        return 0.0, float(np.mean(figures or [0]))
    slope = float(np.polyfit(at_s, figures, 1)[0])
    return slope * (at_s[-1] - at_s[0]), float(np.mean(figures))


def sampled(figures: list[float]) -> list[float]:
    """The medians of a dozen equal stretches: the shape of what grew."""
    return [round(float(np.median(each)), 1) for each in np.array_split(figures, 12) if len(each)]


def is_flat(rise: float, mean: float, least: float) -> bool:
    return rise < max(mean * FLAT_SHARE, least)


def stolen_s() -> float:
    return int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8]) / os.sysconf("SC_CLK_TCK")


def logged(server: Server, what: str) -> list[dict[str, Any]]:
    """What ``soak_server`` wrote to its log in lines that begin with ``what``, in all lives of the process."""
    lines = (server.folder / "log").read_text(errors="replace").splitlines()
    return [json.loads(line.removeprefix(what)) for line in lines if line.startswith(what)]


def stalls_of(server: Server) -> list[dict[str, Any]]:
    """All long stalls of a process in its lives."""
    return logged(server, "STALL ")


def stall_row(stalls: list[dict[str, Any]]) -> dict[str, Any]:
    longest_s = max((each["stall_s"] for each in stalls), default=0.0)
    most_cpu_s = max((each["cpu_s"] for each in stalls), default=0.0)
    own = sum(map(is_own, stalls))
    return {"above_50_ms": len(stalls), "own": own, "longest_s": longest_s, "most_cpu_s": most_cpu_s}


def is_own(stall: dict[str, Any]) -> bool:
    """Whether the loop stood still by itself: it computed, or waited for something else than a processor."""
    for_processors_s = stall["waited_s"] + stall["others_waited_s"]
    return bool(stall["cpu_s"] > MOST_STALL_S or stall["stall_s"] - for_processors_s > MOST_STALL_S)


class Soak:
    """The cluster, its clients and all that is seen of them."""

    def __init__(self, folder: Path, seed: int, pause_s: float, fill: bool) -> None:
        self._folder, self._seed, self._pause_s, self._fill = folder, seed, pause_s, fill
        self._tokens = {name: secrets.token_hex(16) for name in ("operator", "node", *TENANTS)}
        self._write_tokens()
        self._counters_path = folder / "counters"
        self._counters_path.write_bytes(bytes(COUNTERS_BYTES))
        self._counters = np.memmap(self._counters_path, np.uint64, "r+")
        self.servers: list[Server] = []
        self.clients: list[subprocess.Popen[str]] = []
        self.usage: dict[str, Usage] = {}
        self.shared: list[tuple[float, int]] = []
        self.said: list[dict[str, Any]] = []
        self.findings: list[str] = []
        self.over_time: dict[str, list[float]] = {}
        self.peak_leases = 0.0

    # --- start

    def _write_tokens(self) -> None:
        lines = [f"[tenants.{name}]\n{options}" for name, options in TENANTS.items()]
        rights = {name: ["read", "write"] for name in TENANTS} | {"operator": ["admin"], "node": ["join", "read"]}
        for name, token in self._tokens.items():
            lines.append(f'[[tokens]]\nname = "{name}"\nsha256 = "{hash_of(token)}"')
            lines.append(f"rights = {json.dumps(rights[name])}")
            lines.append(f'tenant = "{name}"' if name in TENANTS else "")
        path = self._folder / "tokens.toml"
        path.touch(mode=0o600)
        path.write_text("\n".join(lines))

    def start(self) -> None:
        environment = {"TANGHULU_TOKEN": self._tokens["node"]}
        flags = ["--port", "0", "--tokens", str(self._folder / "tokens.toml")]
        self.servers.append(Server("tanghulu.store.master.main", "master", self._folder, flags, environment))
        flags += ["--master", self.master.address, "--memory", NODE_MEMORY, "--ssd-size", SSD_BYTES]
        for number in range(NODES):
            ssd = ["--ssd-path", str(self._folder / f"ssd-{number}")]
            name = f"node-{number}"
            self.servers.append(Server("tanghulu.store.node.main", name, self._folder, flags + ssd, environment))
        for number, (tenant, transport, is_asyncio, threads) in enumerate(CLIENTS):
            settings = {
                "master": self.master.address,
                "token": self._tokens[tenant],
                "transport": transport,
                "is_asyncio": is_asyncio,
                "threads": threads,
                "number": number,
                "mates": [other for other, client in enumerate(CLIENTS) if client[0] == tenant],
                "seed": self._seed,
                "pause_s": self._pause_s,
                "fill": self._fill,
                "counters": str(self._counters_path),
            }
            command = [sys.executable, str(Path(__file__).with_name("soak_client.py")), json.dumps(settings)]
            with (self._folder / f"client-{number}.log").open("wb") as log:
                self.clients.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
                )
        for client in self.clients:
            self._read_line(client)

    @property
    def master(self) -> Server:
        return self.servers[0]

    @property
    def nodes(self) -> list[Server]:
        return self.servers[1:]

    def _read_line(self, client: subprocess.Popen[str]) -> dict[str, Any]:
        assert client.stdout is not None
        line = client.stdout.readline()
        if not line:
            raise RuntimeError(f"a client died: {client.wait()}, see {self._folder}")
        said: dict[str, Any] = json.loads(line)
        return said

    # --- the time itself

    def run(self, minutes: float) -> None:
        """Sample each second, restart a node each minute."""
        begun_s = time.monotonic()
        until_s, restart_s, number = begun_s + minutes * 60, begun_s + RESTART_S / 2, 0
        while time.monotonic() < until_s:
            self._sample()
            if time.monotonic() > restart_s and until_s - time.monotonic() > RESTART_S / 3:
                restart_s += RESTART_S
                self._restart(number)
                number += 1
            for client in self.clients:
                if client.poll() is not None:
                    raise RuntimeError(f"a client died: {client.returncode}, see {self._folder}")
            time.sleep(SAMPLE_S)

    def _restart(self, number: int) -> None:
        node = self.nodes[number // 2 % NODES]
        self._counters[RESTARTS] += 1
        node.end(signal.SIGTERM if number % 2 else signal.SIGKILL)
        if node.popen.returncode != (0 if number % 2 else -signal.SIGKILL):
            self.findings.append(f"{node.name} ended with {node.popen.returncode}")
        node.start()
        self._counters[RETURNS] += 1

    def _sample(self) -> None:
        now_s = time.monotonic()
        for server in self.servers:
            metrics = server.metrics(self._tokens["operator"])
            self.peak_leases = max(self.peak_leases, metrics.get("tanghulu_node_leases", 0))
            name = server.name if server is self.master else f"{server.name}/{server.life}"
            self.usage.setdefault(name, Usage()).take(server.popen.pid, now_s - server.begun_s)
        for number, client in enumerate(self.clients):
            self.usage.setdefault(f"client-{number}", Usage()).take(client.pid, now_s - self.master.begun_s)
        pids = [each.pid for each in (*(server.popen for server in self.servers), *self.clients)]
        self.shared.append((now_s - self.master.begun_s, shared_bytes(pids)))

    # --- the end

    def end(self) -> None:
        """Close all clients, whose processes live on until leases and store have been looked at."""
        for client in self.clients:
            assert client.stdin is not None
            client.stdin.write("\n")
            client.stdin.flush()
        self.said = [self._read_line(client) for client in self.clients]
        for said in self.said:
            self.findings += said["wrong"]
        until_s = time.monotonic() + READY_S
        while any(leases := self._leases()) and time.monotonic() < until_s:
            time.sleep(0.1)
        if any(leases):
            self.findings.append(f"leases that are left when all clients are closed, by node: {leases}")
            for node in self.nodes:
                node.popen.send_signal(signal.SIGUSR1)
            time.sleep(SAMPLE_S)
            pids = {each.popen.pid: each.name for each in self.servers}
            pids |= {client.pid: f"client-{number}" for number, client in enumerate(self.clients)}
            for node in self.nodes:
                self.findings += [f"{node.name}: {each}, of {pids}" for each in logged(node, "LEASE ")]
        with tanghulu.connect(self.master.address, token=self._tokens["operator"], deadline_s=READY_S) as store:
            report = perform(check, store, with_repair=False)
        if report.findings:
            self.findings.append(f"store check: {report.row()}")
        self.num_checked = report.num_chunks
        for client in self.clients:
            client.communicate()

    def _leases(self) -> list[float]:
        return [node.metrics(self._tokens["operator"])["tanghulu_node_leases"] for node in self.nodes]

    def close(self) -> None:
        for client in self.clients:
            client.kill()
            client.communicate()
        for server in reversed(self.servers):
            if server.popen.poll() is None:
                server.end(signal.SIGTERM)

    # --- what was seen

    def judge(self, warm_up_s: float) -> list[dict[str, Any]]:
        """Rows of figures; what is not flat or stood still goes to the findings."""
        rows: list[dict[str, Any]] = []
        for name, usage in self.usage.items():
            if "/" not in name:
                begin = next((i for i, at_s in enumerate(usage.at_s) if at_s > warm_up_s), len(usage.at_s))
                rows.append(self._flat(name, usage.at_s[begin:], usage, slice(begin, None)))
        for node in self.nodes:
            rows.append(self._flat_over_lives(node))
        for server in self.servers:
            self.findings += [f"{server.name} stood still: {each}" for each in stalls_of(server) if is_own(each)]
        after = [each for each in self.shared if each[0] > warm_up_s]
        self.over_time = {
            name: sampled([round(each / MIB, 1) for each in usage.private_bytes])
            for name, usage in self.usage.items()
            if "/" not in name
        }
        rows.append(
            self._row("all", "shared memory", [at_s for at_s, _ in after], [each for _, each in after], 64 * MIB)
        )
        return rows

    def _flat(self, name: str, at_s: list[float], usage: Usage, part: slice) -> dict[str, Any]:
        rows = [
            self._row(name, "private bytes", at_s, usage.private_bytes[part], FLAT_BYTES),
            self._row(name, "descriptors", at_s, usage.fds[part], FLAT_COUNT),
            self._row(name, "mappings", at_s, usage.mappings[part], FLAT_COUNT),
        ]
        return {"process": name} | {row.pop("what"): row for row in rows}

    def _row(self, name: str, what: str, at_s: list[float], figures: list[int], least: float) -> dict[str, Any]:
        rise, mean = growth(at_s, figures)
        if not is_flat(rise, mean, least) and at_s[-1] - at_s[0] >= JUDGED_S:
            self.findings.append(
                f"{name}: {what} rose by {rise:.0f} in {at_s[-1] - at_s[0]:.0f} s, from a mean of {mean:.0f}"
            )
        return {"process": name, "what": what, "mean": round(mean), "rise": round(rise)}

    def _flat_over_lives(self, node: Server) -> dict[str, Any]:
        """The figures of each life at the same age, the life's last half minute in common."""
        lives = [usage for name, usage in self.usage.items() if name.startswith(node.name + "/")]
        lives = [usage for usage in lives if usage.at_s[-1] > RESTART_S]
        own = [(life, life.at_age(RESTART_S / 2, RESTART_S)) for life in lives]
        figures = {
            what: [int(statistics.median([values(life)[i] for i in at])) for life, at in own if at]
            for what, values in _FIGURES.items()
        }
        longest = max(lives, key=lambda each: each.at_s[-1], default=None)
        row: dict[str, Any] = {"process": node.name, "lives": len(lives), "at the same age": figures}
        if longest is not None:
            begin = next(i for i, at_s in enumerate(longest.at_s) if at_s > RESTART_S / 2)  # its last sample is
            row |= self._flat(node.name, longest.at_s[begin:], longest, slice(begin, None))
        return row


@contextlib.contextmanager
def control() -> Iterator[list[float]]:
    """A bare process that does nothing but wake up: how late it was each time, where that was more than a stall."""
    late: list[float] = []
    code = _CONTROL.format(period=PERIOD_S, most=MOST_STALL_S)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        yield late
    finally:
        process.kill()
        late += [float(line) for line in process.communicate()[0].splitlines()]


def soak(
    minutes: float, seed: int, pause_s: float, folder: Path, *, fill: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows for each process and a summary, whose ``findings`` are what is not as it must be."""
    running = Soak(folder, seed, pause_s, fill)
    stolen = stolen_s()
    try:
        with control() as late:
            running.start()
            running.run(minutes)
        running.end()
    finally:
        running.close()
    rows = running.judge(min(WARM_UP_S, minutes * 30))
    summary = {
        "minutes": minutes,
        "calls": dict(sum((Counter(said["done"]) for said in running.said), Counter())),
        "errors": dict(sum((Counter(said["said"]) for said in running.said), Counter())),
        "longest_call_s": round(max(said["longest_s"] for said in running.said), 2),
        "restarts": int(running._counters[RESTARTS]),
        "peak_leases": running.peak_leases,
        "num_checked": running.num_checked,
        "stalls": {server.name: stall_row(stalls_of(server)) for server in running.servers},
        "control": {"above_50_ms": len(late), "longest_s": max(late, default=0.0)},
        "stolen_s": round(stolen_s() - stolen, 2),
        "private_mib_over_time": running.over_time,
        "findings": running.findings,
    }
    return rows, summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--pause-s", type=float, default=0.02, help="mean pause between two calls of a client")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fill", action="store_true", help="half a million small keys first, so that tables are full")
    parser.add_argument("--no-keep", action="store_true")
    parser.add_argument("--lenient", action="store_true", help="stalls are reported and do not count, as in a test")
    parser.add_argument("--folder", type=Path, help="keep logs and SSD files here")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="th-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    rows, summary = soak(options.minutes, options.seed, options.pause_s, folder, fill=options.fill)
    print(json.dumps({"summary": summary, "rows": rows}, indent=1))
    if not options.no_keep:
        keep("soak", rows, seed=options.seed, summary=summary)
    if options.folder is None:
        shutil.rmtree(folder)
    print(*summary["findings"], sep="\n", file=sys.stderr)
    passed_over = sum(" stood still: " in each for each in summary["findings"]) if options.lenient else 0
    sys.exit(1 if len(summary["findings"]) > passed_over else 0)


if __name__ == "__main__":
    main()
