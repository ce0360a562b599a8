"""Names of blocks in the store: ``kv/<fingerprint>/<block hash>/<part>``.

An engine's block hash names the tokens, not the model that computed the KV nor the layout of its bytes. The fingerprint
names those: engines with equal fingerprints can read each other's bytes, and no other finds them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tanghulu.types import BlockHash, ChunkKey, Fingerprint, kv_chunk_key

#: Part of every fingerprint: a new way to lay bytes out gets a new number.
FORMAT_VERSION = 1
#: Files of weights, by their endings.
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
#: The front of a file of weights that goes into the digest: a safetensors header names every tensor and its place.
_HEADER_BYTES = 1 << 20
#: Parts of a model's configuration that say where it came from, and nothing of what it computes.
_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version")


def make_fingerprint(facts: Mapping[str, Any]) -> Fingerprint:
    """The fingerprint of everything that decides what a block's bytes mean: JSON in canonical form, SHA-256."""
    text = json.dumps({"format": FORMAT_VERSION, **facts}, sort_keys=True, separators=(",", ":"), default=str)
    return Fingerprint(hashlib.sha256(text.encode()).digest()[:16])


def digest_of_weights(model: str, revision: str | None) -> str:
    """What tells the weights of ``model`` from others: a folder's files by name, size and first MiB; else its name.

    Reading all bytes would take minutes. Weights that were trained further keep sizes and header: give such models
    folders of other names, or a ``namespace`` each. The folder's name is no part of the digest, its config is.
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
    """What tells a model from others: its weights and its configuration; of a name, its revision; nothing of none."""
    if not model:
        return {}
    path = Path(model, "config.json")
    config = json.loads(path.read_bytes()) if path.is_file() else {}
    known = {name: value for name, value in config.items() if name not in _NOT_OF_THE_MODEL}
    return {"weights": digest_of_weights(model, revision), "config": known}


def block_keys(fingerprint: Fingerprint, hashes: Sequence[bytes], part: int) -> list[ChunkKey]:
    """The key of each block's bytes on one rank."""
    return [kv_chunk_key(fingerprint, BlockHash(each), part) for each in hashes]
