"""Data with which a conductor turns text into tokens and back, in the form sent to conductors.

Owns the reading of tokenizers from checkpoints: ``tokenizer.json`` and the files beside it (`hf_tokenizer`), or the
vocabulary inside GGUF metadata (`gguf_tokenizer`). Encodes nothing itself.

The makers' sampling defaults, for requests that set none, come from ``generation_config.json`` beside safetensors, as
in vLLM and transformers, or from a GGUF file's ``general.sampling.*``, as in llama.cpp. Some files lack them though
their makers publish them elsewhere: those models have a row in a table here, by the name in their files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tanghulu.errors import ModelUnsupported
from tanghulu.session.sampling import SamplingDefaults
from tanghulu.workers.weights.fields import Fields, read_json
from tanghulu.workers.weights.gguf_file import GgufFile
from tanghulu.workers.weights.gguf_tokenizer import build_gguf_tokenizer
from tanghulu.workers.weights.hf_tokenizer import SpecialTokens, read_tokenizer
from tanghulu.workers.weights.source import ModelSource

#: Names in GGUF metadata (general.basename or general.name, in lower case) -> values of the model's page.
_OF_MODELS: Final = {
    # https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct: "temperature=0.2, top_p=0.9"
    "smollm2": SamplingDefaults(temperature=0.2, top_p=0.9),
}
#: Names of llama.cpp's metadata -> ours.
_GGUF_KEYS: Final = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def defaults_from_hf(generation: Mapping[str, Any]) -> SamplingDefaults:
    """Return the defaults in ``generation_config.json``. Raises ModelUnsupported for one that no request could set."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return _checked({name: generation[name] for name in names if generation.get(name) is not None})


def defaults_from_gguf(metadata: Mapping[str, Any]) -> SamplingDefaults:
    """Return the defaults in GGUF metadata, or those of the model's page. Raises ModelUnsupported as above."""
    given = {name: metadata[key] for key, name in _GGUF_KEYS.items() if key in metadata}
    if given:
        return _checked(given)
    title = str(metadata.get("general.basename", metadata.get("general.name", ""))).lower()
    return next((known for name, known in _OF_MODELS.items() if title.startswith(name)), SamplingDefaults())


def _checked(given: Mapping[str, Any]) -> SamplingDefaults:
    try:
        numbers = {name: float(value) for name, value in given.items() if name != "top_k"}
        defaults = SamplingDefaults(**numbers, top_k=max(int(given.get("top_k", 0)), 0))  # -1 also disables it
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelUnsupported(f"the model's sampling defaults {dict(given)} are not numbers: {error}") from error
    if not (
        0 <= defaults.temperature <= 100
        and 0 < defaults.top_p <= 1
        and 0 <= defaults.min_p <= 1
        and 0 < defaults.repetition_penalty <= 10
    ):
        raise ModelUnsupported(f"the model's sampling defaults {dict(given)} are out of range")
    return defaults


@dataclass(frozen=True, slots=True)
class TokenizerAssets:
    """A tokenizer as data. ``tokenizer_json`` is input for ``tokenizers.Tokenizer.from_buffer``.

    With ``add_bos`` the tokenizer itself prepends ``bos_token`` when special tokens are requested; the text of a chat
    template has its own and must be encoded without. ``eos_ids`` end a text by default; ``defaults`` are its makers'
    sampling defaults.
    """

    tokenizer_json: bytes
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    add_bos: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)


def load_tokenizer_assets(source: ModelSource) -> TokenizerAssets:
    """Read the tokenizer of ``source``.

    Raises ModelUnsupported if the files have none, or one of an unsupported kind.
    """
    if source.gguf_path is not None:
        return _from_gguf(source, source.gguf_path)
    assert source.config_dir is not None
    config = source.config
    return assets_of_folder(source.config_dir, config.bos_id, config.eos_ids, vocab=config.vocab)


def _from_gguf(source: ModelSource, path: Path) -> TokenizerAssets:
    with contextlib.closing(GgufFile(path)) as file:
        metadata = file.metadata
    tokenizer, add_bos = build_gguf_tokenizer(metadata)
    fields = Fields(metadata, "GGUF metadata")
    tokens = fields.items("tokenizer.ggml.tokens", str)
    bos, eos = (min(fields.ids(f"tokenizer.ggml.{name}_token_id"), default=None) for name in ("bos", "eos"))
    return TokenizerAssets(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=fields.optional_text("tokenizer.chat_template"),
        bos_token=None if bos is None else tokens[bos],
        eos_token=None if eos is None else tokens[eos],
        add_bos=add_bos,
        bos_id=source.config.bos_id,
        eos_ids=tuple(sorted(source.config.eos_ids)),
        defaults=defaults_from_gguf(metadata),
    )


def assets_of_folder(
    folder: Path, bos_id: int | None, eos_ids: Iterable[int], *, vocab: int | None = None
) -> TokenizerAssets:
    """Read the tokenizer in a folder of Hugging Face's format, of a model with ``vocab`` tokens if known.

    The tokenizer's own ``eos_token`` ends a text, as do ``eos_ids``. Raises ModelUnsupported if there is no tokenizer,
    or an unreadable one.
    """
    config_path, generation = folder / "tokenizer_config.json", folder / "generation_config.json"
    config = read_json(config_path) if config_path.exists() else {}
    special = SpecialTokens.of(folder, config)
    tokenizer = read_tokenizer(folder, config, special, vocab)
    fields = Fields(config, str(config_path))
    ends = set(eos_ids)
    bos, eos = special.named.get("bos_token"), special.named.get("eos_token")
    if eos is not None and (end := tokenizer.token_to_id(eos)) is not None:
        ends.add(end)
    template = _chat_template(folder, fields)
    return TokenizerAssets(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=None if template is None else special.set_in(template),
        bos_token=bos,
        eos_token=eos,
        add_bos=fields.flag("add_bos_token"),
        bos_id=bos_id,
        eos_ids=tuple(sorted(ends)),
        defaults=defaults_from_hf(read_json(generation)) if generation.exists() else SamplingDefaults(),
    )


def _chat_template(folder: Path, config: Fields) -> str | None:
    separate = folder / "chat_template.jinja"
    if separate.exists():
        try:
            return separate.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelUnsupported(f"cannot read {separate}: {error}") from error
    if config.is_text("chat_template"):
        return config.text("chat_template")
    # Of several named templates, the default one is for chats.
    templates = [Fields(entry, "tokenizer_config.json, chat_template") for entry in config.items("chat_template", dict)]
    named = {each.text("name"): each.text("template") for each in templates}
    return named.get("default")
