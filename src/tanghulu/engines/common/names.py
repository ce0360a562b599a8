"""Names of blocks in the store: ``kv/<fingerprint>/<block hash>/<part>``.

An engine's block hash identifies the tokens, but neither the model that computed the KV nor the layout of its bytes.
The fingerprint identifies those: engines with equal fingerprints can read each other's bytes, and no other finds them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tanghulu.types import BlockHash, ChunkKey, Fingerprint, kv_chunk_key

#: Part of every fingerprint: a new layout of the bytes gets a new number.
FORMAT_VERSION = 1
#: Weight files, by extension.
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
#: Prefix of a weight file that goes into the digest: a safetensors header names every tensor and its position.
_HEADER_BYTES = 1 << 20
#: Fields of a model's configuration that state its origin, without effect on what it computes.
_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version")


def make_fingerprint(facts: Mapping[str, Any]) -> Fingerprint:
    """Return the fingerprint of everything that decides the meaning of a block's bytes: SHA-256 of canonical JSON."""
    text = json.dumps({"format": FORMAT_VERSION, **facts}, sort_keys=True, separators=(",", ":"), default=str)
    return Fingerprint(hashlib.sha256(text.encode()).digest()[:16])


def digest_of_weights(model: str, revision: str | None) -> str:
    """Return an identifier of the weights of ``model``: a folder's files by name, size and first MiB; else its name.

    Reading all bytes would take minutes. Further training keeps sizes and header: give such models folders of other
    names, or a ``namespace`` each. The folder's name is not part of the digest, its config is.
    """
    folder = Path(model)
    if not folder.is_dir():
        return f"{model}@{revision or 'main'}"
    digest = hashlib.sha256()
    for path in sorted({path for ending in _WEIGHTS for path in folder.glob(ending)}):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HEADER_BYTES))
    return digest.hexdigest()


def facts_of_model(model: str, revision: str | None) -> dict[str, Any]:
    """Return the identity of a model: its weights and its configuration; for a name, its revision; empty for none."""
    if not model:
        return {}
    path = Path(model, "config.json")
    config = json.loads(path.read_bytes()) if path.is_file() else {}
    known = {name: value for name, value in config.items() if name not in _NOT_OF_THE_MODEL}
    return {"weights": digest_of_weights(model, revision), "config": known}


def block_keys(fingerprint: Fingerprint, hashes: Sequence[bytes], part: int) -> list[ChunkKey]:
    """Return the key of each block's bytes on one rank."""
    return [kv_chunk_key(fingerprint, BlockHash(each), part) for each in hashes]
