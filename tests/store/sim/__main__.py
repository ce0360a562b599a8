"""Many lives of a simulated store, by hand:

    python -m tests.store.sim --seeds 10000 [--first 0] [--nodes 100] [--shared] [--moves] [--seconds 60]

Prints a line a hundred seeds, and every seed that fails with what did not hold.
"""

from __future__ import annotations

import sys
from collections import Counter
from random import Random

from tests.store.sim.shared_world import SharedWorld
from tests.store.sim.world import Plan, World
from tests.virtual import seeds


def main() -> int:
    """Run the seeds; returns how many failed."""
    parser = seeds.parser(__doc__)
    parser.add_argument("--nodes", type=int, default=0, help="0: drawn for each seed")
    parser.add_argument("--shared", action="store_true", help="several masters share the ranges of keys")
    parser.add_argument("--moves", action="store_true", help="chunks move between nodes, many are removed at once")
    args = parser.parse_args()
    world = SharedWorld if args.shared else World

    def life(seed: int) -> Counter[str]:
        plan = None
        if args.moves:
            plan = Plan.moving(Random(f"{seed} moving"), shared=args.shared)
        elif args.nodes:
            plan = Plan.of(Random(seed), args.nodes)
        return world(seed, plan).run()

    return seeds.live("tests.store.sim", args, life)


if __name__ == "__main__":
    sys.exit(main() > 0)
