"""Data with which a conductor turns text into tokens and back, read from a folder of Hugging Face's format.

Owns the reading of ``tokenizer.json`` and the files beside it; encodes nothing itself. The makers' sampling defaults,
for requests that set none, come from ``generation_config.json``, as in vLLM and transformers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tanghulu.errors import ModelUnsupported
from tanghulu.model_files.fields import Fields, read_json, read_text
from tanghulu.model_files.hf_tokenizer import SpecialTokens, read_tokenizer
from tanghulu.session.model_card import ModelCard
from tanghulu.session.sampling import SamplingDefaults


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

    def card(self, **more: Any) -> ModelCard:
        """Return the card of a model with this tokenizer; ``more`` are the fields of everything else."""
        return ModelCard(
            eos_token_ids=self.eos_ids,
            tokenizer_json_zlib=zlib.compress(self.tokenizer_json, 1),
            chat_template=self.chat_template or "",
            bos_token=self.bos_token or "",
            eos_token=self.eos_token or "",
            add_bos=self.add_bos,
            sampling_defaults=self.defaults,
            **more,
        )


def defaults_from_hf(generation: Mapping[str, Any]) -> SamplingDefaults:
    """Return the defaults in ``generation_config.json``. Raises ModelUnsupported for one that no request could set."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return checked_defaults({name: generation[name] for name in names if generation.get(name) is not None})


def checked_defaults(given: Mapping[str, Any]) -> SamplingDefaults:
    """Return sampling defaults of a model's files. Raises ModelUnsupported unless a request could set them."""
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


def assets_of_folder(
    folder: Path, bos_id: int | None, eos_ids: Iterable[int], *, vocab: int | None = None
) -> TokenizerAssets:
    """Read the tokenizer in a folder of Hugging Face's format, of a model with ``vocab`` tokens if known.

    A text ends at the tokenizer's own ``eos_token``, at those of generation_config.json and at ``eos_ids``. Raises
    ModelUnsupported if there is no tokenizer,
    or an unreadable one.
    """
    config_path, generation = folder / "tokenizer_config.json", folder / "generation_config.json"
    config = read_json(config_path) if config_path.exists() else {}
    special = SpecialTokens.of(folder, config)
    tokenizer = read_tokenizer(folder, config, special, vocab)
    fields, further = Fields(config, str(config_path)), read_json(generation) if generation.exists() else {}
    ends = {*eos_ids, *Fields(further, str(generation)).ids("eos_token_id")}
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
        defaults=defaults_from_hf(further),
    )


def _chat_template(folder: Path, config: Fields) -> str | None:
    separate = folder / "chat_template.jinja"
    if separate.exists():
        return read_text(separate)
    if config.is_text("chat_template"):
        return config.text("chat_template")
    # Of several named templates, the default one is for chats.
    templates = [Fields(entry, "tokenizer_config.json, chat_template") for entry in config.items("chat_template", dict)]
    named = {each.text("name"): each.text("template") for each in templates}
    return named.get("default")
