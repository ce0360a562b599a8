"""Many lives of a simulated cluster, by hand:

    python -m tests.cluster_sim --seeds 10000 [--first 0] [--seconds 60]

Prints a line a hundred seeds, and every seed that fails with what did not hold, and the plan of its life.
"""

from __future__ import annotations

import sys

from tests.cluster_sim.world import World
from tests.virtual import seeds


def main() -> int:
    """Run the seeds; returns how many failed."""
    return seeds.live("tests.cluster_sim", seeds.parser(__doc__).parse_args(), lambda seed: World(seed).run())


if __name__ == "__main__":
    sys.exit(main() > 0)
