"""Many lives of a simulated store, by hand:

    python -m tests.store.sim --seeds 10000 [--first 0] [--nodes 100] [--shared] [--seconds 60]

Prints a line a hundred seeds, and every seed that fails with what did not hold.
"""

from __future__ import annotations

import sys
from random import Random

from tests.store.sim.shared_world import SharedWorld
from tests.store.sim.world import Plan, World
from tests.virtual import seeds


def main() -> int:
    """Run the seeds; returns how many failed."""
    parser = seeds.parser(__doc__)
    parser.add_argument("--nodes", type=int, default=0, help="0: drawn for each seed")
    parser.add_argument("--shared", action="store_true", help="several masters share the ranges of keys")
    args = parser.parse_args()
    if args.shared:
        return seeds.live("tests.store.sim", args, lambda seed: SharedWorld(seed).run())
    return seeds.live(
        "tests.store.sim",
        args,
        lambda seed: World(seed, Plan.of(Random(seed), args.nodes) if args.nodes else None).run(),
    )


if __name__ == "__main__":
    sys.exit(main() > 0)
