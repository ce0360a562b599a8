"""What the SSD tier does on this machine: bytes a second down and up beside the bare disk, and the time of a start.

    .venv/bin/python -m benchmarks.store.tier_bench --path /nvme/tier_bench [--size 1MiB] [--total 1GiB]

A node of 64 MiB takes values until ``--total`` went through it, and gives them back in the same order, each once: so
nearly every get comes from the SSD. The node is then started again on the same file. The bare disk is written and read
in the same run with direct I/O, one request of the same size at a time. Kept as benchmarks/results/tier_bench.json.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import time
from pathlib import Path
from statistics import median

import tanghulu
from benchmarks.common.report import RESULTS
from benchmarks.store.store_bench import machine, process
from tanghulu.errors import TanghuluError
from tanghulu.types import format_size, parse_size

RESULT = RESULTS / "tier_bench.json"
MIB = 1 << 20


def bare_disk(path: Path, size: int, total: int) -> dict[str, float]:
    """MiB a second of the disk alone."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    area = mmap.mmap(-1, size)
    area.write(os.urandom(size))
    speeds = {}
    for name, move in (("write", os.pwritev), ("read", os.preadv)):
        begun = time.perf_counter()
        for position in range(0, total, size):
            move(fd, [area], position)
        speeds[f"bare_{name}_mib_s"] = round(total / MIB / (time.perf_counter() - begun), 1)
    os.close(fd)
    path.unlink()
    return speeds


def run(path: Path, size: int, total: int) -> dict[str, object]:
    """One row of the result."""
    flags = ("--memory", "64MiB", "--ssd-path", str(path), "--ssd-size", str(2 * total))
    keys, value = [f"k{i}" for i in range(total // size)], os.urandom(size)
    row: dict[str, object] = {"size": format_size(size), "num_chunks": len(keys)}
    with process("tanghulu.store.master.main", "--port", "0") as master:
        at = ("--port", "0", "--master", master.address)
        with process("tanghulu.store.node.main", *at, *flags), tanghulu.connect(master.address) as client:
            begun = time.perf_counter()
            for key in keys:
                client.put(key, value)
            row["put_mib_s"] = round(total / MIB / (time.perf_counter() - begun), 1)
            row.update(_get_all(client, keys, size))
        with process("tanghulu.store.node.main", *at, *flags) as node, tanghulu.connect(master.address) as client:
            row["restart_s"] = round(node.seconds, 2)
            row["there_after_restart"] = sum(client.exists_many(keys))
    return row


def _get_all(client: tanghulu.store.client.Client, keys: list[str], size: int) -> dict[str, object]:
    times, missing = [], 0
    begun = time.perf_counter()
    for key in keys:
        started = time.perf_counter()
        try:
            client.get(key).close()
            times.append(time.perf_counter() - started)
        except TanghuluError:
            missing += 1
    seconds = time.perf_counter() - begun
    return {
        "get_mib_s": round(len(times) * size / MIB / seconds, 1),
        "get_p50_us": round(median(times) * 1e6),
        "dropped_on_the_way_down": missing,
    }


def main() -> None:
    """Measure and keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--size", default="64KiB,1MiB,8MiB")
    parser.add_argument("--total", type=parse_size, default=1 << 30)
    arguments = parser.parse_args()
    rows = []
    for size in map(parse_size, arguments.size.split(",")):
        arguments.path.unlink(missing_ok=True)
        row = run(arguments.path, size, arguments.total)
        arguments.path.unlink()
        row.update(bare_disk(arguments.path, size, arguments.total))
        rows.append(row)
        print(row)
    RESULT.write_text(json.dumps({"machine": machine(), "load": os.getloadavg()[0], "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
