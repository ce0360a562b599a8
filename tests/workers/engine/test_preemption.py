"""Preempted requests whose blocks move to the store: right in any order of events, and less is computed again."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.errors import ConfigError
from tanghulu.session.outputs import KvSource
from tanghulu.types import BlockHash, RequestId
from tanghulu.workers.compute.models.model import Model
from tanghulu.workers.config import WorkerConfig
from tanghulu.workers.engine.engine import EngineCore, KvTransfers
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.engine.scheduler import EngineCoreConfig
from tanghulu.workers.engine.step import CommittedBlock, FetchWanted
from tanghulu.workers.mock.runner import TIMINGS, MockRunner
from tests.workers.rig import DictStore, Rig
from tests.workers.tiny import BLOCK, request, run_all

LAYOUT = KvLayout(1, BLOCK, 1, 2, "float32")
NUM_TOKENS = 24


class Outside(KvTransfers):
    """Keeps what is displaced, loses some of it, and fetches late. Nothing else is ever written to it."""

    can_fetch = True

    def __init__(self, rng: random.Random, loss: float) -> None:
        self.rng, self.loss = rng, loss
        self.kept: dict[BlockHash, bytes] = {}
        self.core: EngineCore
        self.under_way: list[FetchWanted] = []
        self.num_moved = self.num_loaded = 0

    def blocks_preempted(self, blocks: Sequence[CommittedBlock]) -> None:
        self.num_moved += len(blocks)
        for block in blocks:
            if self.rng.random() >= self.loss:
                self.kept[block.block_hash] = bytes(self.core.cache.block_view(block.block_id))

    def fetch(self, wanted: FetchWanted) -> None:
        self.under_way.append(wanted)

    def decline(self, peer: KvSource) -> None:
        raise AssertionError("there are no peers")

    def arrive(self) -> None:
        """One of the fetches ends."""
        wanted = self.under_way.pop(self.rng.randrange(len(self.under_way)))
        num_ok = 0
        for block, block_hash in zip(wanted.block_ids, wanted.block_hashes, strict=True):
            if block_hash not in self.kept:
                break
            self.core.cache.block_view(block)[:] = self.kept[block_hash]
            num_ok += 1
        self.num_loaded += num_ok
        self.core.fetch_done(wanted.request_id, num_ok)


def _core(outside: Outside | None, num_blocks: int, *, moves: bool, budget: int = 32) -> EngineCore:
    runner = MockRunner(
        LAYOUT,
        memoryview(bytearray(num_blocks * LAYOUT.block_bytes)),
        TIMINGS["gpu-8b"],
        text_ids=range(90),
        vocab=97,
        max_context=256,
        checks=True,
        deterministic=True,
        sleep=lambda seconds: None,
    )
    config = EngineCoreConfig(
        block_tokens=BLOCK, max_num_batched_tokens=budget, max_num_seqs=8, moves_preempted=moves, debug_checks=True
    )
    core = EngineCore(runner, config, outside)
    if outside is not None:
        outside.core = core
    return core


def _serve(outside: Outside, prompts: dict[str, list[int]], aborted: set[str]) -> tuple[dict[str, list[int]], int]:
    """The texts of ``prompts``, which come in by and by, and how many tokens were computed in all."""
    core, rng, waiting = outside.core, outside.rng, list(prompts)
    texts: dict[str, list[int]] = {}
    num_computed = 0
    for _ in range(6000):
        if waiting and rng.random() < 0.5:
            name = waiting.pop()
            core.add(request(name, prompts[name], NUM_TOKENS))
        if outside.under_way and rng.random() < 0.3:
            outside.arrive()
        if aborted and rng.random() < 0.02:
            core.abort(RequestId(rng.choice(sorted(aborted))))
        result = core.step()
        num_computed += result.num_computed_tokens
        for output in result.outputs:
            texts.setdefault(output.request_id, []).extend(output.tokens)
        if not (waiting or core.scheduler.has_work or outside.under_way):
            assert core.scheduler.pool.num_in_use == 0
            return texts, num_computed
    raise AssertionError(f"somebody starves: {core!r}")


def _prompts(rng: random.Random) -> dict[str, list[int]]:
    """Some begin alike."""
    stem = rng.choices(range(90), k=2 * BLOCK)
    made = {}
    for index in range(rng.randint(2, 8)):
        own = rng.choices(range(90), k=rng.randint(1, 5 * BLOCK))
        made[f"r{index}"] = stem * rng.randint(0, 1) + own
    return made


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**48))
def test_texts_are_right_whatever_moves_or_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    prompts, outside = _prompts(rng), Outside(rng, rng.choice((0.0, 0.1, 1.0)))
    _core(outside, rng.randint(11, 24), moves=rng.random() < 0.9, budget=rng.choice((8, 16, 64)))
    aborted = set(rng.sample(sorted(prompts), rng.randint(0, 1)))
    texts, _ = _serve(outside, prompts, aborted)
    roomy = _core(None, 128, moves=False)
    for name, prompt in prompts.items():
        roomy.add(request(name, prompt, NUM_TOKENS))
    for name, expected in run_all(roomy).items():
        text = texts.get(name, [])
        assert text == (expected[: len(text)] if name in aborted else expected)


def test_what_moved_is_not_computed_again() -> None:
    computed = {}
    for moves in (False, True):
        outside = Outside(random.Random(5), 0)
        _core(outside, 16, moves=moves)
        rng = random.Random(6)
        prompts = {f"r{index}": rng.choices(range(90), k=4 * BLOCK) for index in range(6)}
        _, computed[moves] = _serve(outside, prompts, set())
        assert (outside.num_moved > 0) is moves
        assert (outside.num_loaded > 0) is moves
    # Where nothing is recomputed each prompt and each generated token but the last is computed once.
    least = 6 * (4 * BLOCK + NUM_TOKENS - 1)
    assert computed[False] > least + 3 * BLOCK
    assert computed[True] - least < (computed[False] - least) / 2


def test_the_connector_moves_them_to_the_store_and_counts(tiny_model: Model) -> None:
    """Policy *none* writes nothing by itself, so all that the store has was moved there."""
    store = DictStore()
    rig = Rig(tiny_model, store, num_blocks=16, moves_preempted=True, store_policy="none")
    try:
        rng = random.Random(7)
        prompts = {f"r{index}": rng.choices(range(2, 90), k=4 * BLOCK) for index in range(6)}
        texts = rig.run_all(prompts, NUM_TOKENS)
        assert rig.value("preemptions_total") > 0
        moved = rig.value("preempted_blocks_total", to="store")
        assert moved == len(store.chunks) > 0
        assert rig.value("prefix_tokens_total", source="store") > 0
    finally:
        rig.close()
    calm = Rig(tiny_model, None)
    try:
        assert texts == calm.run_all(prompts, NUM_TOKENS)
    finally:
        calm.close()


def test_without_a_store_there_is_nowhere_to_move_them() -> None:
    with pytest.raises(ConfigError, match="--preemption store"):
        WorkerConfig(store=False, preemption="store")
