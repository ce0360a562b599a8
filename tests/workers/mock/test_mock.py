"""The mock engine: takes as long as its timing says, draws repeatable text, and finds wrong KV."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer

from tanghulu.session.outputs import FinishReason, KvSource
from tanghulu.session.sampling import Sampling
from tanghulu.types import RequestId
from tanghulu.workers.config import WorkerConfig
from tanghulu.workers.engine.block_pool import KvEventKind
from tanghulu.workers.engine.engine import EngineCore, KvTransfers
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.engine.scheduler import EngineCoreConfig
from tanghulu.workers.engine.step import FetchWanted
from tanghulu.workers.mock import loading as mock_loading
from tanghulu.workers.mock import runner as mock_runner
from tanghulu.workers.mock.loading import DECODE_TOKENS, MOST_S, HoldingRunner
from tanghulu.workers.mock.runner import TIMINGS, MockRunner, MockTiming
from tests.workers.peers import export_at
from tests.workers.tiny import BLOCK, request, run_all

LAYOUT = KvLayout(1, BLOCK, 1, 2, "float32")
TIMING = MockTiming(step_s=10.0, token_s=1.0, pair_s=0.01, sequence_s=2.0, context_s=0.1)
PROMPT = random.Random(4).choices(range(90), k=21)


class Rig:
    """An engine over the mock whose sleeps are noted down instead of slept."""

    def __init__(self, transfers: KvTransfers | None = None, **more: bool) -> None:
        self.slept: list[float] = []
        self.runner = MockRunner(
            LAYOUT,
            memoryview(bytearray(64 * LAYOUT.block_bytes)),
            TIMING,
            text_ids=range(90),
            vocab=97,
            max_context=256,
            checks=True,
            sleep=self.slept.append,
            **more,
        )
        config = EngineCoreConfig(block_tokens=BLOCK, max_num_batched_tokens=64, debug_checks=True)
        self.core = EngineCore(self.runner, config, transfers)


def test_a_step_takes_what_the_timing_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mock_runner, "time", SimpleNamespace(monotonic=lambda: 7.0))  # its own work takes no time
    rig = Rig()
    rig.core.add(request("a", PROMPT, 2))
    rig.core.step()
    rig.core.step()
    prefill, decode = 10 + 21 + 0.01 * 21**2, 10 + 2 + 0.1 * 21
    assert rig.slept == pytest.approx([prefill, decode])


def test_faster_by_the_speedup() -> None:
    slow, fast = TIMINGS["gpu-70b"], MockTiming(0.02, 9.5e-5, 2.1e-9, 1e-4, 2.9e-8, speedup=4.0)
    core = Rig().core
    core.add(request("a", PROMPT, 1))
    plan = core.scheduler.schedule()
    assert slow.step_seconds(plan) == pytest.approx(4 * fast.step_seconds(plan))


@pytest.mark.parametrize("deterministic", [True, False])
def test_text_depends_on_prompt_or_seed_alone(deterministic: bool) -> None:
    def text(seed: int, prompt: Sequence[int], *others: Sequence[int]) -> list[int]:
        core = Rig(deterministic=deterministic).core
        for number, other in enumerate(others):
            core.add(request(f"other-{number}", other, 5))
        core.add(request("a", prompt, 12, sampling=Sampling(seed=seed)))
        return run_all(core)["a"]

    alone = text(1, PROMPT)
    assert alone == text(1, PROMPT, PROMPT[:9], PROMPT[3:])
    assert (alone == text(2, PROMPT)) is deterministic
    assert (alone == text(1, [*PROMPT, 5])) is not deterministic


def test_a_prefix_is_cached_and_told_of() -> None:
    core = Rig().core
    core.add(request("a", PROMPT, 1))
    first = core.step()
    core.add(request("b", PROMPT, 1))
    second = core.step()
    assert [e.kind for e in first.kv_events] == [KvEventKind.STORED] * 2
    assert (first.outputs[0].cached_tokens, second.outputs[0].cached_tokens) == (0, 16)
    assert second.num_computed_tokens == 5


class Copying(KvTransfers):
    """A fetcher that brings another engine's blocks, torn where it is told so."""

    can_fetch = True

    def __init__(self, source: EngineCore, source_ids: Sequence[int], torn: bool) -> None:
        self._source, self._ids, self._torn = source, source_ids, torn
        self.core: EngineCore
        self.wanted: list[FetchWanted] = []

    def decline(self, peer: KvSource) -> None:
        raise AssertionError(f"{peer} is needed")

    def fetch(self, wanted: FetchWanted) -> None:
        for theirs, ours in zip(self._ids, wanted.block_ids, strict=True):
            self.core.cache.block_view(ours)[:] = self._source.cache.block_view(theirs)
        if self._torn:
            self.core.cache.block_view(wanted.block_ids[-1])[: LAYOUT.block_bytes // 2] = bytes(LAYOUT.block_bytes // 2)
        self.wanted.append(wanted)


@pytest.mark.parametrize("torn", [False, True])
def test_a_torn_hand_over_is_found(torn: bool) -> None:
    prefill = Rig().core
    prefill.add(request("a", PROMPT, 4, hold_kv=True))
    output = prefill.step().outputs[0]
    export = prefill.scheduler.exports.get(RequestId("a"))
    assert output.finish is FinishReason.HANDED_OVER
    assert export is not None
    copying = Copying(prefill, export.block_ids, torn)
    copying.core = decode = Rig(copying).core
    tokens = [*PROMPT, *output.tokens]
    decode.add(request("a", tokens, 4, num_prompt=len(PROMPT), peer=export_at("p", 1, export.num_tokens)))
    decode.step()
    decode.fetch_done(RequestId("a"), len(copying.wanted[0].block_ids))
    if torn:
        with pytest.raises(AssertionError, match="wrong KV in block 2 of request a"):
            decode.step()
    else:
        assert decode.step().num_computed_tokens == 1


def test_logprobs_say_that_all_texts_are_equally_likely() -> None:
    core = Rig().core
    core.add(request("a", PROMPT, 1, sampling=Sampling(num_logprobs=3)))
    (logprobs,) = core.step().outputs[0].logprobs
    assert logprobs is not None
    assert logprobs.logprobs == (-np.log(90),) * 4


@pytest.mark.parametrize("model", ["mock", "smollm2"])
def test_its_text_reads_as_words_and_ends_in_nothing_special(model: str, smollm2: object) -> None:
    config = WorkerConfig(model=model, engine="mock", mock_speedup=1000.0, block_tokens=BLOCK)
    loaded = mock_loading.load(config, lambda fraction: None)
    tokenizer = Tokenizer.from_buffer(loaded.assets.tokenizer_json)
    runner = loaded.make_runner(memoryview(bytearray(1 << 20)))
    core = EngineCore(runner, EngineCoreConfig(block_tokens=BLOCK))
    core.add(request("a", tokenizer.encode("Hello, world: äöü 漢字").ids, 30, sampling=Sampling()))
    tokens = run_all(core)["a"]
    text = tokenizer.decode(tokens)
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyz ")
    assert len(text) >= 30
    assert not set(loaded.assets.eos_ids) & set(tokens)


def test_it_never_imports_torch() -> None:
    code = "import sys, tanghulu.workers.mock.loading, tanghulu.workers.assembly; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_file_holds_the_engine_before_the_step_that_it_names(tmp_path: Path) -> None:
    """Each hold takes place once, at its own moment, and ends when its file is gone."""
    seen: list[tuple[str, int]] = []

    def release(_: float) -> None:
        held = next(tmp_path.glob("*.held"))
        seen.append((held.name, len(told)))
        held.unlink()

    told: list[int] = []
    core = EngineCore(HoldingRunner(Rig().runner, tmp_path, release), EngineCoreConfig(block_tokens=BLOCK))
    (tmp_path / "decode").touch()
    (tmp_path / "prefill").touch()
    core.add(request("a", PROMPT, DECODE_TOKENS + 4))
    while core.scheduler.has_work:
        told += [token for output in core.step().outputs for token in output.tokens]
    assert seen == [("prefill.held", 0), ("decode.held", DECODE_TOKENS + 1)]
    (tmp_path / "step").touch()
    core.add(request("b", PROMPT, 2))
    core.step()
    assert seen[2:] == [("step.held", DECODE_TOKENS + 4)]
    assert not list(tmp_path.iterdir())


def test_a_hold_that_nobody_ends_ends_by_itself(tmp_path: Path) -> None:
    slept: list[float] = []
    core = EngineCore(HoldingRunner(Rig().runner, tmp_path, slept.append), EngineCoreConfig(block_tokens=BLOCK))
    (tmp_path / "step").touch()
    core.add(request("a", PROMPT, 2))
    core.step()
    assert sum(slept) == pytest.approx(MOST_S)
