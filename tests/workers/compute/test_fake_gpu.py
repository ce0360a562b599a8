"""The GPU's path walked with tensors that have a device and a shape but no bytes: no GPU is needed.

What it shows: each operand is on the device where it is wanted, of a type and a shape that the operation takes, and
torch knows every call by these arguments. Whether the numbers are right only a GPU shows (test_gpu.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from tanghulu.session.sampling import Sampling
from tanghulu.workers.compute import device, device_sampling
from tanghulu.workers.compute.attention import varlen as attention_varlen
from tanghulu.workers.compute.attention.base import AttentionBackend, SdpaAttention
from tanghulu.workers.compute.attention.invariant import InvariantAttention
from tanghulu.workers.compute.attention.varlen import Kernel, VarlenAttention
from tanghulu.workers.compute.forward_batch import (
    DecodeShape,
    ForwardBatch,
    SequenceChunk,
    build_forward_batch,
    decode_batch,
    pack_decodes,
)
from tanghulu.workers.compute.kv_cache import DeviceKvCache
from tanghulu.workers.compute.linear import Arithmetic
from tanghulu.workers.compute.models import mlp
from tanghulu.workers.compute.models.model import Model, load_model
from tanghulu.workers.compute.sampling import SamplingRow
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.weights import resolve_model
from tanghulu.workers.weights.safetensors_dir import SafetensorsDir
from tests.workers.compute.fake_gpu import GPU, fake_gpu
from tests.workers.compute.test_architectures import write
from tests.workers.tiny import VOCAB, write_tiny

BLOCK = 16
#: FlashAttention of torch before 2.12 reads no block tables.
HAS_TABLES = "block_table" in attention_varlen.operator_arguments()
#: Architectures that differ in what they compute, not only in names.
KINDS = {
    "llama": {},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 20},
}


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors of CUDA devices may be made, and have no memory; pinned memory is plain."""
    monkeypatch.setattr(device, "staged_for", lambda array, _: torch.from_numpy(array))
    read = SafetensorsDir.tensor

    def really_read(weights: SafetensorsDir, name: str) -> torch.Tensor:
        with unset_fake_temporarily():
            return read(weights, name)

    monkeypatch.setattr(SafetensorsDir, "tensor", really_read)
    with fake_gpu():
        yield


def backends() -> dict[str, AttentionBackend]:
    attend = attention_varlen.flash_attention
    return {
        "sdpa": SdpaAttention(),
        "gathering": VarlenAttention(Kernel(attend, reads_tables=False)),
        "tables": VarlenAttention(Kernel(attend, reads_tables=True)),
        "invariant": InvariantAttention(),
    }


def load(path: Path, backend: str, kv_dtype: str = "bfloat16") -> tuple[Model, DeviceKvCache]:
    invariant = backend == "invariant"
    arithmetic = Arithmetic.of(torch.bfloat16, GPU, invariant=invariant)
    attention = backends()[backend]
    model = load_model(resolve_model(str(path)), torch.bfloat16, device=GPU, attention=attention, arithmetic=arithmetic)
    return model, DeviceKvCache(KvLayout.of(model.config, BLOCK, kv_dtype), 32, GPU)


def steps(model: Model, cache: DeviceKvCache) -> Iterator[tuple[str, ForwardBatch, int]]:
    """A prefill of two prompts beside a decode with two drafts, one that wants nothing yet, decodes of static shape."""
    mixed = [
        SequenceChunk(list(range(5, 45)), 0, [3, 9, 1], True),
        SequenceChunk(list(range(30)), 20, [2, 5, 6, 7], False),
        SequenceChunk([8, 5, 6], 40, [10, 11, 12], True, num_more_logits=2),
    ]
    yield "mixed", build_forward_batch(mixed, BLOCK, GPU), 4
    yield "no logits", build_forward_batch(mixed[1:2], BLOCK, GPU), 0
    decodes = [SequenceChunk([4], at, [1, 2, 3], True) for at in (20, 33, 40)]
    yield "ragged decodes", build_forward_batch(decodes, BLOCK, GPU), 3
    if model.batch_invariant:
        return
    shape = DecodeShape.of(decodes, BLOCK)
    packed = pack_decodes(decodes, shape, BLOCK, cache.scratch)
    yield "decodes", decode_batch(device.upload(packed, GPU), BLOCK), 4


def walk(model: Model, cache: DeviceKvCache) -> None:
    for name, batch, num_logits in steps(model, cache):
        logits = model.forward(batch, cache)
        assert (logits.device, logits.dtype) == (GPU, torch.float32), name
        assert logits.shape == (num_logits, VOCAB), name


@pytest.mark.parametrize("backend", ["sdpa", "gathering", *(["tables"] if HAS_TABLES else []), "invariant"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_stays_on_the_device(
    tmp_path_factory: pytest.TempPathFactory, without_gpu: None, kind: str, backend: str
):
    with unset_fake_temporarily():
        tiny = write_tiny(tmp_path_factory.mktemp(kind), **KINDS[kind])
    walk(*load(tiny.path, backend))


@pytest.mark.parametrize("backend", ["sdpa", "gathering", "invariant"])
def test_kv_in_int8_stays_on_the_device(tmp_path: Path, without_gpu: None, backend: str):
    with unset_fake_temporarily():
        tiny = write_tiny(tmp_path)
    walk(*load(tiny.path, backend, "int8"))


@pytest.mark.parametrize("backend", ["sdpa", "invariant"])
def test_windows_stay_on_the_device(tmp_path: Path, without_gpu: None, backend: str):
    with unset_fake_temporarily():
        path = write(tmp_path, "gemma3")
    walk(*load(path, backend))


def test_sampling_stays_on_the_device(without_gpu: None):
    kinds = (
        Sampling(temperature=0, num_logprobs=3),
        Sampling(temperature=0.7, seed=3, top_k=5, repetition_penalty=1.2, logit_bias={5: 2.0, 7: -1.0}),
        Sampling(temperature=1.0, seed=4, top_p=0.9, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.25),
    )
    rows = [SamplingRow(params, np.arange(10), 4, frozenset({1})) for params in kinds]
    logits = torch.empty(len(rows), VOCAB, device=GPU)
    adjusted = device_sampling.adjusted(logits, rows)
    tokens, suffices = device_sampling._drawn(adjusted, rows, device_sampling._columns(rows, GPU))
    packed = device_sampling._pack(logits, rows, tokens, suffices)
    assert (packed.device, packed.dtype, packed.shape) == (GPU, torch.float64, (3, 2 + 1 + 2 * 3))


@pytest.mark.parametrize("variant", ["mixtral", "qwen3-moe-fused"])
def test_grouped_experts_stay_on_the_device(
    tmp_path: Path, without_gpu: None, monkeypatch: pytest.MonkeyPatch, variant: str
):
    """Nothing is read back: the played device has nothing to read."""
    monkeypatch.setattr(mlp, "can_group", lambda *needs: True)
    with unset_fake_temporarily():
        path = write(tmp_path, variant)
    model, cache = load(path, "sdpa")
    assert model.is_static
    walk(model, cache)
