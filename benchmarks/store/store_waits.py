"""Measure how a blocking client waits for the master: asleep, and allowed to ask for a moment before it sleeps.

    python -m benchmarks.store.store_waits [--rounds 8] [--seconds 0.5] [--threads 1,2,8] [--seed 1]

Two clients of one process, the one with ``spin_s=0``, take turns at the same master and node (processes of their own),
so that a change of the machine's mood meets both. Medians over the rounds are kept in results/store_waits.json.
"""

from __future__ import annotations

import argparse
import os
import random
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

import tanghulu
from benchmarks.common.report import keep
from benchmarks.store.store_bench import cluster
from tanghulu.store.client import Client

SIZES = {"put, 4 KiB": 4 << 10, "put, 64 KiB": 64 << 10}
WAYS = ("sleeps", "may ask")


def steps(client: Client, rng: random.Random) -> dict[str, Callable[[str], object]]:
    """What is measured, by its name; each is given a key that nobody had before."""
    values = {name: rng.randbytes(size) for name, size in SIZES.items()}
    puts = {name: lambda key, value=value: client.put(key, value) for name, value in values.items()}
    return {"exists": client.exists, **puts}


def turn(step: Callable[[str], object], prefix: str, num_threads: int, seconds: float) -> tuple[float, float, float]:
    """(median of a call in us, calls a second, CPU of this process a call in us)."""
    took: list[float] = []

    def run(thread: int) -> None:
        own: list[float] = []
        until_s = time.perf_counter() + seconds
        while (begun_s := time.perf_counter()) < until_s:
            step(f"{prefix}/{thread}/{len(own)}")
            own.append(time.perf_counter() - begun_s)
        took.extend(own)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(num_threads)]
    cpu_s = time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cpu_s = time.process_time() - cpu_s
    return median(took) * 1e6, len(took) / seconds, cpu_s / len(took) * 1e6


def measure(rounds: int, seconds: float, all_threads: list[int], seed: int) -> list[dict[str, Any]]:
    """One row for each call, number of threads and way."""
    turns: dict[tuple[str, int, str], list[tuple[float, float, float]]] = {}
    with cluster() as (master, _):
        address = master.address
        with tanghulu.connect(address, spin_s=0.0) as sleeps, tanghulu.connect(address) as may_ask:
            ways = [
                (way, steps(client, random.Random(seed))) for way, client in zip(WAYS, (sleeps, may_ask), strict=True)
            ]
            for number in range(-1, rounds):  # the first round warms up
                for num_threads in all_threads:
                    for way, calls in ways:
                        for name, step in calls.items():
                            took = turn(step, f"{number}/{num_threads}/{way}/{name}", num_threads, seconds)
                            if number >= 0:
                                turns.setdefault((name, num_threads, way), []).append(took)
    return [
        {
            "call": name,
            "threads": num_threads,
            "way": way,
            "p50_us": median(each[0] for each in took),
            "calls_per_s": median(each[1] for each in took),
            "cpu_us": median(each[2] for each in took),
        }
        for (name, num_threads, way), took in turns.items()
    ]


def main() -> None:
    """Measure, show, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each turn")
    parser.add_argument("--threads", default="1,2,8")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rows = measure(options.rounds, options.seconds, [int(each) for each in options.threads.split(",")], options.seed)
    shown = Table("call", "threads", "way", "p50 us", "calls/s", "CPU us")
    for row in rows:
        cells = [f"{row[name]:,.0f}" for name in ("p50_us", "calls_per_s", "cpu_us")]
        shown.add_row(row["call"], str(row["threads"]), row["way"], *cells)
    Console().print(shown)
    print("kept in", keep("store_waits", rows, seed=options.seed, load_average=load))


if __name__ == "__main__":
    main()
