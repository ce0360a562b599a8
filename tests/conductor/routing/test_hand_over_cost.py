"""The estimate of a hand-over: what of the move outlasts the prefill, in the choice of a worker and in replay alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tanghulu.conductor.replay.model import LatencyModel
from tanghulu.conductor.routing.policies.base import (
    Candidate,
    PeerFetch,
    RequestView,
    WorkerView,
    hand_over_s,
    hidden_s,
)
from tanghulu.conductor.routing.policies.decode import moving
from tanghulu.conductor.routing.policies.ttft_min import TtftMin
from tanghulu.session.load import PrefillProfile
from tanghulu.types import InstanceId

PREFILL = WorkerView(InstanceId("p"), True, False, blocks_free=1000, blocks_total=1000, prefill_tokens_per_s=10_000)
NEAR = WorkerView(InstanceId("near"), False, True, 0, 20, 1000, 1000, 1e4, 0.02, 1e10)
FAR = WorkerView(InstanceId("far"), False, True, 0, 0, 1000, 1000, 1e4, 0.02, 1e9)
#: 8,000 tokens that compute for 0.8 s, 1 MB a block: 0.125 s over 1 GB/s.
REQUEST = RequestView(8000, 64, 1_000_000)


def move_s(request: RequestView, prefill: WorkerView, decode: WorkerView) -> float:
    decision = TtftMin().choose(request, [prefill, decode])
    assert decision is not None
    (candidate,) = [each for each in decision.candidates if each.phase == "decode"]
    return term(candidate, "move_s")


def term(candidate: Candidate, name: str) -> float:
    return dict(candidate.terms)[name]


def test_the_worked_example() -> None:
    prefill_s = PrefillProfile(token_s=1e-4, pair_s=1e-9).seconds(8000, 0)
    behind_s = hidden_s(prefill_s, 8000)
    assert behind_s == pytest.approx(0.81, abs=2e-3)
    assert hand_over_s(8000, 1 / 8000, behind_s) == pytest.approx(0.19, abs=2e-3)
    assert hand_over_s(8000, 0.1 / 8000, behind_s) == pytest.approx(0.1 * 512 / 8000)


def test_of_prefill_and_move_the_larger_counts() -> None:
    last_s, behind_s = 512 / 8000, 0.8 * (1 - 512 / 8000)
    assert move_s(REQUEST, PREFILL, FAR) == pytest.approx(0.125 * last_s)
    slow = replace(FAR, store_bytes_per_s=1e8)
    assert move_s(REQUEST, PREFILL, slow) == pytest.approx(1.25 - behind_s)


def test_nothing_is_hidden_behind_one_chunk() -> None:
    """Because it is short, or because the rest of it was there: cached, or fetched before."""
    short = RequestView(512, 64, 1_000_000)
    assert move_s(short, PREFILL, FAR) == pytest.approx(0.008)
    cached = replace(PREFILL, hit_blocks=118)
    assert move_s(REQUEST, cached, FAR) == pytest.approx(0.125)
    assert moving(REQUEST, PREFILL, PeerFetch(InstanceId("q"), 118)).hidden_s == 0
    assert moving(REQUEST, replace(PREFILL, hit_blocks=60), None).hidden_s == pytest.approx(0.416 * (1 - 512 / 4160))


def test_a_long_prefill_lets_a_request_decode_far_away() -> None:
    """Its KV is there as soon; only what could not be hidden would keep it at the busier worker."""
    crowd = replace(NEAR, num_requests=1)
    far = replace(FAR, store_bytes_per_s=2e8)  # 0.6 s, and the crowd adds 0.08 s
    decision = TtftMin().choose(REQUEST, [PREFILL, crowd, far])
    assert decision is not None
    assert decision.decode == "far"
    quick = replace(PREFILL, prefill_tokens_per_s=100_000)  # 0.08 s hide nearly nothing
    decision = TtftMin().choose(REQUEST, [quick, crowd, far])
    assert decision is not None
    assert decision.decode == "near"


@pytest.mark.parametrize("hit_blocks", [0, 60, 118])
@pytest.mark.parametrize("bytes_per_s", [1e8, 1e9, 1e11])
def test_replay_takes_what_the_policy_expects(hit_blocks: int, bytes_per_s: float) -> None:
    prefill, decode = replace(PREFILL, hit_blocks=hit_blocks), replace(FAR, store_bytes_per_s=bytes_per_s)
    model = LatencyModel(nic=bytes_per_s, layers=1, dim=1, gqa=1)
    scaled = REQUEST.block_bytes / REQUEST.block_tokens / model.kv_token_bytes
    model = LatencyModel(nic=bytes_per_s / scaled, layers=1, dim=1, gqa=1)
    prefill_s = prefill.prefill_s(REQUEST, hit_blocks)
    taken_s = model.hand_over_s(REQUEST.num_tokens, hit_blocks * REQUEST.block_tokens, prefill_s)
    assert move_s(REQUEST, prefill, decode) == pytest.approx(taken_s)
