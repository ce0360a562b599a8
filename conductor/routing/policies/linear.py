"""A linear score: alpha * hit + beta * (1 - load) + gamma * nearness, the highest wins.

``hit`` is the share of the prompt's named blocks that the worker has or will have, ``load`` its queue over the longest
queue among the workers, ``nearness`` how near it stands to where the request came in (1 same host, 2/3 same rack, 1/3
same zone). Gamma is small: nearness decides among workers that are about equal, and never moves a warm prompt to a cold
worker. Example with alpha = beta = 0.5, gamma = 0.05: A holds 60 % and has the longest queue, far away: 0.3. B holds
nothing and is half as loaded, in the same rack: 0.25 + 0.033 = 0.283. A it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from tanghulu.conductor.routing.policies.base import Candidate, Decision, RequestView, WorkerView, nearness, prefillers
from tanghulu.conductor.routing.policies.decode import Ties, best_decode, decide
from tanghulu.types import InstanceId

_LEAST_S = 1e-9
_TERMS = ("hit", "load", "nearness")


class LinearPolicy:
    """The linear score. A candidate's ``score`` is its negative, as the lowest score wins."""

    name = "linear"
    ranks = True

    def __init__(self, alpha: float = 0.5, beta: float = 0.5, gamma: float = 0.05, seed: int = 0) -> None:
        self._ties = Ties(seed)
        self._alpha, self._beta, self._gamma = alpha, beta, gamma

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Decision | None:
        able = prefillers(workers)
        if not able:
            return None
        scores = [
            self._alpha * hit + self._beta * (1 - load) + self._gamma * near
            for hit, load, near in self._parts(request, able)
        ]
        draw = self._ties.prefill.random
        place = max((score, draw(), at) for at, score in enumerate(scores))[2]

        def explain() -> list[Candidate]:
            return [
                Candidate(w.id, "prefill", -score, tuple(zip(_TERMS, parts, strict=True)))
                for w, score, parts in zip(able, scores, self._parts(request, able), strict=True)
            ]

        return decide(request, workers, able[place], self._ties, explain)

    def choose_decode(self, request: RequestView, workers: Sequence[WorkerView]) -> InstanceId | None:
        return best_decode(request, workers, self._ties)

    def _parts(self, request: RequestView, able: Sequence[WorkerView]) -> list[tuple[float, float, float]]:
        """(hit, load, nearness) of each."""
        longest_s, num_blocks, place = (
            max(_LEAST_S, *[w.wait_s for w in able]),
            request.named_blocks or request.num_blocks,
            request.place,
        )
        parts, known, near = [], None, 0.0
        for worker in able:
            if worker.place is not known:
                known, near = worker.place, nearness(place, worker.place)
            parts.append((worker.match_blocks / num_blocks, worker.wait_s / longest_s, near))
        return parts
