"""Weights of a GGUF file: mapped, dequantised to float32, renamed to Hugging Face's names.

GGUF's ``llama`` stores the rows of W_q and W_k in the order of ggml's rotary convention, which pairs
neighbouring dimensions (0,1), (2,3), ...; ours, like Hugging Face's, pairs dimension i with i + head_dim/2.
With head_dim 4 the file's rows 0,1,2,3 of a head are our rows 0,2,1,3; `_unpermute` undoes it. Other
architectures are stored unpermuted.

The head of the file (metadata, and the place of each tensor) is read here as well: the gguf package's reader makes
several numpy objects for every string, three seconds for a vocabulary of 49k tokens; this one walks the same bytes in a
tenth of a second. It reads none of the tensors' data. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tanghulu.errors import ModelUnsupported
from tanghulu.model_files.fields import Fields

if TYPE_CHECKING:
    import torch

#: The divisors of rotary frequencies that GGUF files may have; Hugging Face's have no such tensor.
FREQUENCY_FACTORS = "model.rotary_emb.frequency_factors"
_TOP_LEVEL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    FREQUENCY_FACTORS: "rope_freqs.weight",
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
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32


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
        self._taken: set[str] = set()

    def tensor_names(self) -> Iterable[str]:
        return self._places.keys()

    def has(self, name: str) -> bool:
        return _gguf_name(name) in self._places

    def tensor(self, name: str) -> torch.Tensor:
        from tanghulu.workers.weights.dequantise import dequantise, num_stored_bytes  # torch, for tensors only

        own = _gguf_name(name)
        if own not in self._places:
            raise ModelUnsupported(f"{self._path} has no tensor {own!r} (for {name!r})")
        self._taken.add(own)
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
        if rows % (2 * heads):  # the wrong shape, reported by whoever takes it
            return tensor
        pairs = tensor.view(heads, rows // heads // 2, 2, -1)
        return pairs.transpose(1, 2).reshape(tensor.shape)

    def untaken(self) -> Iterable[str]:
        return self._places.keys() - self._taken

    def close(self) -> None:
        self._map.close()


def _gguf_name(name: str) -> str:
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return _TOP_LEVEL.get(name, name)
    return f"blk.{match[1]}.{_IN_LAYER.get(match[2], match[2])}.{match[3]}"


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Place of a tensor: ``shape`` is torch's order (rows first), ``offset`` counts from the data's start."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHead:
    """Head of a GGUF file; the tensors' data begins ``data_start`` bytes into the file."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorPlace]
    data_start: int


def read_gguf_head(data: bytes | memoryview, name: str) -> GgufHead:
    """Parse the head of the GGUF file ``data`` (mapped or read); ``name`` is for messages.

    Raises ModelUnsupported if it is not a GGUF file of a known version, ends too early or has a name twice.
    """
    reader = _Reader(data)
    try:
        return _read_head(reader, name)
    except (struct.error, UnicodeDecodeError, KeyError, RecursionError, MemoryError) as error:
        raise ModelUnsupported(f"{name} is damaged near byte {reader.at}: {error}") from error


def _read_head(reader: _Reader, name: str) -> GgufHead:
    magic, version = reader.take("4sI")
    if magic != _MAGIC:
        raise ModelUnsupported(f"{name} is not a GGUF file (it begins with {magic!r}); was it fully downloaded?")
    if version not in _VERSIONS:
        raise ModelUnsupported(f"{name} is GGUF version {version}; this worker reads {_VERSIONS}, little-endian")
    num_tensors, num_pairs = reader.take("QQ")
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = reader.string()
        if key in metadata:
            raise ModelUnsupported(f"{name} has the key {key!r} twice")
        metadata[key] = reader.value(reader.take("I")[0])
    places: dict[str, TensorPlace] = {}
    for _ in range(num_tensors):
        place = reader.tensor_place()
        if place.name in places:
            raise ModelUnsupported(f"{name} has the tensor {place.name!r} twice")
        places[place.name] = place
    alignment = Fields(metadata, name).integer("general.alignment", _DEFAULT_ALIGNMENT)
    return GgufHead(metadata, places, -(-reader.at // alignment) * alignment)


class _Reader:
    """A cursor over little-endian bytes."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = data
        self.at = 0

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self._data, self.at)
        self.at += struct.calcsize("<" + layout)
        return values

    def string(self) -> str:
        (length,) = struct.unpack_from("<Q", self._data, self.at)
        start = self.at + 8
        self.at = start + length
        if self.at > len(self._data):
            raise struct.error(f"a string of {length} bytes runs past the end")
        return str(self._data[start : self.at], "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind, count = self.take("IQ")
            if item_kind in (_STRING, _ARRAY):
                return [self.value(item_kind) for _ in range(count)]
            return list(self.take(f"{count}{_SCALARS[item_kind]}"))
        return self.take(_SCALARS[kind])[0]

    def tensor_place(self) -> TensorPlace:
        name = self.string()
        (num_dimensions,) = self.take("I")
        if not 0 < num_dimensions <= _MAX_DIMENSIONS:
            raise struct.error(f"tensor {name!r} has {num_dimensions} dimensions")
        shape = self.take(f"{num_dimensions}Q")
        ggml_type, offset = self.take("IQ")
        return TensorPlace(name, tuple(reversed(shape)), ggml_type, offset)
