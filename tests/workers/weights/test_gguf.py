"""Models and tokenizers out of GGUF files give what their safetensors, transformers and SentencePiece give."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from tanghulu.errors import ModelUnsupported
from tanghulu.workers.compute.forward_batch import SequenceChunk, build_forward_batch
from tanghulu.workers.compute.kv_cache import KvCache
from tanghulu.workers.compute.models.model import load_model
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.weights import resolve_model
from tanghulu.workers.weights.gguf_config import config_from_gguf
from tanghulu.workers.weights.gguf_tokenizer import build_gguf_tokenizer
from tests.workers.tiny import BLOCK, VOCAB, TinyModel, write_tiny
from tests.workers.weights.gguf_files import write_gguf

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True, "num_key_value_heads": 6},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen2-tied": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "rope_theta": 1e6},
    "qwen3-wide-heads": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
}
#: Of a vocabulary that SentencePiece trained, its pieces and how it cuts texts.
PIECES = json.loads((Path(__file__).parent / "sentencepiece_tiny.json").read_text(encoding="utf-8"))


def _logits(path: Path, tokens: list[int]) -> torch.Tensor:
    """Of every token, computed in two steps."""
    model = load_model(resolve_model(str(path)), torch.float32)
    cache = KvCache(KvLayout.of(model.config, BLOCK, "float32"), 16)
    rows = []
    for end in range(1, len(tokens) + 1):
        chunk = SequenceChunk(tokens[end - 1 : end], end - 1, range(16), True)
        rows.append(model.forward(build_forward_batch([chunk], BLOCK), cache))
    return torch.cat(rows)


def _prompt() -> list[int]:
    return random.Random(3).choices(range(2, VOCAB), k=40)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path, **VARIANTS[variant])
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny, path)
    with torch.inference_mode():
        expected = tiny.reference()(torch.tensor([_prompt()])).logits[0]
    torch.testing.assert_close(_logits(path, _prompt()), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["qwen2", "mistral"])
def test_quantised_logits_equal_those_of_the_dequantised_weights(variant: str, tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path, hidden_size=64, intermediate_size=96, num_attention_heads=8, **VARIANTS[variant])
    kind = gguf.GGMLQuantizationType.Q8_0
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny, path, quantisation=kind)
    with torch.inference_mode():
        expected = _rounded(tiny, kind).reference()(torch.tensor([_prompt()])).logits[0]
    torch.testing.assert_close(_logits(path, _prompt()), expected, atol=1e-4, rtol=1e-4)


def _rounded(tiny: TinyModel, kind: gguf.GGMLQuantizationType) -> TinyModel:
    """``tiny`` with the weights that are left of its own behind ``kind``: a block is of a row, so rows may move."""
    file = tiny.path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            tensors[name] = torch.tensor(gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind))
    save_file(tensors, file, {"format": "pt"})
    return tiny


#: Metadata as published files have it, by llama.cpp's converter and others, but for long lists.
GENERAL = {
    "general.type": "model", "general.name": "x", "general.basename": "x", "general.size_label": "8B",
    "general.license": "apache-2.0", "general.tags": ["text-generation"], "general.languages": ["en"],
    "general.file_type": 15, "general.quantization_version": 2, "general.base_model.count": 1,
    "general.source.url": "https://example.org", "general.sampling.temp": 0.6, "general.quantized_by": "x",
    "quantize.imatrix.file": "x.dat", "quantize.imatrix.entries_count": 224, "tokenizer.chat_template": "x",
    "tokenizer.ggml.tokens": ["<s>", "</s>", "a"], "tokenizer.ggml.token_type": [3, 3, 1],
    "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.padding_token_id": 1,
    "split.count": 0, "mradermacher.quantized_by": "x",
}  # fmt: skip
BYTES = {"model": "gpt2", "merges": [], "add_bos_token": False, "add_eos_token": False, "add_space_prefix": False}
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (
        {
            "block_count": 32, "context_length": 131_072, "embedding_length": 4096, "feed_forward_length": 14_336,
            "attention.head_count": 32, "attention.head_count_kv": 8, "rope.freq_base": 5e5, "vocab_size": 128_256,
            "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 128, "attention.key_length": 128,
            "attention.value_length": 128,
        },
        BYTES | {"pre": "llama-bpe"},
    ),
    "llama, mistral's": (
        {
            "block_count": 32, "context_length": 32_768, "embedding_length": 4096, "feed_forward_length": 14_336,
            "attention.head_count": 32, "attention.head_count_kv": 8, "rope.freq_base": 1e6, "vocab_size": 32_000,
            "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 128, "expert_count": 0,
            "expert_used_count": 0, "tensor_data_layout": "Meta AI original pth", "rope.scaling.type": "none",
        },
        {"model": "llama", "scores": [0.0, 0.0, -1.0], "unknown_token_id": 0, "add_bos_token": True, "pre": "default"},
    ),
    "qwen2": (
        {
            "block_count": 28, "context_length": 32_768, "embedding_length": 3584, "feed_forward_length": 18_944,
            "attention.head_count": 28, "attention.head_count_kv": 4, "rope.freq_base": 1e6,
            "attention.layer_norm_rms_epsilon": 1e-6,
        },
        BYTES | {"pre": "qwen2"},
    ),
    "qwen3": (
        {
            "block_count": 28, "context_length": 40_960, "embedding_length": 1024, "feed_forward_length": 3072,
            "attention.head_count": 16, "attention.head_count_kv": 8, "rope.freq_base": 1e6,
            "attention.layer_norm_rms_epsilon": 1e-6, "attention.key_length": 128, "attention.value_length": 128,
        },
        BYTES | {"pre": "qwen2"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_metadata_of_published_files_is_read(name: str) -> None:
    numbers, vocabulary = PUBLISHED[name]
    architecture = name.partition(",")[0]
    metadata = GENERAL | {"general.architecture": architecture}
    metadata |= {f"{architecture}.{key}": value for key, value in numbers.items()}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}
    config = config_from_gguf(metadata, ["output.weight", "blk.0.attn_q.bias"])
    assert (config.head_dim, config.max_context, config.eos_ids) == (128, numbers["context_length"], {1})
    assert build_gguf_tokenizer(metadata)[1] == vocabulary["add_bos_token"]


def test_other_architectures_and_split_files_are_refused_by_name(tiny: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny, path, metadata=lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(ModelUnsupported, match="split into 3 GGUF files"):
        resolve_model(str(path))
    writer = gguf.GGUFWriter(path, "mistral3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelUnsupported, match=r"'mistral3' is not supported; .* llama, qwen2, qwen3 from GGUF"):
        resolve_model(str(path))


def test_a_sliding_window_bounds_the_context(tiny: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny, path, metadata=lambda writer: writer.add_sliding_window(48))
    assert resolve_model(str(path)).config.max_context == 48


def _sentencepiece(**changes: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": PIECES["pieces"],
        "tokenizer.ggml.scores": PIECES["scores"],
        "tokenizer.ggml.token_type": PIECES["types"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | changes


def test_sentencepiece_cuts_texts_as_it_did() -> None:
    tokenizer, add_bos = build_gguf_tokenizer(_sentencepiece())
    assert add_bos
    for text, ids in PIECES["texts"].items():
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
        assert tokenizer.decode(ids) == text
    assert len(PIECES["texts"]) > 20


def test_sentencepiece_with_special_tokens_and_without_a_space_in_front() -> None:
    tokenizer, _ = build_gguf_tokenizer(_sentencepiece())
    plain = tokenizer.encode("the man", add_special_tokens=False).ids
    assert tokenizer.encode("the man").ids == [1, *plain]
    assert tokenizer.encode("</s>the man", add_special_tokens=False).ids == [2, *plain]
    bare, add_bos = build_gguf_tokenizer(
        _sentencepiece(**{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False})
    )
    assert not add_bos
    assert bare.encode(" the man").ids == plain
    assert bare.decode(plain) == " the man"
