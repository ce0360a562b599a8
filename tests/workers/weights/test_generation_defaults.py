"""The sampling defaults of models: from generation_config.json, from GGUF metadata, from the models' own pages."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from tanghulu.errors import ModelUnsupported
from tanghulu.model_files.assets import defaults_from_hf
from tanghulu.session.sampling import SamplingDefaults
from tanghulu.workers.weights.source import ModelSource
from tanghulu.workers.weights.tokenizer_assets import defaults_from_gguf, load_tokenizer_assets


def test_from_generation_config():
    given = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2], "min_p": None}
    assert defaults_from_hf(given) == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
    assert defaults_from_hf({"top_k": -1}) == defaults_from_hf({}) == SamplingDefaults()


def test_beside_safetensors(tmp_path: Path):
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    config: Any = SimpleNamespace(bos_id=None, eos_ids=frozenset(), vocab=9)
    source = ModelSource("m", config, (), tmp_path)
    assert load_tokenizer_assets(source).defaults == SamplingDefaults()
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_k": 20}))
    assert load_tokenizer_assets(source).defaults == SamplingDefaults(temperature=0.7, top_k=20)


def test_from_gguf():
    given = {"general.sampling.temp": 0.5, "general.sampling.top_k": 40, "general.basename": "smollm2"}
    assert defaults_from_gguf(given) == SamplingDefaults(temperature=0.5, top_k=40)
    assert defaults_from_gguf({"general.basename": "smollm2"}) == SamplingDefaults(temperature=0.2, top_p=0.9)
    assert defaults_from_gguf({"general.name": "SmolLM2 135M"}).temperature == 0.2
    assert defaults_from_gguf({"general.name": "other"}) == SamplingDefaults()


@pytest.mark.parametrize(
    "wrong", [{"temperature": "hot"}, {"temperature": -1}, {"top_p": 0}, {"top_k": []}, {"min_p": 2}]
)
def test_what_no_request_could_ask_for(wrong):
    with pytest.raises(ModelUnsupported, match="sampling defaults"):
        defaults_from_hf(wrong)
