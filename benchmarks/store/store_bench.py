"""Measure the store: put, get, get_into and exists, beside what the machine can do at best.

    python -m benchmarks.store.store_bench [--seconds 1.0] [--seed 1] [--out benchmarks/results]
    python -m benchmarks.store.store_bench --memory-keys 1000000

Starts a master and a node of its own (real processes), measures latencies from one client, prints a table and writes a
JSON with machine, command, seed and date. With --memory-keys it measures what so many keys cost in memory instead: the
growth of RssAnon (/proc/PID/status: private memory, without the segment) of master and node.

The plain limits (memcpy, one TCP stream between two processes, a bare echo over a Unix socket) are measured in the same
run, because a figure without its limit says little on a shared machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

import tanghulu
from benchmarks.common.report import RESULTS
from tanghulu.store.client import Client
from tanghulu.types import format_size

SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20]
MAX_SAMPLES = 5000
MIN_SAMPLES = 20
NODE_MEMORY = "1GiB"
_RUN = "import importlib, sys; importlib.import_module(sys.argv.pop(1)).COMMAND()"


@dataclass
class Result:
    """One line of the table. Throughput counts payload bytes by the median."""

    name: str
    transport: str
    size_bytes: int
    samples: int
    p50_us: float
    p99_us: float
    min_us: float
    gb_per_s: float


def measure(name: str, transport: str, size: int, seconds: float, step: Callable[[int], object]) -> Result:
    """Time ``step(0)``, ``step(1)``, ... for about ``seconds``."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < MAX_SAMPLES and (len(times) < MIN_SAMPLES or time.perf_counter() < until):
        start = time.perf_counter()
        step(len(times))
        times.append(time.perf_counter() - start)
    p50, p99 = (float(np.percentile(times, q)) for q in (50, 99))
    return Result(name, transport, size, len(times), p50 * 1e6, p99 * 1e6, min(times) * 1e6, size / p50 / 1e9)


# --- processes


class Started(NamedTuple):
    """A process that says it is ready."""

    address: str
    pid: int
    seconds: float

    @property
    def private_bytes(self) -> int:
        """Memory of its own; shared memory (a node's segment) does not count."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@contextlib.contextmanager
def process(module: str, *flags: str) -> Iterator[Started]:
    """Run a tanghulu process until the end of the block."""
    begun = time.perf_counter()
    status, theirs = socket.socketpair()
    command = [sys.executable, "-c", _RUN, module, *flags, "--log-level", "error", "--status-fd", str(theirs.fileno())]
    child = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    try:
        ready = json.loads(status.makefile().readline() or "{}")
        if ready.get("event") != "ready":
            raise SystemExit(f"{module} did not start: {ready}")
        yield Started(ready["address"], child.pid, time.perf_counter() - begun)
    finally:
        child.terminate()
        child.wait()
        status.close()


@contextlib.contextmanager
def cluster(*node_flags: str) -> Iterator[tuple[Started, Started]]:
    """A master and one node."""
    with process("tanghulu.store.master.main", "--port", "0") as master:
        flags = ("--port", "0", "--master", master.address, "--memory", NODE_MEMORY, *node_flags)
        with process("tanghulu.store.node.main", *flags) as node:
            yield master, node


# --- limits


def memcpy(size: int, seconds: float) -> Result:
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    return measure("memcpy", "-", size, seconds, lambda _: np.copyto(target, source))


_SENDER = """
import socket, sys
size = int(sys.argv[2]); data = bytes(size)
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as peer:
    while peer.recv(1): peer.sendall(data)
"""
_ECHO = """
import socket, sys
peer = socket.socket(fileno=int(sys.argv[1]))
while data := peer.recv(65536): peer.send(data)
"""


def plain_tcp(size: int, seconds: float) -> Result:
    """One byte over, ``size`` bytes back, by one TCP stream from another process into one buffer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        with subprocess.Popen([sys.executable, "-c", _SENDER, port, str(size)]):
            peer, _ = listener.accept()
            buffer = memoryview(bytearray(size))

            def step(_: int) -> None:
                peer.send(b"x")
                filled = 0
                while filled < size:
                    filled += peer.recv_into(buffer[filled:])

            with peer:
                return measure("plain TCP", "-", size, seconds, step)


def bare_echo(seconds: float) -> Result:
    """100 bytes there and back over a Unix socket between two processes: what any call costs at least."""
    ours, theirs = socket.socketpair()
    with subprocess.Popen([sys.executable, "-c", _ECHO, str(theirs.fileno())], pass_fds=[theirs.fileno()]):
        theirs.close()
        with ours:
            message = bytes(100)
            return measure("bare echo", "-", 100, seconds, lambda _: (ours.send(message), ours.recv(65536)))


# --- the store


def warm(client: Client) -> None:
    """Touch the whole segment once: a mapping's first touch of a page costs a fault (about 0.4 ms per MiB)."""
    value = np.zeros(16 << 20, np.uint8)
    keys = [f"warm/{i}" for i in range(62)]
    for key in keys:
        client.put(key, value)
    client.remove_many(keys)


def store_results(client: Client, transport: str, seconds: float, seed: int) -> Iterator[Result]:
    random = np.random.default_rng(seed)
    warm(client)
    for size in SIZES:
        values = [random.bytes(size) for _ in range(4)]
        name = f"{transport}/{size}"
        done = measure("put", transport, size, seconds, lambda i, n=name, v=values: client.put(f"{n}/{i}", v[i % 4]))
        yield done
        # Only the latest are still there: read as many as fit into half of the node.
        kept = max(1, min(done.samples, (512 << 20) // size))
        keys = [f"{name}/{i}" for i in range(done.samples - kept, done.samples)]
        yield measure("get", transport, size, seconds, lambda i, k=keys: client.get(k[i % len(k)]).close())
        buffer = client.register(np.zeros(size, np.uint8))
        yield measure(
            "get_into", transport, size, seconds, lambda i, k=keys, b=buffer: client.get_into(k[i % len(k)], b)
        )
        client.remove_matching(f"^{name}/")


def exists_results(client: Client, seconds: float) -> Iterator[Result]:
    keys = [f"exists/{i}" for i in range(1000)]
    client.put_many([(key, b"x") for key in keys])
    yield measure("exists, 1 key", "-", 0, seconds, lambda i: client.exists(keys[i % 1000]))
    yield measure("exists, 1000 keys", "-", 0, seconds, lambda _: client.exists_many(keys))
    client.remove_many(keys)


def run(seconds: float, seed: int) -> list[Result]:
    """All measurements."""
    results = [bare_echo(seconds)]
    results += [limit(size, seconds / 2) for size in SIZES for limit in (memcpy, plain_tcp)]
    results += start_up()
    with cluster("--prefault") as (master, _):
        for transport in ("shm", "tcp"):
            with tanghulu.connect(master.address, transport=transport) as client:
                results += store_results(client, transport, seconds, seed)
        with tanghulu.connect(master.address) as client:
            results += exists_results(client, seconds)
    return results


def start_up() -> Iterator[Result]:
    """From the command to the line that says ready, master and node each on its own; five times."""
    for name, role in (("start-up of a master", 0), ("start-up of a node", 1)):
        times = []
        for _ in range(5):
            with cluster() as started:
                times.append(started[role].seconds * 1e6)
        yield Result(name, "-", 0, len(times), float(np.median(times)), max(times), min(times), 0.0)


# --- memory


@dataclass
class Memory:
    """Private bytes of one process: empty, with all keys, and after they were removed again."""

    process: str
    num_keys: int
    empty_bytes: int
    full_bytes: int
    removed_bytes: int
    bytes_per_key: float


def memory(num_keys: int) -> list[Memory]:
    """Put ``num_keys`` values of 64 bytes under keys of 44 characters, then remove them."""
    keys = [f"kv/{i:032x}/{i:08d}" for i in range(num_keys)]
    with cluster() as started, tanghulu.connect(started[0].address, deadline_s=120) as client:
        client.put("first", b"x")
        empty = [each.private_bytes for each in started]
        for begin in range(0, num_keys, 10_000):
            statuses = client.put_many([(key, bytes(64)) for key in keys[begin : begin + 10_000]])
            assert all(status.ok for status in statuses)
        full = [each.private_bytes for each in started]
        for begin in range(0, num_keys, 10_000):
            client.remove_many(keys[begin : begin + 10_000])
        removed = [each.private_bytes for each in started]
    names = ("master", "node")
    rows = zip(names, empty, full, removed, strict=True)
    return [Memory(name, num_keys, e, f, r, (f - e) / num_keys) for name, e, f, r in rows]


# --- the report


def machine() -> dict[str, object]:
    """Where this was measured."""
    model = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "")
    return {
        "cpu": model.partition(":")[2].strip(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "tanghulu": tanghulu.__version__,
    }


def table(results: list[Result]) -> Table:
    """The results for people."""
    shown = Table("what", "transport", "size", "p50 us", "p99 us", "min us", "GB/s", "samples")
    for r in results:
        rate = f"{r.gb_per_s:.2f}" if r.size_bytes >= 4096 else ""
        size = format_size(r.size_bytes) if r.size_bytes else ""
        cells = [f"{value:.1f}" for value in (r.p50_us, r.p99_us, r.min_us)]
        shown.add_row(r.name, r.transport, size, *cells, rate, str(r.samples))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--memory-keys", type=int, default=0, help="measure memory at so many keys instead")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    before = machine()
    results: list[Result] | list[Memory]
    if options.memory_keys:
        results = memory(options.memory_keys)
        Console().print(*results, sep="\n")
    else:
        results = run(options.seconds, options.seed)
        Console().print(table(results))
    options.out.mkdir(parents=True, exist_ok=True)
    date = datetime.now(UTC)
    name = "store_memory" if options.memory_keys else "store_bench"
    file = options.out / f"{name}-{date:%Y%m%dT%H%M%SZ}.json"
    report = {
        "benchmark": "store_bench",
        "date": date.isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", "benchmarks.store.store_bench", *sys.argv[1:]]),
        "seed": options.seed,
        "machine": before,
        "results": [asdict(result) for result in results],
    }
    file.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {file}")


if __name__ == "__main__":
    main()
