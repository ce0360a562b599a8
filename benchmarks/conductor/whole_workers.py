"""Routing policies on workers of both phases, in virtual time: TTFT and goodput at shares of the saturating load.

A trace saturates at the highest speed at which, under the better of `linear` and `mooncake`, the mean TTFT stays below
SATURATED_S; it is found by bisection. Loads are shares of that speed. Goodput counts requests with a TTFT of at most 2
s and at most 50 ms between tokens (the mean of the longest tenth of its gaps).

    python -m benchmarks.conductor.whole_workers TRACE… [--workers 8] [--loads 0.5,0.8,0.95] [--keep]

``--speeds RESULTS`` takes the speeds from results kept earlier, which saves the search.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from benchmarks.common import report
from tanghulu.conductor.replay.main import ReplayConfig, replay
from tanghulu.conductor.replay.report import ReplayReport

OTHERS = ("linear", "dynamo", "least-loaded", "mooncake")
SATURATED_S = 5.0
_STEPS = 5


def run(trace: Path, workers: int, speedup: float, policies: tuple[str, ...]) -> list[ReplayReport]:
    """Replay ``trace`` with each policy; the first half warms up."""
    config = ReplayConfig(
        traces=(trace,),
        policy=",".join(policies),
        workers=workers,
        speedup=speedup,
        ttft_slo=2.0,
        tbt_slo=0.05,
    )
    return list(replay(config))


def saturating_speed(trace: Path, workers: int) -> float:
    """Return the speed at which the trace saturates the workers."""
    low = high = 1.0
    while min(r.ttft_mean_s for r in run(trace, workers, high, ("linear", "mooncake"))) < SATURATED_S:
        low, high = high, 2 * high
    while low == high:
        low /= 2
        if min(r.ttft_mean_s for r in run(trace, workers, low, ("linear", "mooncake"))) >= SATURATED_S:
            high = low
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        fits = min(r.ttft_mean_s for r in run(trace, workers, middle, ("linear", "mooncake"))) < SATURATED_S
        low, high = (middle, high) if fits else (low, middle)
    return low


def kept_speed(trace: Path, results: Path) -> float:
    """Return the saturating speed of a trace by ``results`` of this benchmark."""
    rows = json.loads(results.read_text())["rows"]
    return float(next(r["speedup"] / r["load"] for r in reversed(rows) if r["trace"] == trace.name.split(".")[0]))


def row(trace: Path, load: float, speed: float, reports: list[ReplayReport]) -> dict[str, object]:
    """Compare the first report, of the default policy, with the best of the others in each figure."""
    own, others = reports[0], reports[1:]
    return {
        "trace": trace.name.split(".")[0],
        "load": load,
        "speedup": round(speed, 3),
        "ttft_mean_s": own.ttft_mean_s,
        "ttft_p99_s": own.ttft_p99_s,
        "good": own.good_requests,
        "best_mean_s": min(r.ttft_mean_s for r in others),
        "best_p99_s": min(r.ttft_p99_s for r in others),
        "best_good": max(r.good_requests for r in others),
        "mean_ratio": own.ttft_mean_s / min(r.ttft_mean_s for r in others),
        "p99_ratio": own.ttft_p99_s / min(r.ttft_p99_s for r in others),
        "good_ratio": own.good_requests / max(max(r.good_requests for r in others), 1e-9),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--loads", default="0.5,0.65,0.8,0.95")
    parser.add_argument("--speeds", type=Path, help="results with the traces' speeds")
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    load_before = os.getloadavg()
    rows = []
    for trace in args.traces:
        saturating = kept_speed(trace, args.speeds) if args.speeds else saturating_speed(trace, args.workers)
        for load in map(float, args.loads.split(",")):
            found = row(
                trace, load, load * saturating, run(trace, args.workers, load * saturating, ("ttft-min", *OTHERS))
            )
            rows.append(found)
            print(
                {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()},
                flush=True,
            )
    if args.keep:
        print(report.keep("whole_workers", rows, seed=0, load_before=load_before, load_after=os.getloadavg()))


if __name__ == "__main__":
    main()
