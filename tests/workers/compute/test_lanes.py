"""Lanes: shares of equal work, each row in one of them, and the same logits and KV as in one."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.workers.compute import lanes as lanes_module
from tanghulu.workers.compute.forward_batch import ForwardBatch, LaneGate, LaneTurn, SequenceChunk, build_forward_batch
from tanghulu.workers.compute.kv_cache import KvCache, KvTensors
from tanghulu.workers.compute.lanes import LanedForward, cut_lanes, turns_of
from tanghulu.workers.compute.models.model import Model
from tanghulu.workers.engine.kv_layout import KvLayout
from tests.workers.tiny import BLOCK, VOCAB

ROW_CONTEXT = 2000.0


def _chunk(start: int, length: int, wants_logits: bool = True) -> SequenceChunk:
    return SequenceChunk(range(1000 + start, 1000 + start + length), start, (start, length), wants_logits)


def _work(chunk: SequenceChunk) -> float:
    return sum(1 + (at + 1) / ROW_CONTEXT for at in range(chunk.start, chunk.end))


def test_the_worked_examples() -> None:
    two = [_chunk(0, 300), _chunk(0, 300)]
    assert [[len(chunk.token_ids) for chunk in lane] for lane in cut_lanes(two, 2, ROW_CONTEXT)] == [[300], [300]]
    one, other = cut_lanes([_chunk(512, 512)], 2, ROW_CONTEXT)
    assert [(c.start, len(c.token_ids), c.wants_logits) for c in (*one, *other)] == [
        (512, 268, False),
        (780, 244, True),
    ]


@settings(max_examples=100, deadline=None)
@given(
    runs=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 600), st.booleans()), min_size=1, max_size=12),
    num_lanes=st.integers(1, 6),
)
def test_every_row_is_in_one_lane_and_the_work_is_shared(runs: list[tuple[int, int, bool]], num_lanes: int) -> None:
    chunks = [_chunk(*run) for run in runs]
    lanes = cut_lanes(chunks, num_lanes, ROW_CONTEXT)
    assert len(lanes) <= num_lanes
    rows = [(c.block_ids, c.start + i, token) for lane in lanes for c in lane for i, token in enumerate(c.token_ids)]
    assert rows == [(c.block_ids, c.start + i, token) for c in chunks for i, token in enumerate(c.token_ids)]
    wanted = [c.block_ids for lane in lanes for c in lane if c.wants_logits]
    assert wanted == [c.block_ids for c in chunks if c.wants_logits]
    assert all(c.token_ids for lane in lanes for c in lane)
    works = [sum(map(_work, lane)) for lane in lanes]
    heaviest_row = 1 + max(c.end for c in chunks) / ROW_CONTEXT
    assert max(works) <= sum(works) / num_lanes + 2 * heaviest_row


def test_lanes_wait_only_where_they_share_a_sequence() -> None:
    apart = turns_of([[_chunk(0, 4)], [_chunk(0, 4)]])
    apart[1].written(0)  # does not wait
    chunk = _chunk(0, 8)
    first, second = turns_of(cut_lanes([chunk], 2, ROW_CONTEXT))
    passed = threading.Event()
    waiter = threading.Thread(target=lambda: (second.written(0), passed.set()))
    waiter.start()
    assert not passed.is_set()
    first.written(0)
    waiter.join()
    assert passed.is_set()


def test_who_waits_for_a_lane_that_ended_early_is_told() -> None:
    gate = LaneGate()
    gate.open(0)
    first, second = LaneTurn(None, gate), LaneTurn(gate, None)
    first.end()
    second.written(0)
    with pytest.raises(RuntimeError, match="ended with 1 layers"):
        second.written(1)


@pytest.fixture
def as_before() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _chunks(rng: random.Random) -> list[SequenceChunk]:
    """Runs behind what a first step computed, and decodes, of 8 sequences with 16 blocks each."""
    found = []
    for index in range(8):
        length = 1 if rng.random() < 0.3 else rng.randint(2, 40)
        tokens = [rng.randrange(VOCAB) for _ in range(length)]
        blocks = tuple(range(16 * index, 16 * index + 16))
        found.append(SequenceChunk(tokens, rng.choice((0, 5, 8, 40)), blocks, rng.random() < 0.7))
    return found


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("threads", [2, 3, 4])
def test_lanes_compute_what_one_thread_does(tiny_model: Model, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(lanes_module, "LEAST_ROWS", 4)
    layout = KvLayout.of(tiny_model.config, BLOCK, "float32")
    torch.set_num_threads(threads)
    for seed in range(6):
        caches = [KvCache(layout, 128), KvCache(layout, 128)]
        history = torch.randn(caches[0].rows.shape, generator=torch.Generator().manual_seed(seed))
        for cache in caches:
            cache.rows.copy_(history)
        chunks = _chunks(random.Random(seed))
        expected = tiny_model.forward(build_forward_batch(chunks, BLOCK), caches[0])
        got = LanedForward(tiny_model, caches[1])(chunks)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(caches[1].rows, caches[0].rows, atol=1e-4, rtol=1e-4)
        assert torch.get_num_threads() == threads


class _Noting:
    """A model that notes the threads its forward passes run in, and fails in those of row ``fails_at``."""

    def __init__(self, model: Model, fails_at: int = -1) -> None:
        self._model, self._fails_at = model, fails_at
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self.threads: set[str] = set()

    def forward(self, batch: ForwardBatch, cache: KvTensors) -> torch.Tensor:
        self.threads.add(threading.current_thread().name)
        if self._fails_at in batch.positions:
            raise MemoryError("no room")
        return self._model.forward(batch, cache)


@pytest.mark.usefixtures("as_before")
def test_how_many_lanes(tiny_model: Model) -> None:
    cache = KvCache(KvLayout.of(tiny_model.config, BLOCK, "float32"), 40)
    torch.set_num_threads(2)
    for length, most_lanes, expected in ((63, 64, 1), (64, 64, 2), (256, 1, 1), (256, 64, 2)):
        noting = _Noting(tiny_model)
        LanedForward(noting, cache, most_lanes)([SequenceChunk(np.arange(length) % VOCAB, 0, range(40), True)])
        assert len(noting.threads) == expected
    torch.set_num_threads(1)
    alone = _Noting(tiny_model)
    LanedForward(alone, cache)([SequenceChunk(np.arange(256) % VOCAB, 0, range(40), True)])
    assert alone.threads == {threading.current_thread().name}


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("fails_at", [0, 255])
def test_a_lane_that_fails_fails_the_step_and_no_other_waits(tiny_model: Model, fails_at: int) -> None:
    cache = KvCache(KvLayout.of(tiny_model.config, BLOCK, "float32"), 40)
    torch.set_num_threads(2)
    forward = LanedForward(_Noting(tiny_model, fails_at), cache)
    chunk = SequenceChunk(np.arange(256) % VOCAB, 0, range(40), True)
    with pytest.raises(MemoryError, match="no room"):
        forward([chunk])
