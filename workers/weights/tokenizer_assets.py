"""The tokenizer assets of a checkpoint: those of a folder (`model_files`), or from GGUF metadata (`gguf_tokenizer`).

The makers' sampling defaults in a GGUF file are its ``general.sampling.*``, as in llama.cpp. Some files lack them
though their makers publish them elsewhere: those models have a row in a table here, by the name in their files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tanghulu.model_files.assets import TokenizerAssets, assets_of_folder, checked_defaults
from tanghulu.model_files.fields import Fields
from tanghulu.session.sampling import SamplingDefaults
from tanghulu.workers.weights.gguf_file import GgufFile
from tanghulu.workers.weights.gguf_tokenizer import build_gguf_tokenizer
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


def defaults_from_gguf(metadata: Mapping[str, Any]) -> SamplingDefaults:
    """Return the defaults in GGUF metadata, or those of the model's page. Raises ModelUnsupported as above."""
    given = {name: metadata[key] for key, name in _GGUF_KEYS.items() if key in metadata}
    if given:
        return checked_defaults(given)
    title = str(metadata.get("general.basename", metadata.get("general.name", ""))).lower()
    return next((known for name, known in _OF_MODELS.items() if title.startswith(name)), SamplingDefaults())


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
