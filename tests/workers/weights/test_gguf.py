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
from tanghulu.workers.compute.models.registry import load_model
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.weights import resolve_model
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


def test_other_architectures_and_split_files_are_refused_by_name(tiny: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny, path, metadata=lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(ModelUnsupported, match="one GGUF file of 3"):
        resolve_model(str(path))
    writer = gguf.GGUFWriter(path, "mistral3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelUnsupported, match=r"'mistral3' cannot be run; .* llama, qwen2, qwen3 from GGUF"):
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
