"""Early rejection: refuse a request that will miss its SLO before spending work on it.

Pure. Under overload, a queue without admission control serves every request late; a request refused at once can be sent
elsewhere. (Mooncake, FAST'25, section 5: rejection by the load predicted for the end of the prefill. Judging by the
current load makes the cluster oscillate: while many prefills are in progress decode looks idle and everything is
admitted; once they arrive it looks full and nothing is.) So all requests on their way to the decode worker count, and
of those decoding there now, the share that will have ended by then does not: with ages spread evenly over an answer's
expected life, ``ttft / life`` of them.

Example: SLOs of 5 s and 100 ms. The chosen worker's queue is 4.2 s and the prefill takes 1.1 s: 5.3 s, refused. With
0.6 s of prefill it is admitted, unless the decode worker would need more than 100 ms a step. 40 requests decode there,
10 are on their way, and answers have 400 tokens of 30 ms, a life of 12 s: in 4.8 s 24 of the 40 are left, so the step
has 24 + 10 + 1 sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tanghulu.conductor.routing.policies.base import (
    ASSUMED_DECODE_STEP_S,
    STEP_SHARE_OF_A_SEQUENCE,
    Decision,
    RequestView,
    WorkerView,
)
from tanghulu.conductor.routing.policies.fetching import best_source, best_start


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected latencies of a request, in seconds from now."""

    ttft_s: float
    tbt_s: float


def forecast(request: RequestView, workers: Sequence[WorkerView], decision: Decision) -> Forecast:
    """Forecast the first token by the chosen prefill worker's best path, and a decode step with one more sequence."""
    by_id = {w.id: w for w in workers}
    way = best_start(request, by_id[decision.prefill], best_source(workers))
    return Forecast(way.ttft_s, _tbt_s(request, by_id[decision.decode], way.ttft_s))


@dataclass(frozen=True, slots=True)
class Admission:
    """Bounds on TTFT and TBT; 0 means no bound."""

    ttft_slo_s: float = 0.0
    tbt_slo_s: float = 0.0

    def __bool__(self) -> bool:
        """Return whether anything can be refused."""
        return bool(self.ttft_slo_s or self.tbt_slo_s)

    def objection(self, seen: Forecast, waited_s: float = 0.0) -> str:
        """Return the reason to refuse the request, for people, or "" if admitted. ``waited_s``: its wait so far."""
        ttft_s = waited_s + seen.ttft_s
        if 0 < self.ttft_slo_s < ttft_s:
            return f"the first token would come after {ttft_s:.2f} s, later than {self.ttft_slo_s:g} s"
        if 0 < self.tbt_slo_s < seen.tbt_s:
            return f"a token would take {1000 * seen.tbt_s:.0f} ms, longer than {1000 * self.tbt_slo_s:.0f} ms"
        return ""


def _tbt_s(request: RequestView, worker: WorkerView, ttft_s: float) -> float:
    """Return the step time of ``worker`` in seconds once the request joins, ``ttft_s`` from now."""
    now = worker.num_requests - worker.coming_requests
    step_s = worker.decode_step_s or ASSUMED_DECODE_STEP_S
    life_s = request.mean_output * step_s
    staying = now * max(0.0, 1 - ttft_s / life_s) if life_s else now
    batch = staying + worker.coming_requests + 1
    if worker.decode_profile is None:
        return step_s * max(1.0, 1 + STEP_SHARE_OF_A_SEQUENCE * (batch - now))
    used_tokens = (worker.blocks_total - worker.blocks_free) * request.block_tokens
    share = (batch - 1) / worker.num_requests if worker.num_requests else 0.0
    return worker.decode_profile.seconds(batch, share * used_tokens + request.num_tokens)
