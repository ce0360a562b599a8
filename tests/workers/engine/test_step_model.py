"""What a step costs, learnt from steps: the constants come back, whatever is mixed in."""

from __future__ import annotations

import random

import pytest

from tanghulu.session.speed import MIN_STEPS, SpeedMeter, StepModel, StepWork

BUDGET = 2048


def seconds(work: StepWork, factor: float = 1.0) -> float:
    """A machine of known constants."""
    decode_s = 1e-4 * work.decode_sequences + 2.9e-8 * work.decode_context
    return factor * (0.02 + 9.5e-5 * work.prefill_tokens + 2.1e-9 * work.prefill_pairs + decode_s)


def chunk(draw: random.Random, with_decode: bool) -> StepWork:
    tokens, start = draw.choice([BUDGET, draw.randrange(100, BUDGET)]), BUDGET * draw.randrange(4)
    sequences = draw.randrange(20) if with_decode else 0
    return StepWork(tokens, (start + tokens) ** 2 - start**2, sequences, sequences * draw.randrange(100, 8000))


def decoding(draw: random.Random) -> StepWork:
    sequences = draw.randrange(1, 30)
    return StepWork(0, 0, sequences, sequences * draw.randrange(100, 8000))


def learnt(factor: float = 1.0, seed: int = 1, num_steps: int = 400) -> StepModel:
    draw, model = random.Random(seed), StepModel(BUDGET)
    for _ in range(num_steps):
        work = chunk(draw, True) if draw.random() < 0.3 else decoding(draw)
        model.step(work, seconds(work, factor) * draw.uniform(0.9, 1.1))
    return model


@pytest.mark.parametrize("factor", [1.0, 40.0])
def test_the_constants_of_a_machine_come_back(factor: float) -> None:
    model = learnt(factor)
    prefill, decode = model.prefill, model.decode
    assert prefill is not None
    assert decode is not None
    assert prefill.token_s == pytest.approx(factor * (9.5e-5 + 0.02 / BUDGET), rel=0.1)
    assert prefill.pair_s == pytest.approx(factor * 2.1e-9, rel=0.25)
    assert decode.fixed_s == pytest.approx(factor * 0.02, rel=0.1)
    whole = StepWork(0, 0, 16, 16 * 4000)
    assert decode.seconds(16, whole.decode_context) == pytest.approx(seconds(whole, factor), rel=0.05)


def test_nothing_is_said_before_there_were_prompts() -> None:
    draw, model = random.Random(2), StepModel(BUDGET)
    for _ in range(50):
        work = decoding(draw)
        model.step(work, seconds(work))
    assert model.prefill is None
    for _ in range(MIN_STEPS):
        work = chunk(draw, False)
        model.step(work, seconds(work))
    assert model.prefill is not None


def test_long_decoding_does_not_wash_prefill_out_and_a_slower_machine_is_noticed() -> None:
    draw, model = random.Random(3), learnt()
    before = model.prefill
    for _ in range(3000):
        work = decoding(draw)
        model.step(work, seconds(work))
    assert before is not None
    assert model.prefill is not None
    assert model.prefill.token_s == before.token_s
    for _ in range(1500):
        work = chunk(draw, False)
        model.step(work, seconds(work, 2.0))
    assert model.prefill.token_s == pytest.approx(2 * (9.5e-5 + 0.02 / BUDGET), rel=0.1)


def test_constants_are_never_negative() -> None:
    """Steps of one size whose times fall: nothing can be told apart, and nothing becomes absurd."""
    model = StepModel(512)
    for number in range(100):
        model.step(StepWork(512, 512 * 512), 0.1 - 0.0005 * number)
    costs = model.prefill
    assert costs is not None
    assert min(costs.fixed_s, costs.token_s, costs.pair_s) >= 0
    assert costs.token_s * 512 + costs.pair_s * 512 * 512 == pytest.approx(0.06, rel=0.5)


def test_a_worker_may_say_that_it_reads_from_no_other() -> None:
    meter = SpeedMeter(reads_peers=False)
    meter.read_from_peer(1 << 20, 0.1)
    assert meter.speeds.peer_bytes_per_s == 0
    meter = SpeedMeter()
    assert meter.speeds.peer_bytes_per_s == 1e9
    meter.read_from_peer(1 << 20, 0.5)
    assert meter.speeds.peer_bytes_per_s == 2 << 20


def test_the_share_of_time_spent_on_prompts_fades() -> None:
    """Ten seconds of prompts, then decodes: the example of `BusyShare`."""
    now = [100.0]
    meter = SpeedMeter(now_s=lambda: now[0])
    assert meter.speeds.prefill_share == 0
    for _ in range(100):
        now[0] += 0.1
        meter.step(512, 1, 0.1)
    assert meter.speeds.prefill_share == pytest.approx(0.632, abs=1e-3)
    for _ in range(100):
        now[0] += 0.1
        meter.step(8, 8, 0.02)
    assert meter.speeds.prefill_share == pytest.approx(0.233, abs=1e-3)
    for _ in range(1000):
        now[0] += 0.1
        meter.step(264, 8, 0.05)
    assert meter.speeds.prefill_share == pytest.approx(0.5, abs=0.01)
