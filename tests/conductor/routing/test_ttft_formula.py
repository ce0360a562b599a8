"""The default policy's fast scores against its formula written out plainly."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.conductor.routing.policies.base import RequestView, WorkerView
from tanghulu.conductor.routing.policies.ttft_min import TtftMin
from tanghulu.types import InstanceId, Role

REQUEST = RequestView(num_tokens=6400, block_tokens=64, block_bytes=2 << 20)


def worker(name: str, role: Role = Role.BOTH, **more: float) -> WorkerView:
    view = WorkerView(InstanceId(name), role.prefills, role.decodes, blocks_free=1000, blocks_total=1000)
    return replace(view, prefill_tokens_per_s=10_000, store_bytes_per_s=2e9, decode_step_s=0.02, **more)


def _ttft_by_the_book(request: RequestView, w: WorkerView, able: list[WorkerView], weight: float, load: float) -> float:
    """The formula of the module in its plainest form, for the fast one to be compared with."""

    def compute_s(blocks: int) -> float:
        return max(1, request.num_tokens - blocks * request.block_tokens) / (w.prefill_tokens_per_s or 2000.0)

    wait_s = w.queue_tokens / (w.prefill_tokens_per_s or 2000.0)
    match = max(w.hit_blocks, w.coming_blocks)
    ways = [(wait_s + compute_s(match), load * compute_s(match))]
    most = max(v.hit_blocks for v in able)
    if w.peer_bytes_per_s and most > match:
        taken_s = max(0.0, min(v.send_wait_s for v in able if v.hit_blocks == most), w.receive_wait_s)
        fetch_s = taken_s + (most - match) * request.block_bytes / w.peer_bytes_per_s
        ways.append(
            (
                max(wait_s, fetch_s) + compute_s(most),
                weight * (compute_s(match) - compute_s(most)) + load * compute_s(most),
            )
        )
    if request.store_hit_blocks > match:
        fetch_s = (request.store_hit_blocks - match) * request.block_bytes / (w.store_bytes_per_s or 1e9)
        rest_s = compute_s(request.store_hit_blocks)
        ways.append((max(wait_s, fetch_s) + rest_s, load * rest_s))
    ttft_s, charge_s = min(ways, key=lambda way: way[0])
    decode_s = 0.0
    if w.can_decode:
        step_s, seats = w.decode_step_s or 0.02, w.max_num_seqs
        sequence_s = max(step_s / 16, 4 / (w.prefill_tokens_per_s or 2000.0))
        decode_s = 2 * 64 * sequence_s * w.num_requests  # no answer's length is known: judged over 64 tokens
        decode_s += max(0, w.num_requests + 1 - seats) / seats * step_s * 64 if seats else 0.0
    room_s = 1000.0 if w.blocks_free < -(-request.num_tokens // request.block_tokens) - w.hit_blocks else 0.0
    return ttft_s + charge_s + decode_s + room_s


BUSY_WORKERS = st.lists(
    st.builds(
        WorkerView,
        id=st.integers(0, 40).map(lambda n: InstanceId(f"w{n}")),
        can_prefill=st.just(True),
        can_decode=st.booleans(),
        queue_tokens=st.sampled_from([0, 500, 60_000]),
        num_requests=st.integers(0, 3),
        blocks_free=st.sampled_from([10, 1000]),
        blocks_total=st.just(1000),
        prefill_tokens_per_s=st.sampled_from([0.0, 1000.0, 50_000.0]),
        decode_step_s=st.sampled_from([0.0, 0.01]),
        max_num_seqs=st.sampled_from([0, 2, 32]),
        store_bytes_per_s=st.sampled_from([0.0, 1e8, 1e10]),
        hit_blocks=st.sampled_from([0, 0, 5, 60]),
        coming_blocks=st.sampled_from([0, 0, 40, 100]),
        peer_bytes_per_s=st.sampled_from([0.0, 1e8, 1e11]),
        send_wait_s=st.sampled_from([-3.0, 0.0, 0.5]),
        receive_wait_s=st.sampled_from([-1.0, 0.2]),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda w: w.id,
)


@settings(max_examples=200)
@given(
    BUSY_WORKERS,
    st.integers(1, 6400),
    st.sampled_from([0, 30, 100]),
    st.sampled_from([0.0, 1.0, 2.0]),
    st.sampled_from([0.0, 6.0]),
)
def test_fast_scores_are_the_plain_formula_and_their_terms(workers, num_tokens, in_store, weight, load):
    request = RequestView(num_tokens, 64, 1 << 20, min(in_store, num_tokens // 64))
    decision = TtftMin(weight, load_weight=load).choose(request, [*workers, worker("d", Role.DECODE)])
    scores = {c.worker: c.score for c in decision.candidates if c.phase == "prefill"}
    expected = {w.id: _ttft_by_the_book(request, w, workers, weight, load) for w in workers}
    assert scores == pytest.approx(expected)
    assert scores[decision.prefill] == min(scores.values())
    waits = {w.id: w.wait_s for w in workers}
    for candidate in decision.candidates:
        terms = dict(candidate.terms)
        if candidate.phase == "prefill":
            parts = sum(terms[name] for name in ("copy_s", "batch_s", "seat_s", "no_room_s", "compute_s", "load_s"))
            assert candidate.score == pytest.approx(parts + max(waits[candidate.worker], terms["fetch_s"]))
        else:
            assert candidate.score == pytest.approx(sum(terms.values()))
    decodes = {c.worker: c.score for c in decision.candidates if c.phase == "decode"}
    assert decodes[decision.decode] == min(decodes.values())
