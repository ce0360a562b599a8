"""Many lives of a simulated store, by hand:

    python -m tests.store.sim --seeds 10000 [--first 0] [--nodes 100] [--seconds 60]

Prints a line a hundred seeds, and every seed that fails with what did not hold.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from random import Random

from tanghulu.errors import TanghuluError
from tests.store.sim.world import Plan, World


def main() -> int:
    """Run the seeds; returns how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=0, help="0: drawn for each seed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no seed after so long")
    args = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of strings is part of a life
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.store.sim", *sys.argv[1:]],
            os.environ | {"PYTHONHASHSEED": "0"},
        )
    failed, counts, began_s = 0, Counter[str](), time.monotonic()
    num_done = 0
    for seed in range(args.first, args.first + args.seeds):
        if time.monotonic() - began_s > args.seconds:
            break
        num_done += 1
        try:
            counts += World(seed, Plan.of(Random(seed), args.nodes) if args.nodes else None).run()
        except (AssertionError, TanghuluError) as error:
            failed += 1
            print(f"FAILED seed {seed}: {type(error).__name__}: {error}", flush=True)
        if (seed + 1 - args.first) % 100 == 0:
            print(f"{seed + 1 - args.first} seeds, {failed} failed, {time.monotonic() - began_s:.0f} s", flush=True)
    print(f"{num_done} seeds, {failed} failed: {dict(counts.most_common())}")
    return failed


if __name__ == "__main__":
    sys.exit(main() > 0)
