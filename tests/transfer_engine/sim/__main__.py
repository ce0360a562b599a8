"""Run many seeds of the simulation by hand: python -m tests.transfer_engine.sim --seeds 10000."""

from __future__ import annotations

import argparse
import time

from tests.transfer_engine.sim.world import run_seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=100)
    options = parser.parse_args()
    start_s = time.monotonic()
    num_events = num_complete = num_failed = 0
    for seed in range(options.first, options.first + options.seeds):
        world = run_seed(seed)
        num_events += world.num_events
        num_complete += world.num_complete
        num_failed += world.num_failed
        if (seed + 1 - options.first) % 500 == 0:
            print(f"{seed + 1 - options.first} seeds, {time.monotonic() - start_s:.0f} s", flush=True)
    print(
        f"{options.seeds} seeds from {options.first} in {time.monotonic() - start_s:.0f} s: {num_events} events, "
        f"{num_complete} transfers complete, {num_failed} failed, no violation"
    )


if __name__ == "__main__":
    main()
