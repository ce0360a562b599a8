"""Hit-rate curves of traces beside exhaustive simulation: deviations in points, for every policy and size.

    python -m benchmarks.conductor.curves TRACE... [--blocks 5000] [--policies lru,reuse] [--memory 1024,32]

``--memory``: MiB for the curve; with less it samples.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.common.report import keep
from tanghulu.conductor.curves.caches import Miniature, optimal_hits
from tanghulu.conductor.curves.curve import OPTIMUM, SIZES, Bounds, ModelCurve, spread
from tanghulu.conductor.replay.trace import TraceRequest, read_trace
from tanghulu.eviction import POLICIES, make_policy


def exhaustive(requests: Sequence[TraceRequest], policy: str, capacity: int) -> float:
    """The share of prompt tokens that a cache of all blocks has."""
    chains = [list(each.blocks + each.answer_blocks) for each in requests]
    if policy == OPTIMUM:
        hits = optimal_hits(chains, capacity)
    else:
        cache = Miniature(make_policy(policy), capacity)
        hits = [cache.request(chain) for chain in chains]
    pairs = zip(requests, hits, strict=True)
    cached = sum(min(min(hit, len(r.blocks)) * r.block_tokens, r.num_tokens - 1) for r, hit in pairs)
    return cached / sum(each.num_tokens for each in requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--blocks", type=int, default=5000)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--memory", default="1024,32")
    options = parser.parse_args()
    rows = []
    for path in options.traces:
        requests = read_trace(path, 1.0, "0")
        exact: dict[str, list[float]] = {}
        for policy in options.policies.split(","):
            for mebibytes in map(int, options.memory.split(",")):
                curve = ModelCurve(policy, options.blocks, Bounds.of_bytes(mebibytes << 20))
                began_s = time.process_time()
                for each in requests:
                    names = spread(each.blocks + each.answer_blocks)
                    curve.add("", names, round(each.num_tokens), len(each.blocks), each.block_tokens)
                us = (time.process_time() - began_s) / len(requests) * 1e6
                for name, shares in curve.curves()["*"].shares.items():
                    if name not in exact:
                        sizes = [max(1, round(size * options.blocks)) for size in SIZES]
                        exact[name] = [exhaustive(requests, name, size) for size in sizes]
                    if name != policy and policy != "lru":
                        continue
                    off = [100 * (a - b) for a, b in zip(shares, exact[name], strict=True)]
                    rows.append({"trace": path.name.split(".")[0], "policy": name, "memory_mib": mebibytes,
                                 "rate": round(curve.rate, 3), "us_per_request": round(us),
                                 "shares": shares, "off_points": off})  # fmt: skip
    table = Table("trace", "policy", "MiB", "rate", "worst", *(f"{size:g}x" for size in SIZES))
    for row in rows:
        off = row["off_points"]
        worst = max(map(abs, off))
        cells = (row["trace"], row["policy"], row["memory_mib"], row["rate"], f"{worst:.2f}")
        table.add_row(*map(str, cells), *(f"{each:+.2f}" for each in off))
    Console(width=160).print(table)
    print("kept in", keep("curves", rows, blocks=options.blocks))


if __name__ == "__main__":
    main()
