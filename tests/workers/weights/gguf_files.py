"""GGUF files of tiny models, named by the gguf package's own table and laid out as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from tests.workers.tiny import TinyModel

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
Weights = np.ndarray[Any, Any]


def write_gguf(
    tiny: TinyModel,
    path: Path,
    *,
    rope_freqs: Weights | None = None,
    quantisation: gguf.GGMLQuantizationType | None = None,
    metadata: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    tensors: Mapping[str, Weights] | None = None,
) -> None:
    """``quantisation`` is of all matrices; ``metadata`` may add to the head, ``tensors`` to the rest."""
    config = tiny.config
    architecture = _ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_eos_token_id(1)
    metadata(writer)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in load_file(tiny.path / "model.safetensors").items():
        data = tensor.numpy()
        if architecture is gguf.MODEL_ARCH.LLAMA and (".q_proj." in name or ".k_proj." in name):
            data = _permuted(data, config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"])
        kind = quantisation if data.ndim == 2 else None
        stored = data if kind is None else gguf.quantize(data, kind)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), stored, raw_dtype=kind)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _permuted(weight: Weights, heads: int) -> Weights:
    """What llama.cpp's converter does to W_q and W_k of what it calls llama."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)
