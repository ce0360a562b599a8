"""tanghulu's store beside Mooncake's and redis, and beside the machine's limits, in one run on one host.

    python -m benchmarks.store.store_compare [--sizes 4KiB,64KiB,1MiB,16MiB] [--stores tanghulu,redis] [--only put]
    python -m benchmarks.store.store_compare --only exists,start
    python -m benchmarks.store.store_compare --summary

Every store runs in processes of its own: its servers (Mooncake's memory in a holder process), one client that writes,
one that reads. A value is put by the writer and read once by the reader, which has never seen its key; tanghulu is
asked by shared memory and with transport="tcp". In each of five rounds the stores take turns operation by operation, in
an order that the seed shuffles; a figure is the median over the rounds of a round's median. Before that a round warms
up that does not count, and values that fill the segment are written and read once, so that no store pays for the first
touch of its memory. The bare limits are measured in the same rounds. --sizes and --only allow a run in pieces; each
size is kept in a file of its own, its batches in another, and --summary reads them all.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.common.report import keep
from benchmarks.peers import store_report
from benchmarks.peers.clusters import CLUSTERS, Cluster
from benchmarks.peers.environments import Missing
from benchmarks.peers.jsonlines import Worker, WorkerFailed
from benchmarks.peers.limits import Limits

BATCH = 32
NUM_EXISTING = 1000
TOUCHED_PIECES = 4
#: By size: (single calls, batches of BATCH) in a run.
COUNTS = {4 << 10: (300, 10), 64 << 10: (300, 10), 1 << 20: (48, 3), 16 << 20: (24, 1)}
PAIRS = [("put", "get"), ("put_from", "get_into"), ("put_many", "get_many"), ("put_many_from", "get_many_into")]
LIMITS = ("memcpy", "stream", "stream_up", "echo")
PARTS = [*(op for pair in PAIRS for op in pair), "exists", "start"]
Samples = dict[tuple[str, str], list[dict[str, float]]]


def segment_bytes(size: int, batch: int) -> int:
    """What each store gets: room for a round's values twice, so that nobody has to evict."""
    singles, batches = COUNTS[size]
    return max(256 << 20, 2 * size * (singles if batch == 1 else batches * batch))


@dataclass
class Contestant:
    """One store by one transport: a writer and a reader."""

    name: str
    cluster: Cluster
    writer: Worker
    reader: Worker
    written: list[str] = field(default_factory=list)

    def run(self, op: str, keys: list[str], batch: int) -> dict[str, float]:
        """One run of ``op``; adds the servers' CPU time a call."""
        writes = op.startswith("put")
        before = self.cluster.cpu_s()
        figures: dict[str, float] = (self.writer if writes else self.reader).call("run", op=op, keys=keys, batch=batch)
        figures["server_cpu_us"] = (self.cluster.cpu_s() - before) / (len(keys) // batch) * 1e6
        self.written += keys if writes else []
        return figures

    def prepare(self, size: int, num_pieces: int) -> None:
        """Values and registered memory at both clients."""
        self.writer.call("prepare", size=size, num_pieces=num_pieces, filled=True)
        self.reader.call("prepare", size=size, num_pieces=num_pieces, filled=False)

    def clear(self) -> None:
        """Remove what was put, so that the next values have room."""
        self.writer.call("remove", keys=self.written)
        self.written.clear()


@dataclass
class Bench:
    """What takes part, and in which order."""

    chooser: random.Random
    rounds: int
    ops: Sequence[str]
    contestants: list[Contestant] = field(default_factory=list)
    samples: Samples = field(default_factory=dict)

    def shuffled(self) -> list[Contestant]:
        """Everybody once."""
        return self.chooser.sample(self.contestants, len(self.contestants))

    def add(self, name: str, op: str, figures: dict[str, float]) -> None:
        """Keep one run's figures."""
        self.samples.setdefault((name, op), []).append(figures)


def join(stack: contextlib.ExitStack, cluster: Cluster, size: int) -> list[Contestant]:
    """The contestants that use ``cluster``."""
    transports: tuple[str | None, ...] = (None, "tcp") if cluster.store == "tanghulu" else (None,)
    joined = []
    for transport in transports:
        more: dict[str, Any] = {}
        if cluster.store == "tanghulu":
            more = {"transport": transport}
        elif cluster.store == "mooncake":
            more = {"segment_bytes": 0, "buffer_bytes": max(64 << 20, 2 * BATCH * size)}
        name = cluster.store + (f" {transport or 'shm'}" if cluster.store == "tanghulu" else "")
        workers = []
        for role in ("writer", "reader"):
            worker = cluster.client(f"{name} {role}".replace(" ", "_"), **more)
            stack.callback(worker.close)
            workers.append(worker)
        joined.append(Contestant(name, cluster, *workers))
    return joined


def touch(each: Contestant, num_bytes: int) -> None:
    """Write and read values that fill most of the segment."""
    size = num_bytes >> 7
    each.prepare(size, TOUCHED_PIECES)
    keys = [f"{each.name}/touch/{number}" for number in range(int(0.85 * num_bytes) // size)]
    each.run("put", keys, 1)
    each.run("get", keys, 1)
    each.clear()


def measure_size(bench: Bench, size: int, batch: int) -> None:
    """All rounds of all operations on values of ``size`` bytes, ``batch`` a call."""
    singles, batches = COUNTS[size]
    limits = Limits(size, BATCH)
    for number in range(bench.rounds + 1):
        for op in LIMITS:
            figures = limits.measure(op, singles)
            if number:
                bench.add(op, "limit", figures)
        for put, get in PAIRS:
            if ("many" in put) != (batch > 1) or (put not in bench.ops and get not in bench.ops):
                continue
            keys = [f"{size}/{number}/{put}/{n:06d}/{bench.chooser.randbytes(8).hex()}"
                    for n in range(batches * batch if batch > 1 else singles)]  # fmt: skip
            for each in bench.shuffled():
                own = [f"{each.name}/{key}" for key in keys]
                for op in (put, get):
                    figures = each.run(op, own, batch)
                    if number:
                        bench.add(each.name, op, figures)
                each.clear()
    limits.close()


def measure_exists(bench: Bench) -> None:
    """One key and NUM_EXISTING keys a call, asked by the reader."""
    names = [f"exists/{n:08d}" for n in range(NUM_EXISTING)]
    for each in bench.contestants:
        each.run("put", [f"{each.name}/{name}" for name in names], 1)
    for number in range(bench.rounds + 1):
        for each in bench.shuffled():
            keys = [f"{each.name}/{name}" for name in names]
            one, many = each.run("exists", keys[:300], 1), each.run("exists_many", keys * 10, NUM_EXISTING)
            if number:
                bench.add(each.name, "exists", one)
                bench.add(each.name, "exists_many", many)


def open_all(
    stack: contextlib.ExitStack, stores: Sequence[str], size: int, num_bytes: int
) -> tuple[list[Contestant], dict[str, str]]:
    """Contestants of every store that can run here, and why the others cannot."""
    found: list[Contestant] = []
    missing: dict[str, str] = {}
    for store in stores:
        try:
            cluster = stack.enter_context(CLUSTERS[store](num_bytes))
            found += join(stack, cluster, size)
        except (Missing, WorkerFailed) as reason:
            missing[store] = str(reason)
            print(f"LEFT OUT: {store}: {reason}")
    return found, missing


def run_piece(options: argparse.Namespace, name: str, size: int, batch: int, measure: Callable[[Bench], None]) -> None:
    """Open everything, measure, close everything, keep the rows."""
    chooser = random.Random(options.seed)
    num_bytes = segment_bytes(size, batch)
    with contextlib.ExitStack() as stack:
        contestants, missing = open_all(stack, options.stores, size, num_bytes)
        bench = Bench(chooser, options.rounds, options.only, contestants)
        for each in contestants:
            touch(each, num_bytes)
            each.prepare(size, BATCH)
        measure(bench)
    save(options, name, size, bench.samples, missing)


def save(options: argparse.Namespace, name: str, size: int, samples: Samples, missing: dict[str, str]) -> None:
    """Keep one file's rows and show them."""
    rows = []
    for (who, op), runs in samples.items():
        batch = {"exists_many": NUM_EXISTING}.get(op, BATCH if "many" in op else 1)
        row: dict[str, Any] = {"who": who, "op": op, "size_bytes": size, "batch": batch, "rounds": len(runs)}
        row |= {key: round(statistics.median(run[key] for run in runs), 1) for key in runs[0]}
        row["least_p50_us"] = round(min(run["p50_us"] for run in runs), 1)
        rows.append(row)
    load = [round(each, 2) for each in os.getloadavg()]
    if not options.no_keep:
        print("kept in", keep(name, rows, seed=options.seed, load_average=load, left_out=missing))
    store_report.show(rows, load)


def measure_start(options: argparse.Namespace) -> None:
    """From the first command until the servers serve, and until a waiting client has put and got its first value."""
    samples: Samples = {}
    missing: dict[str, str] = {}
    chooser = random.Random(options.seed)
    for number in range(options.rounds + 1):
        for store in chooser.sample(options.stores, len(options.stores)):
            if store in missing:
                continue
            try:
                with CLUSTERS[store](256 << 20) as cluster:
                    figures = {"p50_us": cluster.ready_s * 1e6}
            except (Missing, WorkerFailed) as reason:
                missing[store] = str(reason)
                print(f"LEFT OUT: {store}: {reason}")
                continue
            if number:  # the first reads files, and keeps what it compiles
                samples.setdefault((store, "start"), []).append(figures)
    save(options, "store_compare-start", 0, samples, missing)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=store_report.parse_sizes, default=sorted(COUNTS))
    parser.add_argument("--stores", type=lambda text: text.split(","), default=list(CLUSTERS))
    parser.add_argument("--only", type=lambda text: text.split(","), default=PARTS, help=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-keep", action="store_true", help="do not write to results/")
    parser.add_argument("--summary", action="store_true", help="only show the kept figures beside the targets")
    options = parser.parse_args()
    for given, known in ((options.sizes, COUNTS), (options.stores, CLUSTERS), (options.only, PARTS)):
        unknown = [each for each in given if each not in known]
        if unknown:
            parser.error(f"unknown: {unknown}; choose from {list(known)}")
    return options


def main() -> None:
    options = parse()
    if not options.summary:
        for size in options.sizes:
            for batch, suffix in ((1, ""), (BATCH, "-batch")):
                if any(op in options.only for pair in PAIRS for op in pair if ("many" in op) == (batch > 1)):
                    measure = partial(measure_size, size=size, batch=batch)
                    run_piece(options, f"store_compare-{store_report.label(size)}{suffix}", size, batch, measure)
        if "exists" in options.only:
            run_piece(options, "store_compare-exists", 4 << 10, 1, measure_exists)
        if "start" in options.only:
            measure_start(options)
    store_report.summary()


if __name__ == "__main__":
    main()
