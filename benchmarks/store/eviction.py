"""Replay traces through the node's eviction policies and say what each would have hit, and what an operation costs.

    python -m benchmarks.store.eviction TRACE... [--quick] [--policies lru,reuse] [--jobs 2] [--reference FOLDER]

A trace is gzip JSON lines with ``timestamp`` and ``hash_ids``, one id for each block of the prompt. A cache of N blocks
is driven by the product's own policy class: at each request the hit is the longest run of leading blocks that is
resident; then the request's blocks are touched or added, tail first. The ratio is hits by blocks asked for. Where
``cachesim.py`` is found (``--reference``), its LRU (or other policies of it) runs on the same input.

The cost of an operation (add, touch, remove, or the question for a victim) is the time of the whole replay by the
number of operations: an upper bound, for the driver's own loop is in it. Of ``--repeat`` runs the quickest counts.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.table import Table

from benchmarks.common.report import keep
from tanghulu.eviction import POLICIES, Policy, make_policy
from tanghulu.types import ChunkKey

CAPACITIES = [1000, 5000, 10_000, 30_000, 50_000, 100_000]
QUICK_CAPACITIES = [1000, 5000]
REFERENCE = Path(__file__).parents[3] / "shared" / "reference"
#: Policies of the reference that are run beside ours, and whether they take requests tail first.
REFERENCE_POLICIES = {"lru": True, "gittins": False, "opt": False}

Request = Sequence[ChunkKey]


@dataclass
class Row:
    """One policy on one trace at one capacity."""

    trace: str
    policy: str
    capacity_blocks: int
    hit_ratio: float
    us_per_operation: float | None = None
    num_operations: int | None = None
    num_ghosts: int | None = None


class CacheDriver:
    """A cache of ``capacity`` blocks of one size around a policy. Counts what it asks of the policy."""

    def __init__(self, policy: Policy, capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.hits = 0
        self.asked = 0
        self.num_operations = 0

    def request(self, keys: Request) -> int:
        """Serve one prompt; its hit blocks."""
        policy = self.policy
        hits = next((i for i, key in enumerate(keys) if key not in policy), len(keys))
        self.hits += hits
        self.asked += len(keys)
        policy.begin_batch()
        for key in reversed(keys):
            if key in policy:
                policy.touch(key)
                self.num_operations += 1
                continue
            if len(policy) >= self.capacity:
                policy.remove(next(policy.victims()), evicted=True)
                self.num_operations += 2
            policy.add(key, 1)
            self.num_operations += 1
        return hits

    @property
    def hit_ratio(self) -> float:
        """Hit blocks by blocks asked for."""
        return self.hits / max(self.asked, 1)


def load(path: str) -> list[Request]:
    """The prompts of a trace in the order of their arrival."""
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
        rows = [json.loads(line) for line in file]
    rows.sort(key=lambda row: row["timestamp"])
    return [[ChunkKey(str(h)) for h in row["hash_ids"]] for row in rows]


def replay(requests: Iterable[Request], policy: Policy, capacity: int) -> CacheDriver:
    """All requests through a cache of ``capacity`` blocks."""
    driver = CacheDriver(policy, capacity)
    for keys in requests:
        driver.request(keys)
    return driver


def measure(trace: str, requests: list[Request], name: str, capacity: int, repeat: int) -> Row:
    """One row; the replay is deterministic, so only its time differs from run to run."""
    seconds = []
    for _ in range(repeat):
        policy = make_policy(name)
        start = time.process_time()
        driver = replay(requests, policy, capacity)
        seconds.append(time.process_time() - start)
    operations = driver.num_operations
    us = round(min(seconds) / operations * 1e6, 2)
    return Row(trace, name, capacity, round(driver.hit_ratio, 4), us, operations, policy.num_ghosts)


def reference_rows(folder: Path, path: str, trace: str, capacities: list[int], names: Iterable[str]) -> list[Row]:
    """What the reference simulator says of the same trace; nothing if it is not there."""
    if not (folder / "cachesim.py").exists():
        return []
    spec = importlib.util.spec_from_file_location("cachesim", folder / "cachesim.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = []
    for name in names:
        order = "rev" if REFERENCE_POLICIES[name] else "-"
        for capacity in capacities:
            found = module.run((path, name, order, capacity, 0.0))
            rows.append(Row(trace, f"reference {name}", capacity, round(found["prefix"], 4)))
    return rows


def trace_name(path: str) -> str:
    """The trace as the tables call it."""
    return Path(path).name.split(".")[0]


def run_trace(options: argparse.Namespace, path: str) -> list[Row]:
    """All rows of one trace; none if its requests name no blocks."""
    requests = [keys for keys in load(path) if keys]
    if not requests:
        return []
    trace = trace_name(path)
    capacities = QUICK_CAPACITIES if options.quick else CAPACITIES
    repeat = 1 if options.quick else options.repeat
    names = options.policies.split(",")
    rows = [measure(trace, requests, name, capacity, repeat) for name in names for capacity in capacities]
    reference = options.reference_policies.split(",")
    return rows + reference_rows(options.reference, path, trace, capacities, reference)


def show(console: Console, trace: str, rows: list[Row], capacities: list[int]) -> None:
    """One table for a trace: hit ratios, and the dearest operation of each policy."""
    table = Table(title=f"{trace}: prefix-aware hit ratio by blocks of cache", title_justify="left")
    table.add_column("policy")
    for capacity in capacities:
        table.add_column(f"{capacity:,}", justify="right")
    table.add_column("us/op, worst", justify="right")
    best = {c: max(r.hit_ratio for r in rows if r.capacity_blocks == c and r.policy in POLICIES) for c in capacities}
    for policy in dict.fromkeys(row.policy for row in rows):
        mine = {row.capacity_blocks: row for row in rows if row.policy == policy}
        cells = [
            f"[bold]{mine[c].hit_ratio:.3f}[/]" if mine[c].hit_ratio == best[c] else f"{mine[c].hit_ratio:.3f}"
            for c in capacities
        ]
        costs = [row.us_per_operation for row in mine.values() if row.us_per_operation is not None]
        table.add_row(policy, *cells, f"{max(costs):.2f}" if costs else "")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    parser.add_argument("--quick", action="store_true", help="two capacities, one run each, nothing kept")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--reference", type=Path, default=REFERENCE, help="folder of cachesim.py")
    parser.add_argument("--reference-policies", default="lru", help=f"of {', '.join(REFERENCE_POLICIES)}")
    parser.add_argument("--jobs", type=int, default=1, help="traces that are replayed at the same time")
    options = parser.parse_args()
    capacities = QUICK_CAPACITIES if options.quick else CAPACITIES
    console = Console()
    kept: list[Row] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for path, rows in zip(options.traces, pool.map(partial(run_trace, options), options.traces), strict=True):
            if rows:
                show(console, trace_name(path), rows, capacities)
            else:
                console.print(f"{trace_name(path)} has no hash_ids: nothing to replay")
            kept += rows
    if not options.quick:
        load_1min = round(os.getloadavg()[0], 2)
        console.print(f"kept in {keep('eviction', [asdict(row) for row in kept], load_1min=load_1min)}")


if __name__ == "__main__":
    main()
