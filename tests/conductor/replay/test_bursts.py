"""Bursts and skew on workers of both phases: the default policy against the best static split, found by search.

A static split sends a fixed share of the requests to each worker, in turns, and knows all of them in advance.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from tanghulu.conductor.replay.model import Job, LatencyModel
from tanghulu.conductor.replay.simulation import ClusterConfig, WholeSimulation
from tanghulu.conductor.replay.trace import TraceRequest
from tanghulu.conductor.routing.policies.base import Decision
from tanghulu.conductor.routing.policies.registry import make_policy

NUM_WORKERS = 3
#: Shares that the search tries, for each worker.
SHARES = range(7)
#: Time of the policy over that of the best split, at most.
BOUND = 1.2


@dataclass(frozen=True)
class Case:
    """Requests, the blocks that workers hold at first, and relative speeds."""

    requests: Sequence[TraceRequest]
    held: dict[int, Sequence[int]] = field(default_factory=dict)
    speeds: tuple[float, ...] = ()


class Split:
    """Sends requests to workers by fixed shares: always to the one that is furthest behind its share."""

    name, ranks = "split", True

    def __init__(self, shares: Sequence[int]) -> None:
        self._shares, self._sent = shares, [0] * len(shares)

    def choose(self, request, workers):
        able = [n for n, share in enumerate(self._shares) if share]
        place = min(able, key=lambda n: ((self._sent[n] + 1) / self._shares[n], n))
        self._sent[place] += 1
        return Decision(workers[place].id, workers[place].id)

    def choose_decode(self, request, workers):
        return workers[0].id


def request(number: int, arrival_s: float, num_tokens: int, output_tokens: int, prefix: Sequence[int] = ()):
    own = -(-num_tokens // 512) - len(prefix)
    return TraceRequest(
        arrival_s, num_tokens, output_tokens, (*prefix, *(10_000 * (number + 1) + n for n in range(own))), "", True
    )


PREFIX = tuple(range(20))
CASES = {
    "one prefix in a burst": Case([request(n, 0.0, 10_752, 100, PREFIX) for n in range(36)], {0: PREFIX}),
    "ten tenants, one hot": Case(
        [
            request(n, 0.05 * n, 8_192, 60, range(tenant * 100, tenant * 100 + 12))
            for n, tenant in enumerate(0 if n % 2 else n // 2 % 10 for n in range(60))
        ],
        {0: range(12)},
    ),
    "a long prompt among chats": Case(
        [request(0, 0.0, 65_536, 100), *(request(n, 0.1 * n, 2_048, 100) for n in range(1, 40))]
    ),
    "a worker at half speed": Case([request(n, 0.2 * n, 4_096, 100) for n in range(40)], speeds=(0.5,)),
    "a worker that joins cold": Case(
        [request(n, 0.05 * n, 10_752, 80, PREFIX) for n in range(40)], {0: PREFIX, 1: PREFIX}
    ),
}  # fmt: skip


def finished_s(case: Case, policy: object, seats: int) -> float:
    """Run the case; return the time at which its last answer ends."""
    config = ClusterConfig(num_workers=NUM_WORKERS, worker_speeds=case.speeds, model=LatencyModel(max_batch=seats))
    simulation = WholeSimulation(config, policy)
    for index, blocks in case.held.items():
        simulation.workers[index].cache.insert(tuple(blocks))
    return max(map(_end_s, simulation.run(case.requests, check=True)))


def _end_s(job: Job) -> float:
    assert job.ttft_s is not None
    return job.first_s + job.tbt_s * job.num_decode_steps


@pytest.mark.parametrize("seats", [8, 256])
@pytest.mark.parametrize("name", CASES)
def test_finishes_nearly_as_soon_as_the_best_static_split(name, seats):
    case = CASES[name]
    splits = [shares for shares in itertools.product(SHARES, repeat=NUM_WORKERS) if sum(shares) == max(SHARES)]
    best_s = min(finished_s(case, Split(shares), seats) for shares in splits)
    assert finished_s(case, make_policy("ttft-min"), seats) < BOUND * best_s
