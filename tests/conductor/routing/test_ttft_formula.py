"""The default policy's fast scores against its formula written out plainly."""

from __future__ import annotations

import math
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


def _token_s(w: WorkerView) -> float:
    return 1 / (w.prefill_tokens_per_s or 2000.0)


def _slowing_s(w: WorkerView) -> float:
    """Seconds that one more sequence adds to a step of a worker without a measured profile."""
    return max((w.decode_step_s or 0.02) / 16, 4 * _token_s(w))


def _slowdown(w: WorkerView) -> float:
    batch = max(0, w.num_requests - w.num_waiting)
    return 1 + _slowing_s(w) * batch / (512 * _token_s(w)) if w.can_decode else 1.0


def _disturbance(w: WorkerView) -> float:
    return w.prefill_share / (w.prefill_share + 0.1)


def _gap_s(w: WorkerView) -> float:
    """Time between tokens, with a chunk of a prompt in the disturbed share of the steps."""
    step_s = (w.decode_step_s or 0.02) + _slowing_s(w) * (1 + w.num_requests)
    return step_s + 512 * _token_s(w) * _disturbance(w)


def _answer_s(w: WorkerView) -> float:
    """The cost of an answer of 64 tokens, as no length is known, at a worker of both phases."""
    return 0.1 * 64 * (_gap_s(w) + w.num_requests * _slowing_s(w))


def _crowding(w: WorkerView, num_blocks: int) -> float:
    return min(1.0, 16 * num_blocks / w.blocks_total)


def _seat_s(w: WorkerView) -> float:
    seats = w.max_num_seqs
    return max(0, w.num_requests + 1 - seats) / seats * _gap_s(w) * 64 if seats else 0.0


def _decode_by_the_book(request: RequestView, w: WorkerView, able: list[WorkerView], compute_s: float) -> float:
    """Delay of others, a seat, and the answer: here, or at the worker where it costs least, with the move."""
    num_blocks = -(-request.num_tokens // request.block_tokens)
    delayed_s = min(compute_s, 0.1 * 64 * _gap_s(w))
    delay_s = 0.2 * (1 - _disturbance(w)) * max(0, w.num_requests - w.num_waiting) * delayed_s
    ways = [_answer_s(w)]
    other = min((v for v in able if v.can_decode), key=lambda v: _answer_s(v) + _seat_s(v))
    if other.blocks_free >= num_blocks:
        missing = (num_blocks - other.hit_blocks) * request.block_tokens
        token_s = (
            request.block_bytes / request.block_tokens / (other.peer_bytes_per_s or other.store_bytes_per_s or 1e9)
        )
        hit_tokens = max(w.hit_blocks, w.coming_blocks, request.store_hit_blocks) * request.block_tokens
        rest = max(1, request.num_tokens - hit_tokens)
        hidden_s = rest * _token_s(w) * (1 - 512 / rest) if rest > 512 else 0.0
        move_s = 3 * max(missing * token_s - hidden_s, min(missing, 512) * token_s) if missing > 0 else 0.0
        if missing > 0:
            hit = other.hit_blocks * request.block_tokens
            crowding = _crowding(other, num_blocks - other.hit_blocks)
            move_s += 3 * _gap_s(other) / 2 + 7 * crowding * max(1, request.num_tokens - hit) * _token_s(other)
        ways.append(_answer_s(other) + _seat_s(other) + (move_s if other.id != w.id else math.inf))
    return delay_s + _seat_s(w) + min(ways)


def _ttft_by_the_book(request: RequestView, w: WorkerView, able: list[WorkerView], weight: float, load: float) -> float:
    """The formula of the module in its plainest form, for the fast one to be compared with."""
    slowdown, crowding = _slowdown(w), 0.0
    if w.can_decode:
        crowding = _crowding(w, -(-request.num_tokens // request.block_tokens))
        shares = [v.prefill_share for v in able if v.can_decode]
        share = min(0.95, sum(shares) / len(shares))
        full, load = load, min(load, share / (1 - share)) / slowdown
        weight *= max(slowdown * load / full if full else 1.0, crowding) / slowdown

    def compute_s(blocks: int) -> float:
        return slowdown * max(1, request.num_tokens - blocks * request.block_tokens) * _token_s(w)

    wait_s = slowdown * w.queue_tokens * _token_s(w)
    match = max(w.hit_blocks, w.coming_blocks)
    most = max(match, *(v.hit_blocks for v in able))
    again_s = crowding * weight * (compute_s(match) - compute_s(most))
    ways = [(wait_s + compute_s(match), load * compute_s(match) + again_s, compute_s(match))]
    if w.peer_bytes_per_s and most > match:
        taken_s = max(0.0, min(v.send_wait_s for v in able if v.hit_blocks == most), w.receive_wait_s)
        fetch_s = taken_s + (most - match) * request.block_bytes / w.peer_bytes_per_s
        charge_s = weight * (compute_s(match) - compute_s(most)) + load * compute_s(most)
        ways.append((max(wait_s, fetch_s) + compute_s(most), charge_s, compute_s(most)))
    if request.store_hit_blocks > match:
        fetch_s = (request.store_hit_blocks - match) * request.block_bytes / (w.store_bytes_per_s or 1e9)
        rest_s = compute_s(request.store_hit_blocks)
        ways.append((max(wait_s, fetch_s) + rest_s, load * rest_s, rest_s))
    ttft_s, charge_s, computing_s = min(ways, key=lambda way: way[0])
    decode_s = _decode_by_the_book(request, w, able, computing_s) if w.can_decode else 0.0
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
        num_waiting=st.integers(0, 4),
        prefill_share=st.sampled_from([0.0, 0.4, 1.0]),
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
    # One that only decodes, and is no place for an answer.
    full = worker("d", Role.DECODE, num_requests=1_000_000)
    decision = TtftMin(weight, load_weight=load).choose(request, [*workers, full])
    scores = {c.worker: c.score for c in decision.candidates if c.phase == "prefill"}
    expected = {w.id: _ttft_by_the_book(request, w, workers, weight, load) for w in workers}
    assert scores == pytest.approx(expected)
    assert scores[decision.prefill] == min(scores.values())
    waits = {w.id: w.wait_s * w.slowdown for w in workers}
    for candidate in decision.candidates:
        terms = dict(candidate.terms)
        if candidate.phase == "prefill":
            parts = sum(value for name, value in terms.items() if name not in ("queue_s", "fetch_s", "hit_blocks"))
            assert candidate.score == pytest.approx(parts + max(waits[candidate.worker], terms["fetch_s"]))
        else:
            assert candidate.score == pytest.approx(sum(terms.values()))
    decodes = {c.worker: c.score for c in decision.candidates if c.phase == "decode"}
    assert decodes[decision.decode] == min(decodes.values())
