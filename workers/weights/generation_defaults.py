"""Sampling defaults of a model's makers, for requests that do not set them.

Read from ``generation_config.json`` beside safetensors, as vLLM and transformers do, or from a GGUF file's
``general.sampling.*``, as llama.cpp does. Some files lack them though their makers publish them elsewhere: those models
have a row in a table here, by the name in their files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tanghulu.errors import ModelUnsupported
from tanghulu.session.sampling import SamplingDefaults

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
        raise ModelUnsupported(f"the model's sampling defaults {dict(given)} are no numbers: {error}") from error
    if not (
        0 <= defaults.temperature <= 100
        and 0 < defaults.top_p <= 1
        and 0 <= defaults.min_p <= 1
        and 0 < defaults.repetition_penalty <= 10
    ):
        raise ModelUnsupported(f"the model's sampling defaults {dict(given)} are out of range")
    return defaults
