"""Logits and greedy text equal transformers' for every architecture, however the tokens are cut into steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tanghulu.errors import ModelUnsupported
from tanghulu.types import RequestId
from tanghulu.workers.compute.device import CPU, CpuFeatures
from tanghulu.workers.compute.forward_batch import SequenceChunk, build_forward_batch
from tanghulu.workers.compute.kv_cache import KvCache
from tanghulu.workers.compute.linear import Arithmetic
from tanghulu.workers.compute.models.layers import Norm
from tanghulu.workers.compute.models.model import Model, dtype_name, load_model, pick_dtype
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.weights import resolve_model
from tests.workers.cpus import each_cpu
from tests.workers.tiny import BLOCK, VOCAB, TinyModel, engine, request, run_all, write_tiny

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True, "num_key_value_heads": 6},
    "llama3-rope": {"rope_scaling": LLAMA3_ROPE},
    "linear-rope": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
}


NUM_GREEDY = 40


def _prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(2, VOCAB), k=length)


def _logits_in_runs(model: Model, tokens: list[int], cuts: list[int], seed: int) -> torch.Tensor:
    """Logits of the last token of every run, the sequence computed run by run over shuffled blocks."""
    cache = KvCache(KvLayout.of(model.config, BLOCK, "float32"), 40)
    blocks = random.Random(seed).sample(range(40), 30)
    rows = []
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        chunk = SequenceChunk(tokens[start:end], start, blocks, True)
        rows.append(model.forward(build_forward_batch([chunk], BLOCK), cache))
    return torch.cat(rows)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path, shards=2, **VARIANTS[variant])
    tokens = _prompt(61, 1)
    with torch.inference_mode():
        expected = tiny.reference()(torch.tensor([tokens])).logits[0]
    model = tiny.load()
    for seed in range(3):
        cuts = sorted(random.Random(seed).sample(range(1, 61), 6))
        rows = [cut - 1 for cut in cuts] + [60]
        torch.testing.assert_close(_logits_in_runs(model, tokens, cuts, seed), expected[rows], atol=1e-4, rtol=1e-4)


def test_sequences_of_one_batch_do_not_disturb_each_other(tiny_model: Model) -> None:
    """Decodes of unlike lengths, a fresh prefill and a continued one in one step, against each alone."""
    lengths = [1, 7, 8, 9, 40, 100, 16, 30]
    runs = [1, 1, 1, 1, 1, 1, 16, 11]
    prompts = [_prompt(length, seed) for seed, length in enumerate(lengths)]
    layout = KvLayout.of(tiny_model.config, BLOCK, "float32")
    cache = KvCache(layout, 64)
    free = random.Random(3).sample(range(64), 64)
    chunks, expected = [], []
    for prompt, run in zip(prompts, runs, strict=True):
        blocks = [free.pop() for _ in range(-(-len(prompt) // BLOCK))]
        start = len(prompt) - run
        if start:
            tiny_model.forward(build_forward_batch([SequenceChunk(prompt[:start], 0, blocks, False)], BLOCK), cache)
        chunks.append(SequenceChunk(prompt[start:], start, blocks, True))
        expected.append(_logits_in_runs(tiny_model, prompt, [], 0))
    got = tiny_model.forward(build_forward_batch(chunks, BLOCK), cache)
    torch.testing.assert_close(got, torch.cat(expected), atol=1e-5, rtol=1e-4)


def test_no_logits_when_none_are_wanted(tiny_model: Model) -> None:
    cache = KvCache(KvLayout.of(tiny_model.config, BLOCK, "float32"), 2)
    batch = build_forward_batch([SequenceChunk([3, 4], 0, [1], False)], BLOCK)
    assert tiny_model.forward(batch, cache).shape == (0, VOCAB)


@pytest.fixture(scope="module")
def greedy(tiny: TinyModel) -> list[tuple[list[int], list[int]]]:
    """Prompts and their greedy tokens, by transformers."""
    reference = tiny.reference()
    pairs = []
    for seed, length in enumerate((1, 5, 8, 17, 40, 64, 90)):
        prompt = _prompt(length, seed)
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            for _ in range(NUM_GREEDY):
                ids = torch.cat((ids, reference(ids).logits[:, -1:].argmax(-1)), dim=1)
        pairs.append((prompt, ids[0, length:].tolist()))
    return pairs


def test_greedy_text_alone(tiny_model: Model, greedy: list[tuple[list[int], list[int]]]) -> None:
    for prompt, expected in greedy:
        core = engine(tiny_model)
        core.add(request("a", prompt, NUM_GREEDY))
        assert run_all(core) == {"a": expected}


@pytest.mark.parametrize("budget", [8, 13, 64, 256])
def test_greedy_text_batched_in_any_runs(
    tiny_model: Model, greedy: list[tuple[list[int], list[int]]], budget: int
) -> None:
    core = engine(tiny_model, max_num_batched_tokens=budget)
    for index, (prompt, _) in enumerate(greedy):
        core.add(request(f"r{index}", prompt, NUM_GREEDY))
    assert run_all(core) == {f"r{index}": expected for index, (_, expected) in enumerate(greedy)}


def test_greedy_text_survives_aborts_and_preemption(
    tiny_model: Model, greedy: list[tuple[list[int], list[int]]]
) -> None:
    """A cache of 17 blocks for 7 requests that grow to 6..17: preemption is certain; some are aborted on the way."""
    assert sum(_rough_run(tiny_model, greedy, seed) for seed in range(8)) > 0


def _rough_run(model: Model, greedy: list[tuple[list[int], list[int]]], seed: int) -> int:
    """Serve ``greedy`` in random order with random aborts; returns how often somebody was preempted."""
    rng = random.Random(seed)
    core = engine(model, num_blocks=17, max_num_batched_tokens=rng.choice((8, 20, 64)))
    todo = [(f"r{index}", prompt) for index, (prompt, _) in enumerate(greedy)]
    rng.shuffle(todo)
    doomed = {name for name, _ in rng.sample(todo, 2)}
    texts: dict[str, list[int]] = {}
    num_preempted = 0
    while todo or core.scheduler.has_work:
        if todo and rng.random() < 0.5:
            name, prompt = todo.pop()
            core.add(request(name, prompt, NUM_GREEDY))
        if rng.random() < 0.05:
            core.abort(RequestId(rng.choice(sorted(doomed))))
        result = core.step()
        num_preempted += len(result.preempted)
        for output in result.outputs:
            texts.setdefault(output.request_id, []).extend(output.tokens)
    for index, (_, expected) in enumerate(greedy):
        text = texts.get(f"r{index}", [])
        assert text == (expected[: len(text)] if f"r{index}" in doomed else expected), f"seed {seed}"
    assert core.scheduler.pool.num_in_use == 0
    return num_preempted


@each_cpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_last", [1, 10])
def test_short_types_are_near(
    tiny: TinyModel, tiny_model: Model, dtype: torch.dtype, num_last: int, cpu: CpuFeatures
) -> None:
    """Behind 30 tokens, few rows and many."""
    rounded = load_model(resolve_model(str(tiny.path)), dtype, arithmetic=Arithmetic.of(dtype, CPU, cpu))
    tokens, end = _prompt(40, 2), 30 + num_last
    rows = []
    for model in (tiny_model, rounded):
        cache = KvCache(KvLayout.of(model.config, BLOCK, dtype_name(model.dtype)), 8)
        model.forward(build_forward_batch([SequenceChunk(tokens[:30], 0, range(8), False)], BLOCK), cache)
        last = SequenceChunk(tokens[30:end], 30, range(8), True)
        rows.append(model.forward(build_forward_batch([last], BLOCK), cache))
    assert rows[1].dtype is torch.float32
    torch.testing.assert_close(rows[0], rows[1], atol=0.15, rtol=0.1)


def test_a_norm_in_bfloat16_rounds_once() -> None:
    generator = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((9, 50), (50,)))
    size = (hidden.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    exact = hidden.double() / size * weight.double() * 0.5
    normed = Norm(weight, 1e-5, 0.5)(hidden)
    assert normed.dtype is torch.bfloat16
    assert float(((normed.double() - exact) / exact).abs().max()) < 1.01 * 2.0**-8


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelUnsupported, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(resolve_model(str(tmp_path)), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_weights_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """Their scales stand in other tensors, without which they are other numbers."""
    write_tiny(tmp_path)
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelUnsupported, match=r"up_proj.*quantised"):
        load_model(resolve_model(str(tmp_path)), torch.float32)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path)
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json").read_text().replace('"vocab_size": 97', '"vocab_size": 98')
    )
    with pytest.raises(ModelUnsupported, match=r"embed_tokens.*\(97, 48\).*\(98, 48\)"):
        tiny.load()


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    write_tiny(tmp_path, model_type="gptj")
    with pytest.raises(ModelUnsupported, match="'gptj'"):
        resolve_model(str(tmp_path))


def test_progress_ends_at_one(tiny: TinyModel) -> None:
    fractions: list[float] = []
    load_model(resolve_model(str(tiny.path)), torch.float32, fractions.append)
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert len(fractions) > 3


def test_dtypes() -> None:
    assert pick_dtype("float32") is torch.float32
    assert pick_dtype("auto") is torch.bfloat16
