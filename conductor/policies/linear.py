"""A linear score: alpha * hit + beta * (1 - load) + gamma * nearness, the highest wins.

``hit`` is the share of the prompt's blocks that the worker has or will have, ``load`` its queue over the longest queue
among the workers, ``nearness`` how near it stands to where the request came in (1 same host, 2/3 same rack, 1/3 same
zone). Gamma is small: nearness decides among workers that are about equal, and never moves a warm prompt to a cold
worker. Example with alpha = beta = 0.5, gamma = 0.05: A holds 60 % and has the longest queue, far away: 0.3. B holds
nothing and is half as loaded, in the same rack: 0.25 + 0.033 = 0.283. A it is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tanghulu.conductor.policies.base import Candidate, Decision, RequestView, WorkerView, prefillers
from tanghulu.conductor.policies.decode import best_decode, decide
from tanghulu.conductor.policies.fetching import nearest
from tanghulu.types import InstanceId

_LEAST_S = 1e-9


class Linear:
    """The linear score. A candidate's ``score`` is its negative, as the lowest score wins."""

    name = "linear"
    ranks = True

    def __init__(self, alpha: float = 0.5, beta: float = 0.5, gamma: float = 0.05, seed: int = 0) -> None:
        self._ties = random.Random(seed)
        self._alpha, self._beta, self._gamma = alpha, beta, gamma

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Decision | None:
        """The pair of highest score."""
        able = prefillers(workers)
        longest_s = max([_LEAST_S, *(w.wait_s for w in able)])
        return decide(request, workers, [self._candidate(request, w, longest_s) for w in able], self._ties)

    def choose_decode(self, request: RequestView, workers: Sequence[WorkerView]) -> InstanceId | None:
        """The decode worker of least cost."""
        return best_decode(request, workers, self._ties)

    def _candidate(self, request: RequestView, worker: WorkerView, longest_s: float) -> Candidate:
        hit = worker.match_blocks / request.num_blocks
        load, near = worker.wait_s / longest_s, nearest(request, worker)
        score = self._alpha * hit + self._beta * (1 - load) + self._gamma * near
        return Candidate(worker.id, "prefill", -score, (("hit", hit), ("load", load), ("nearness", near)))
