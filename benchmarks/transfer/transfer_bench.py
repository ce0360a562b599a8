"""The transfer engine beside the plain limits of the machine, Mooncake's transfer engine and NIXL (UCX), in one run.

    python -m benchmarks.transfer.transfer_bench [--sizes 64KiB,1MiB,16MiB,256MiB] [--who NAME,NAME] [--callers 1,2,4,8]
    python -m benchmarks.transfer.transfer_bench --summary

Each of them moves bytes between two processes (memmove: inside one), one request a call, for 1 to 8 callers (threads of
one process) with pieces of their own. A run goes on for a given time, long enough that to start and to end the threads
does not count. In each of five rounds all take turns, in an order that the seed shuffles; a figure is the median over
the rounds. A round that does not count warms up. Pieces rotate through areas larger than the caches. Every piece
carries stamps that are verified after each run. CPU seconds are those of both processes, per GB moved. Each size is
kept in a file of its own, so that a run can be made in pieces; --summary reads them all.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.report import keep
from benchmarks.peers import environments, transfer_report
from benchmarks.peers.environments import Missing
from benchmarks.peers.jsonlines import Worker, WorkerFailed, cpu_s
from benchmarks.peers.store_report import label, parse_sizes

WORKER = Path(__file__).parents[1] / "peers" / "mover_worker.py"
OPS = ("READ", "WRITE")
#: By size: most callers.
SIZES = {64 << 10: 8, 1 << 20: 8, 16 << 20: 8, 256 << 20: 1}
AREA_BYTES = 128 << 20


@dataclass(frozen=True)
class Entry:
    """Who takes part: the adapter, the environment of its packages, and settings of its two ends."""

    name: str
    kind: str
    environment: str = ""
    owner: tuple[tuple[str, Any], ...] = ()
    mover: tuple[tuple[str, Any], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    #: The environment whose packages our own interpreter borrows.
    packages: str = ""


ENTRIES = (
    Entry("memmove", "memmove"),
    Entry("tanghulu shm", "tanghulu", mover=(("transport", "shm"), ("streams", 1))),
    Entry("NIXL shm", "nixl", "nixl"),
    Entry("one stream", "stream"),
    Entry("tanghulu tcp", "tanghulu", mover=(("transport", "tcp"), ("streams", 1))),
    Entry("tanghulu tcp x2", "tanghulu", mover=(("transport", "tcp"), ("streams", 2))),
    Entry(
        "tanghulu ucx",
        "tanghulu",
        packages="nixl",
        owner=(("ucx", True),),
        mover=(("transport", "ucx"), ("streams", 1)),
    ),
    Entry("Mooncake tcp", "mooncake", "mooncake"),
    Entry("NIXL tcp", "nixl", "nixl", variables=(("UCX_TLS", "tcp,self"),)),
)


class Contestant:
    """An owner's process and a mover's."""

    def __init__(self, entry: Entry, area_bytes: int, folder: Path) -> None:
        self.name = entry.name
        packages, python = "", Path(sys.executable)
        if entry.environment:
            python = environments.interpreter(entry.environment)
        if entry.packages:
            environments.interpreter(entry.packages)
            packages = str(environments.packages_folder(entry.packages))
        variables = os.environ | {"GLOG_minloglevel": "2", "MC_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "ERROR"}
        self._workers: list[Worker] = []
        for role in ("owner", "mover"):
            name = f"{entry.name} {role}".replace(" ", "_")
            log = environments.logs() / f"{name}.log"
            self._workers.append(Worker(python, WORKER, log, variables | dict(entry.variables), name))
        self.owner, self.mover = self._workers
        settings: dict[str, Any] = {"area_bytes": area_bytes} | dict(entry.owner)
        if entry.kind == "tanghulu":
            own = folder / entry.name.replace(" ", "_")
            own.mkdir()
            settings["folder"] = str(own)
        offer = self.owner.call("own", kind=entry.kind, packages=packages, **settings)
        self.mover.call("open", kind=entry.kind, packages=packages, area_bytes=area_bytes, **dict(entry.mover), **offer)
        self._area_bytes = area_bytes
        self._has_owner = entry.kind != "memmove"
        self._number = 0

    def run(self, op: str, size: int, callers: int, seconds: float) -> dict[str, float]:
        """One run, its bytes verified; seconds of CPU time of both processes per GB."""
        self._number += 1
        source, destination = (self.owner, self.mover) if op == "READ" else (self.mover, self.owner)
        source.call("stamp", size=size, num_spots=self._area_bytes // size, number=self._number)
        before = cpu_s([self.owner.pid])
        figures = self.mover.call("run", op=op, size=size, callers=callers, seconds=seconds)
        owner_cpu_s = cpu_s([self.owner.pid]) - before
        if self._has_owner:
            destination.call("verify", size=size, spots=figures["spots"], number=self._number)
        gigabytes = size * figures["num_pieces"] / 1e9
        return {
            "p50_us": figures["p50_us"],
            "gb_s": gigabytes / figures["elapsed_s"],
            "mover_cpu_s_per_gb": figures["mover_cpu_s"] / gigabytes,
            "owner_cpu_s_per_gb": owner_cpu_s / gigabytes,
        }

    def close(self) -> None:
        """End both processes."""
        for worker in reversed(self._workers):
            worker.close()


def open_all(stack: contextlib.ExitStack, names: list[str], area_bytes: int) -> tuple[list[Contestant], dict[str, str]]:
    """Everybody who can run here, and why the others cannot."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
    found: list[Contestant] = []
    missing: dict[str, str] = {}
    for entry in ENTRIES:
        if entry.name not in names:
            continue
        try:
            found.append(Contestant(entry, area_bytes, folder))
            stack.callback(found[-1].close)
        except (Missing, WorkerFailed) as reason:
            missing[entry.name] = str(reason)
            print(f"LEFT OUT: {entry.name}: {reason}")
    return found, missing


def measure(options: argparse.Namespace, size: int) -> None:
    """All rounds of one size."""
    chooser = random.Random(options.seed)
    samples: dict[tuple[str, str, int], list[dict[str, float]]] = {}
    with contextlib.ExitStack() as stack:
        contestants, missing = open_all(stack, options.who, max(AREA_BYTES, size))
        for number in range(options.rounds + 1):
            for op in OPS:
                for callers in [each for each in options.callers if each <= SIZES[size]]:
                    for each in chooser.sample(contestants, len(contestants)):
                        figures = each.run(op, size, callers, options.seconds)
                        if number:
                            samples.setdefault((each.name, op, callers), []).append(figures)
    rows = []
    for (who, op, callers), runs in samples.items():
        row: dict[str, Any] = {"who": who, "op": op, "size_bytes": size, "callers": callers, "rounds": len(runs)}
        row |= {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}
        row["best_gb_s"] = round(max(run["gb_s"] for run in runs), 3)
        rows.append(row)
    load = [round(each, 2) for each in os.getloadavg()]
    if not options.no_keep:
        print("kept in", keep(f"transfer-{label(size)}", rows, seed=options.seed, load_average=load, left_out=missing))
    transfer_report.show(rows, load)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [entry.name for entry in ENTRIES]
    parser.add_argument("--sizes", type=parse_sizes, default=sorted(SIZES))
    parser.add_argument("--who", type=lambda text: text.split(","), default=names, help=", ".join(names))
    parser.add_argument("--callers", type=lambda text: [int(each) for each in text.split(",")], default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.2, help="of one run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-keep", action="store_true", help="do not write to results/")
    parser.add_argument("--summary", action="store_true", help="only show the kept figures beside the targets")
    options = parser.parse_args()
    for given, known in ((options.sizes, list(SIZES)), (options.who, names)):
        unknown = [each for each in given if each not in known]
        if unknown:
            parser.error(f"unknown: {unknown}; choose from {known}")
    return options


def main() -> None:
    options = parse()
    for size in () if options.summary else options.sizes:
        measure(options, size)
    transfer_report.summary()


if __name__ == "__main__":
    main()
