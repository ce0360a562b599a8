"""How long a decision takes with a thousand workers: match, shortlist, views, policy; real CPU time, no network.

A thousand requests a second arrive in virtual time at 1,000 workers of both roles that prefill 10,000 tokens/s each. A
request is one of 4,000 prompts of 8 to 64 blocks that share prefixes; what was sent is in flight, then resident. Every
decision is timed by ``time.process_time_ns``. Prints one JSON line, with the machine's load.

    python -m benchmarks.conductor.routing_bench [--workers 1000] [--requests 5000] [--policy ttft-min] [--seed 0]
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import time

from tanghulu.conductor.index.prefix_index import PrefixIndex, Stored
from tanghulu.conductor.routing.in_flight import InFlightBlocks
from tanghulu.conductor.routing.policies.base import RequestView
from tanghulu.conductor.routing.policies.registry import POLICY_NAMES, make_policy
from tanghulu.conductor.routing.worker_state import LoadTracker
from tanghulu.conductor.routing.worker_views import shortlist
from tanghulu.session.load import WorkerLoad
from tanghulu.types import BlockHash, InstanceId, Place, Role

BLOCK_TOKENS = 64
TOKENS_PER_S = 10_000.0
ARRIVALS_PER_S = 1000.0


class SimulatedWorker:
    """A registered worker without its process."""

    role = Role.BOTH
    place = Place()

    def __init__(self, number: int) -> None:
        self.id = InstanceId(f"worker-{number:04d}")
        self.load = LoadTracker()
        self.load.report(
            WorkerLoad(blocks_total=100_000, blocks_free=50_000, prefill_tokens_per_s=TOKENS_PER_S, decode_step_s=0.02)
        )


def prompts(draw: random.Random) -> list[list[BlockHash]]:
    """Chains of hashes: 40 groups that share their first half."""
    groups = [[BlockHash(draw.randbytes(16)) for _ in range(draw.randint(4, 32))] for _ in range(40)]
    return [head + [BlockHash(draw.randbytes(16)) for _ in head] for head in draw.choices(groups, k=4000)]


def measure(args: argparse.Namespace) -> dict[str, object]:
    draw = random.Random(args.seed)
    chains = prompts(draw)
    workers = [SimulatedWorker(n) for n in range(args.workers)]
    by_id = {w.id: w for w in workers}
    index, in_flight, policy = PrefixIndex(), InFlightBlocks(), make_policy(args.policy)
    ends: list[tuple[float, str, InstanceId, list[BlockHash]]] = []
    spent_us = []
    for number in range(args.requests):
        now_s, hashes = number / ARRIVALS_PER_S, draw.choice(chains)
        while ends and ends[0][0] <= now_s:
            _, wire_id, worker_id, done = heapq.heappop(ends)
            by_id[worker_id].load.on_report(wire_id)
            in_flight.end(wire_id)
            index.apply(Stored(worker_id, done))
        request = RequestView(len(hashes) * BLOCK_TOKENS, BLOCK_TOKENS, 1 << 20)
        begin_ns = time.process_time_ns()
        hits, coming = index.match(hashes), in_flight.match(hashes)
        kept = shortlist(workers, hits, coming) if policy.ranks else workers
        views = [w.load.view(w.id, w.role, hits.get(w.id, 0), coming.get(w.id, 0), w.place) for w in kept]
        decision = policy.choose(request, views)
        spent_us.append((time.process_time_ns() - begin_ns) / 1000)
        assert decision is not None
        chosen = next(v for v in views if v.id == decision.prefill)
        rest = request.rest_tokens(chosen.match_blocks)
        in_flight.begin(f"r{number}", chosen.id, hashes)
        by_id[chosen.id].load.sent(f"r{number}", rest, len(hashes))
        heapq.heappush(ends, (now_s + chosen.wait_s + rest / TOKENS_PER_S, f"r{number}", chosen.id, hashes))
    spent_us.sort()
    share = {name: round(spent_us[int(q * len(spent_us))]) for name, q in (("p50_us", 0.5), ("p99_us", 0.99))}
    return {"policy": args.policy, "workers": args.workers, "requests": args.requests, "seed": args.seed, **share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--policy", choices=POLICY_NAMES, default="ttft-min")
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps({**measure(parser.parse_args()), "load_average": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
