"""Name under which two KV caches may be exchanged: equal weights, dtype, layout and rotary settings."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

import xxhash

from tanghulu.types import Fingerprint
from tanghulu.workers.weights.source import ModelSource

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
    """Return 16 bytes, xxh3_128 over the weight files' bytes, an adapter's too, and over what shapes a block's KV.

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
