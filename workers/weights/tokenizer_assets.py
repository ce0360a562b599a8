"""The data that a conductor needs to turn text into tokens and back, as it is sent to conductors.

Owns the reading of tokenizers from checkpoints: ``tokenizer.json`` and its config beside safetensors, or the
vocabulary inside GGUF metadata (`gguf_tokenizer`). Encodes nothing itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tanghulu.errors import ModelUnsupported
from tanghulu.workers.weights.generation_defaults import GenerationDefaults, defaults_from_gguf, defaults_from_hf
from tanghulu.workers.weights.gguf_file import GgufFile
from tanghulu.workers.weights.gguf_tokenizer import build_gguf_tokenizer
from tanghulu.workers.weights.source import ModelSource, read_json


@dataclass(frozen=True, slots=True)
class TokenizerAssets:
    """A tokenizer as data. ``tokenizer_json`` is what ``tokenizers.Tokenizer.from_buffer`` reads.

    With ``add_bos`` the tokenizer itself puts ``bos_token`` in front when special tokens are asked for; a text
    that a chat template made has its own and must be encoded without. ``eos_ids`` end a text by default;
    ``defaults`` are what its makers want tokens to be drawn with.
    """

    tokenizer_json: bytes
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    add_bos: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)


def load_tokenizer_assets(source: ModelSource) -> TokenizerAssets:
    """Read the tokenizer of ``source``.

    Raises ModelUnsupported if the files have none, or one of a kind that cannot be built.
    """
    if source.gguf_path is not None:
        return _from_gguf(source, source.gguf_path)
    assert source.config_dir is not None
    return assets_of_folder(source.config_dir, source.config.bos_id, source.config.eos_ids)


def _from_gguf(source: ModelSource, path: Path) -> TokenizerAssets:
    with contextlib.closing(GgufFile(path)) as file:
        metadata = file.metadata
    tokenizer, add_bos = build_gguf_tokenizer(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    return TokenizerAssets(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=metadata.get("tokenizer.chat_template"),
        bos_token=_token_at(tokens, metadata.get("tokenizer.ggml.bos_token_id")),
        eos_token=_token_at(tokens, metadata.get("tokenizer.ggml.eos_token_id")),
        add_bos=add_bos,
        bos_id=source.config.bos_id,
        eos_ids=tuple(sorted(source.config.eos_ids)),
        defaults=defaults_from_gguf(metadata),
    )


def _token_at(tokens: list[str], index: int | None) -> str | None:
    return tokens[index] if index is not None and 0 <= index < len(tokens) else None


def assets_of_folder(folder: Path, bos_id: int | None, eos_ids: Iterable[int]) -> TokenizerAssets:
    """Read the tokenizer in a folder of Hugging Face's format; raises ModelUnsupported if it has none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelUnsupported(
            f"{folder} has no tokenizer.json; convert its tokenizer with transformers' save_pretrained"
        )
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.exists() else {}
    generation = folder / "generation_config.json"
    return TokenizerAssets(
        tokenizer_json=path.read_bytes(),
        chat_template=_chat_template(folder, config),
        bos_token=_token_text(config.get("bos_token")),
        eos_token=_token_text(config.get("eos_token")),
        add_bos=bool(config.get("add_bos_token", False)),
        bos_id=bos_id,
        eos_ids=tuple(sorted(eos_ids)),
        defaults=defaults_from_hf(read_json(generation)) if generation.exists() else GenerationDefaults(),
    )


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    separate = folder / "chat_template.jinja"
    if separate.exists():
        return separate.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates: the one called default is for chats
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):  # an AddedToken written out
        value = value.get("content")
    return value if isinstance(value, str) else None
