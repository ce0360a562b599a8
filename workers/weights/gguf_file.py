"""Weights out of a GGUF file: mapped, dequantised to float32, renamed to Hugging Face's names.

GGUF's ``llama`` stores the rows of W_q and W_k in the order of ggml's rotary convention, which pairs
neighbouring dimensions (0,1), (2,3), ...; ours, like Hugging Face's, pairs dimension i with i + head_dim/2.
With head_dim 4 the file's rows 0,1,2,3 of a head are our rows 0,2,1,3; `_unpermute` undoes it. Other
architectures are stored unpermuted.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tanghulu.errors import ModelUnsupported
from tanghulu.workers.weights.gguf_metadata import read_gguf_head

if TYPE_CHECKING:
    import torch

_TOP_LEVEL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
_IN_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_PERMUTED = re.compile(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)")


class GgufFile:
    """A `WeightSource` over one GGUF file. ``metadata`` is the file's key-value head, as Python values."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelUnsupported(f"cannot map {path}: {error}") from error
        with memoryview(self._map) as view:
            head = read_gguf_head(view, str(path))
        self.metadata: dict[str, Any] = head.metadata
        self._places, self._data_start = head.tensors, head.data_start

    def tensor_names(self) -> Iterable[str]:
        return self._places.keys()

    def has(self, name: str) -> bool:
        return _gguf_name(name) in self._places

    def tensor(self, name: str) -> torch.Tensor:
        from tanghulu.workers.weights.dequantise import dequantise, num_stored_bytes  # torch, for tensors only

        own = _gguf_name(name)
        if own not in self._places:
            raise ModelUnsupported(f"{self._path} has no tensor {own!r} (for {name!r})")
        place = self._places[own]
        start = self._data_start + place.offset
        length = num_stored_bytes(place.ggml_type, place.shape, own)
        if start + length > len(self._map):
            raise ModelUnsupported(f"{self._path} ends inside tensor {own!r}; the file is truncated")
        raw = np.frombuffer(self._map, dtype=np.uint8, count=length, offset=start)
        tensor = dequantise(raw, place.ggml_type, place.shape)
        return self._unpermute(own, tensor)

    def _unpermute(self, own: str, tensor: torch.Tensor) -> torch.Tensor:
        match = _PERMUTED.fullmatch(own)
        if match is None or self.metadata.get("general.architecture") != "llama":
            return tensor
        heads = self.metadata["llama.attention.head_count"]
        if match[1] == "k":
            heads = self.metadata.get("llama.attention.head_count_kv", heads)
        rows = tensor.shape[0]
        pairs = tensor.view(heads, rows // heads // 2, 2, -1)
        return pairs.transpose(1, 2).reshape(tensor.shape)

    def close(self) -> None:
        self._map.close()


def _gguf_name(name: str) -> str:
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return _TOP_LEVEL.get(name, name)
    return f"blk.{match[1]}.{_IN_LAYER.get(match[2], match[2])}.{match[3]}"
