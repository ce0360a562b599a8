"""Write a routing policy in ten lines and replay it beside the built-in ones on a trace, in virtual time.

Needs nothing running. You will see a table: time to first token, time between tokens and the share of prompts found in
caches, for each policy on the same requests. The greedy policy here always goes where most of the prompt is cached,
however long the queue is there; the default, ttft-min, weighs one against the other.

    python examples/replay_policies.py [TRACE.jsonl[.gz], default: conversations made up here]
"""

import random
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tanghulu.conductor.replay.report import make_report, table
from tanghulu.conductor.replay.simulation import ClusterConfig, make_simulation
from tanghulu.conductor.replay.trace import TraceRequest, read_trace
from tanghulu.conductor.routing.policies.base import Decision, RequestView, RoutingPolicy, WorkerView
from tanghulu.conductor.routing.policies.registry import PolicyOptions, make_policy
from tanghulu.types import InstanceId


class Greedy:
    """Prefill where most of the prompt is cached, decode where the fewest requests run."""

    name, ranks = "greedy (ours)", False

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Decision | None:
        able = [worker for worker in workers if worker.can_prefill]
        decode = self.choose_decode(request, workers)
        best = max(able, key=lambda worker: (worker.match_blocks, -worker.wait_s), default=None)
        return Decision(best.id, decode) if best is not None and decode is not None else None

    def choose_decode(self, request: RequestView, workers: Sequence[WorkerView]) -> InstanceId | None:
        able = [worker for worker in workers if worker.can_decode]
        return min(able, key=lambda worker: worker.num_requests).id if able else None


def conversations(count: int) -> list[TraceRequest]:
    """Forty conversations; each begins with one of three texts of 8 blocks and grows by 2 blocks a turn."""
    drawn, arrival_s, requests = random.Random(7), 0.0, []
    grown = [list(range(8 * (number % 3), 8 * (number % 3) + 8)) for number in range(40)]
    for number in range(count):
        arrival_s += drawn.expovariate(20.0)
        blocks = grown[drawn.randrange(40)]
        blocks[8 if len(blocks) > 40 else len(blocks) :] = (100 + 2 * number, 101 + 2 * number)
        counted = number >= count // 3  # the caches fill first
        requests.append(TraceRequest(arrival_s, 512 * len(blocks), 200, tuple(blocks), "", counted))
    return requests


def main(trace: str) -> None:
    requests = read_trace(Path(trace), 0.45, "0.3") if trace else conversations(1500)
    title, reports = Path(trace).name or "conversations", []
    policies: list[RoutingPolicy] = [Greedy(), *(make_policy(name, PolicyOptions()) for name in ("random", "ttft-min"))]
    for policy in policies:
        simulation = make_simulation(ClusterConfig(num_prefill=4, num_decode=4, blocks=700), policy)
        jobs = simulation.run(requests)
        busy_s = [worker.busy_s for worker in simulation.prefills]
        reports.append(make_report(title, policy.name, jobs, busy_s, simulation.fetched_blocks, (5.0, 0.1)))
    Console(width=130).print(table(reports))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
