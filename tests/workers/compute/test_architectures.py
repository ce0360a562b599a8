"""Mixtral, Qwen3-MoE and Gemma 3 against transformers, which writes their checkpoints: logits and text."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tanghulu.errors import ConfigError, ModelUnsupported
from tanghulu.session.sampling import Sampling
from tanghulu.workers.compute.attention.backends import AttentionNeeds, can
from tanghulu.workers.compute.device import CPU
from tanghulu.workers.compute.forward_batch import (
    DecodeShape,
    SequenceChunk,
    build_forward_batch,
    decode_batch,
    pack_decodes,
)
from tanghulu.workers.compute.kv_cache import DeviceKvCache, KvCache
from tanghulu.workers.compute.linear import Arithmetic, Linear
from tanghulu.workers.compute.models import mlp
from tanghulu.workers.compute.models.mlp import GatedMlp, GroupedExperts, SeparateExperts
from tanghulu.workers.compute.models.model import Model, load_model
from tanghulu.workers.compute.models.shard import require_split
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.loading.invariance import require_invariance
from tanghulu.workers.weights import resolve_model
from tanghulu.workers.weights.hf_config import config_from_hf
from tanghulu.workers.weights.source import fingerprint
from tests.workers.cpus import CPUS
from tests.workers.tiny import BLOCK, VOCAB, engine, request, run_all
from tests.workers.ways import WAYS, Served

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
QWEN = BASE | {"intermediate_size": 80, "moe_intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 3}
GEMMA = BASE | {"intermediate_size": 80, "sliding_window": 20, "query_pre_attn_scalar": 11}
FULL, SLIDING = "full_attention", "sliding_attention"
#: Name: transformers' config, and whether it writes each expert by itself.
VARIANTS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "mixtral": ("MixtralConfig", BASE | {"intermediate_size": 24, "num_local_experts": 4}, True),
    "mixtral-fused": ("MixtralConfig", BASE | {"intermediate_size": 24, "num_local_experts": 4}, False),
    "qwen3-moe": ("Qwen3MoeConfig", QWEN | {"norm_topk_prob": True, "mlp_only_layers": [1]}, True),
    "qwen3-moe-fused": ("Qwen3MoeConfig", QWEN | {"norm_topk_prob": False, "decoder_sparse_step": 2}, False),
    "gemma3": ("Gemma3TextConfig", GEMMA | {"layer_types": [SLIDING, FULL, SLIDING]}, True),
    "gemma3-stretched": (
        "Gemma3TextConfig",
        GEMMA | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "layer_types": [FULL, SLIDING, FULL]},
        True,
    ),
}
NUM_GREEDY = 10


def write(path: Path, variant: str) -> Path:
    """Have transformers write a random model of ``variant`` under ``path``."""
    import transformers

    kind, fields, original = VARIANTS[variant]
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**fields))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # all alike when they are made
                weight.add_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(path, save_original_format=original)
    return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda variant: write(tmp_path_factory.mktemp(variant), variant))


def reference(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def prompt(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(2, VOCAB), k=length)


def logits_in_runs(model: Model, tokens: list[int], cuts: list[int], seed: int) -> torch.Tensor:
    """Logits of the last token of every run, the sequence computed run by run over shuffled blocks."""
    num_blocks = -(-len(tokens) // BLOCK)
    cache_ = KvCache(KvLayout.of(model.config, BLOCK, "float32"), num_blocks + 8)
    blocks = random.Random(seed).sample(range(num_blocks + 8), num_blocks)
    rows = []
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        chunk = SequenceChunk(tokens[start:end], start, blocks, wants_logits=True)
        rows.append(model.forward(build_forward_batch([chunk], BLOCK), cache_))
    return torch.cat(rows)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_text_equal_transformers(variant: str, paths: Any) -> None:
    path = paths(variant)
    theirs, model = reference(path), load_model(resolve_model(str(path)), torch.float32)
    tokens = prompt(150)
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    for seed, cuts in enumerate(([], [1, 7, 60, 61, 62], [19, 20, 21, 128, 149])):
        rows = [cut - 1 for cut in cuts] + [len(tokens) - 1]
        torch.testing.assert_close(logits_in_runs(model, tokens, cuts, seed), expected[rows], atol=1e-4, rtol=1e-4)
    core, texts = engine(model, max_num_batched_tokens=40), {}
    for seed, length in enumerate((1, 17, 60)):
        ids = torch.tensor([prompt(length, seed)])
        core.add(request(str(seed), ids[0].tolist(), NUM_GREEDY))
        with torch.inference_mode():
            for _ in range(NUM_GREEDY):
                ids = torch.cat((ids, theirs(ids).logits[:, -1:].argmax(-1)), dim=1)
        texts[str(seed)] = ids[0, length:].tolist()
    assert run_all(core) == texts


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["mixtral", "qwen3-moe", "gemma3"])
def test_the_same_bits_in_every_way_where_that_is_asked_for(variant: str, paths: Any) -> None:
    """Cached prefixes, chunks, preemption, hand-over and moves, past Gemma's window."""
    model = load_model(
        resolve_model(str(paths(variant))),
        torch.bfloat16,
        arithmetic=Arithmetic.of(torch.bfloat16, CPU, invariant=True),
    )
    require_invariance(model, 2, "float32")
    sampling = [Sampling(temperature=index % 2, seed=index, num_logprobs=2) for index in range(5)]
    shared = prompt(40)
    prompts = [
        (shared[: 20 * (index % 3)] + prompt(length, index), sampling[index])
        for index, length in enumerate((3, 17, 66, 140, 30))
    ]
    served = Served(model, prompts, num_new=11)
    alone = served.alone()
    for name, way in WAYS.items():
        assert way(served) == alone, name


def test_a_window_in_batches_of_decodes(paths: Any) -> None:
    """Of several lengths at once, in ragged and in static shapes, over blocks that hold NaN where none may look."""
    model = load_model(resolve_model(str(paths("gemma3"))), torch.float32)
    lengths = (3, 20, 21, 22, 100, 130)
    layout = KvLayout.of(model.config, BLOCK, "float32")
    cache_ = DeviceKvCache(layout, 80, CPU)
    cache_.blocks.fill_(float("nan"))
    free, chunks, expected = iter(random.Random(5).sample(range(80), 80)), [], []
    for seed, length in enumerate(lengths):
        tokens, blocks = prompt(length, seed), [next(free) for _ in range(-(-length // BLOCK))]
        if length > 1:
            before = SequenceChunk(tokens[:-1], 0, blocks, wants_logits=False)
            model.forward(build_forward_batch([before], BLOCK), cache_)
        chunks.append(SequenceChunk(tokens[-1:], length - 1, blocks, wants_logits=True))
        expected.append(logits_in_runs(model, tokens, [], 0))
    torch.testing.assert_close(model.forward(build_forward_batch(chunks, BLOCK), cache_), torch.cat(expected))
    packed = pack_decodes(chunks, DecodeShape.of(chunks, BLOCK), BLOCK, cache_.scratch)
    static = model.forward(decode_batch(torch.from_numpy(packed), BLOCK), cache_)[: len(chunks)]
    torch.testing.assert_close(static, torch.cat(expected))


@pytest.mark.slow
def test_a_window_far_behind_the_beginning(tmp_path: Path) -> None:
    """Whole runs of keys are hidden from a query, more than a kernel takes at a time."""
    VARIANTS["long"] = ("Gemma3TextConfig", GEMMA | {"max_position_embeddings": 2048, "num_hidden_layers": 6}, True)
    try:
        path = write(tmp_path, "long")
    finally:
        del VARIANTS["long"]
    tokens = prompt(1400)
    with torch.inference_mode():
        expected = reference(path)(torch.tensor([tokens])).logits[0][[1299, 1398, 1399]]
    for invariant in (False, True):
        arithmetic = Arithmetic.of(torch.float32, CPU, invariant=invariant)
        model = load_model(resolve_model(str(path)), torch.float32, arithmetic=arithmetic)
        got = logits_in_runs(model, tokens, [1300, 1399], 0)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_older_files_say_the_same(paths: Any) -> None:
    written = json.loads((paths("gemma3-stretched") / "config.json").read_text())
    new = config_from_hf(written)
    for name in ("rope_parameters", "layer_types", "tie_word_embeddings"):
        written.pop(name)
    old = config_from_hf(written | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 2})
    assert old.sliding is not None
    assert new.sliding is not None
    assert (old.sliding.layers, old.sliding.rope_theta) == ({0, 2}, new.sliding.rope_theta)
    assert (old.rope_theta, old.tie_embeddings) == (new.rope_theta, True)


@pytest.mark.parametrize(
    "changes",
    [{"final_logit_softcapping": 30.0}, {"attn_logit_softcapping": 50.0}, {"use_bidirectional_attention": True}],
)
def test_what_gemma_3_does_not_have_is_refused(changes: dict[str, Any], paths: Any) -> None:
    with pytest.raises(ModelUnsupported, match=next(iter(changes))):
        config_from_hf(json.loads((paths("gemma3") / "config.json").read_text()) | changes)


def test_what_cannot_be_shared_out_or_served_is_refused(paths: Any) -> None:
    with pytest.raises(ConfigError, match="24 MLP columns"):
        require_split(resolve_model(str(paths("qwen3-moe"))).config, 16)
    assert can("varlen", AttentionNeeds(CPU, torch.bfloat16, 64, 64, has_windows=True)) is not None
    with pytest.raises(ModelUnsupported, match="7 of 5 experts"):
        config_from_hf(QWEN | {"model_type": "qwen3_moe", "num_experts_per_tok": 7})


def test_kv_of_another_config_has_another_name(paths: Any) -> None:
    path = paths("qwen3-moe")
    names = {fingerprint(resolve_model(str(path)), dtype="float32", block_tokens=BLOCK)}
    text = (path / "config.json").read_text()
    try:
        (path / "config.json").write_text(json.dumps(json.loads(text) | {"norm_topk_prob": False}))
        names.add(fingerprint(resolve_model(str(path)), dtype="float32", block_tokens=BLOCK))
    finally:
        (path / "config.json").write_text(text)
    assert len(names) == 2


class TestGroupedExperts:
    """The products of GPUs, on a CPU, beside the loop over experts."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("num_rows", [1, 3, 40])
    def test_they_compute_what_the_loop_computes(self, dtype: torch.dtype, num_rows: int) -> None:
        """With experts that nobody picked, and one that all rows pick."""
        generator = torch.Generator().manual_seed(num_rows)
        gate_up = torch.randn(7, 2 * 16, 24, generator=generator).to(dtype)
        down = torch.randn(7, 24, 16, generator=generator).to(dtype)
        rows = torch.randn(num_rows, 24, generator=generator).to(dtype)
        arithmetic = Arithmetic(CPUS["no-libraries"], dtype, dtype)
        pairs = zip(gate_up, down, strict=True)
        loop = SeparateExperts(
            [GatedMlp(*(Linear(each, arithmetic=arithmetic) for each in pair), F.silu) for pair in pairs]
        )
        grouped = GroupedExperts(gate_up, down, F.silu)
        for owners in (torch.randint(1, 6, (num_rows,), generator=generator).sort().values, torch.full((num_rows,), 6)):
            wanted, got = loop(rows, owners), grouped(rows, owners)
            assert float((got - wanted).float().norm() / wanted.float().norm()) < (
                1e-5 if dtype == torch.float32 else 0.01
            )

    @pytest.mark.parametrize("variant", [name for name in VARIANTS if not name.startswith("gemma")])
    def test_logits_are_those_of_transformers(self, variant: str, paths: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        path = paths(variant)
        monkeypatch.setattr(mlp, "can_group", lambda *needs: True)
        model = load_model(resolve_model(str(path)), torch.float32)
        assert model.is_static
        tokens = prompt(150)
        with torch.inference_mode():
            expected = reference(path)(torch.tensor([tokens])).logits[0]
        cuts = [19, 20, 149]
        rows = [18, 19, 148, 149]
        torch.testing.assert_close(logits_in_runs(model, tokens, cuts, 1), expected[rows], atol=1e-4, rtol=1e-4)

    def test_where_there_is_a_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = torch.device("cuda", 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        assert mlp.can_group(gpu, torch.bfloat16, (2048, 768))
        assert not mlp.can_group(gpu, torch.bfloat16, (2048, 765))
        assert not mlp.can_group(gpu, torch.float16, (2048, 768))
        assert not mlp.can_group(CPU, torch.bfloat16, (2048, 768))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
        assert not mlp.can_group(gpu, torch.bfloat16, (2048, 768))
