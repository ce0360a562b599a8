"""config.json read as transformers reads it: published ones load, variants give its logits, all else is refused."""

from __future__ import annotations

import contextlib
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tanghulu.errors import ModelUnsupported
from tanghulu.workers.weights.hf_config import FAMILIES, config_from_hf
from tanghulu.workers.weights.source import resolve_model
from tests.workers.weights import hub
from tests.workers.weights.hub import KINDS, TINY

HUB: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "hub_configs.json").read_text())
SLIDING, FULL = "sliding_attention", "full_attention"
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
#: What transformers writes and this worker computes: architecture, fields of the configuration class.
COMPUTED: dict[str, tuple[str, dict[str, Any]]] = {
    **{architecture: (architecture, {}) for architecture in KINDS},
    **{
        f"{architecture}, {kind}": (architecture, {"rope_parameters": scaling | {"rope_theta": 5e5}})
        for architecture in KINDS
        if architecture != "gemma3_text"
        for kind, scaling in (("linear", LINEAR), ("llama3", LLAMA3), ("base", {"rope_type": "default"}))
    },
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama, no grouping": ("llama", {"num_key_value_heads": 4}),
    "llama, heads of 6": ("llama", {"head_dim": 6}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "qwen3, windows": ("qwen3", {"use_sliding_window": True, "sliding_window": 100, "layer_types": [FULL, SLIDING]}),
    "qwen3_moe, dense layers": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "qwen3_moe, sparse step": ("qwen3_moe", {"decoder_sparse_step": 2, "norm_topk_prob": True}),
    "qwen3_moe, biases": ("qwen3_moe", {"attention_bias": True}),
    "gemma3_text, biases": ("gemma3_text", {"attention_bias": True}),
    "gemma3_text, scalar": ("gemma3_text", {"query_pre_attn_scalar": 11}),
    "gemma3_text, untied": ("gemma3_text", {"tie_word_embeddings": False}),
    "gemma3_text, linear": (
        "gemma3_text",
        {"rope_parameters": {FULL: LINEAR | {"rope_theta": 1e6}, SLIDING: {"rope_type": "default", "rope_theta": 1e4}}},
    ),
}
#: Changes of a config.json that is as older versions write it; a key that is None is taken out.
OLDER: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, rope_theta": ("llama", {"rope_parameters": None, "rope_theta": 3000.0}),
    "llama, rope_scaling": ("llama", {"rope_parameters": None, "rope_theta": 3000.0, "rope_scaling": LINEAR}),
    "llama, type": ("llama", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}}),
    "llama, llama3": ("llama", {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "llama, no defaults": ("llama", {"rope_parameters": None, "rms_norm_eps": None, "head_dim": None}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mixtral, no eps": ("mixtral", {"rms_norm_eps": None, "rope_parameters": None}),
    "qwen3_moe, num_experts": ("qwen3_moe", {"num_local_experts": None, "num_experts": 4}),
    "gemma3_text, rope_scaling": (
        "gemma3_text",
        {"rope_parameters": None, "rope_theta": 9e5, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR},
    ),
    "gemma3_text, pattern": ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 2}),
    "gemma3_text, tied": ("gemma3_text", {"tie_word_embeddings": None}),
}
#: Changes that would alter the results and are not computed: the key that the message names.
REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "mlp_bias", {"mlp_bias": True}),
    ("llama", "hidden_act", {"hidden_act": "gelu"}),
    ("llama", "is_causal", {"is_causal": False}),
    ("llama", "is_causal", {"is_causal": None}),
    ("llama", "rope_scaling", {"rope_parameters": LINEAR, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    ("llama", "yarn", {"rope_parameters": None, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    ("llama", "full_attention", {"rope_parameters": {FULL: LINEAR}}),
    ("llama", "mrope_section", {"rope_parameters": LINEAR | {"mrope_section": [1]}}),
    ("llama", "'type'", {"rope_parameters": LINEAR | {"type": "default"}}),
    ("llama", "partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    ("llama", "quantization_config", {"quantization_config": {"quant_method": "fp8"}}),
    ("llama", "embedding_multiplier", {"embedding_multiplier": 12.0}),
    ("llama", "logits_scaling", {"logits_scaling": 8}),
    ("llama", "per_layer_config", {"per_layer_config": {"0": {"num_key_value_heads": 1}}}),
    ("llama", "rope_interleaved", {"rope_interleaved": True}),
    ("llama", "layer_types", {"layer_types": [SLIDING, FULL]}),
    ("llama", "use_qk_norm", {"use_qk_norm": True}),
    ("qwen2", "layer_types", {"layer_types": ["linear_attention", FULL]}),
    ("qwen2", "dual_chunk_attention_config", {"dual_chunk_attention_config": {"chunk_size": 64}}),
    ("qwen3_moe", "num_local_experts", {"num_local_experts": 4, "num_experts": 5}),
    ("qwen3_moe", "shared_expert_intermediate_size", {"shared_expert_intermediate_size": 32}),
    ("gemma3_text", "final_logit_softcapping", {"final_logit_softcapping": 30.0}),
    ("gemma3_text", "attn_logit_softcapping", {"attn_logit_softcapping": 50.0}),
    ("gemma3_text", "use_bidirectional_attention", {"use_bidirectional_attention": True}),
    ("gemma3_text", "hidden_activation", {"hidden_activation": "silu"}),
    ("gemma3_text", "'type'", {"rope_parameters": {SLIDING: {"type": "linear", "factor": 4.0}}}),
    ("gemma3_text", "linear", {"rope_parameters": {SLIDING: LINEAR}}),
    ("gemma3_text", "'type'", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    ("gemma3_text", "rope_type", {"rope_parameters": LINEAR}),
]
ROPE = ("rope_parameters", "rope_scaling")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny model of an architecture, and its config.json as transformers wrote it."""

    def make(architecture: str) -> tuple[Path, dict[str, Any]]:
        path = tmp_path_factory.mktemp(architecture)
        return path, hub.write(path, architecture)

    return cache(make)


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``changes`` of a written config; None takes a key out where it stands."""
    return {key: value for key, value in (config | changes).items() if value is not None or key not in config}


@pytest.mark.parametrize("name", HUB)
def test_published_configs_load(name: str) -> None:
    read = config_from_hf(HUB[name])
    for kind, old in (("torch_dtype", "dtype"), ("transformers_version", "_name_or_path")):
        assert config_from_hf({key: value for key, value in HUB[name].items() if key != kind} | {old: "x"}) == read
    window = HUB[name].get("sliding_window") if name == "mistralai/Mistral-7B-v0.1" else None
    assert read.max_context == (window or HUB[name]["max_position_embeddings"])


@pytest.mark.parametrize("architecture", FAMILIES)
def test_defaults_and_harmless_keys_are_those_of_transformers(architecture: str) -> None:
    """A later version of transformers that changes a default or adds a field fails here."""
    import transformers
    from transformers import GenerationConfig

    kind, more = KINDS[architecture]
    needed = TINY.keys() - {"num_key_value_heads", "head_dim", "max_position_embeddings"}
    fields = {key: value for key, value in (TINY | more).items() if key in needed or key in more}
    fields.pop("sliding_window", None)
    fields |= {"hidden_size": 4096, "num_attention_heads": 32}
    theirs = getattr(transformers, kind)(**fields)
    bare = {**fields, "model_type": architecture}
    assert config_from_hf(bare) == config_from_hf({**theirs.to_dict(), "model_type": architecture})
    generation = dict.fromkeys(GenerationConfig._get_default_generation_params(), 1)
    assert config_from_hf(bare | generation) == config_from_hf(bare)


@pytest.mark.parametrize("name", COMPUTED)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    architecture, fields = COMPUTED[name]
    hub.write(tmp_path, architecture, **fields)
    torch.testing.assert_close(hub.ours(tmp_path), hub.theirs(tmp_path), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", OLDER)
def test_logits_are_those_of_transformers_with_older_files(name: str, written: Any) -> None:
    architecture, changes = OLDER[name]
    path, config = written(architecture)
    hub.change(path, changed(config, changes))
    torch.testing.assert_close(hub.ours(path), hub.theirs(path), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("architecture", "key", "changes"), REFUSED)
def test_what_is_not_computed_is_refused(architecture: str, key: str, changes: dict[str, Any], written: Any) -> None:
    _, config = written(architecture)
    with pytest.raises(ModelUnsupported, match=key):
        config_from_hf(changed(config, changes))


def mutations(config: dict[str, Any]) -> list[dict[str, Any]]:
    """``config`` with one key, or one of its rotary embedding's, taken out or given a value of any kind."""
    keys = [*config, *ROPE, "rope_theta", "partial_rotary_factor", "is_causal", "per_layer_config", "unheard_of"]
    made = [{key: value for key, value in config.items() if key != gone} for gone in config]
    made += [config | {key: value} for key in dict.fromkeys(keys) for value in hub.ANYTHING if key != "model_type"]
    plain = {key: value for key, value in config.items() if key not in ROPE}
    for scaling in (LINEAR, LLAMA3):
        made += [
            plain | {"rope_scaling": scaling | {key: value}} for key in [*scaling, "type"] for value in hub.ANYTHING
        ]
    made += [plain | {"rope_parameters": {kind: value}} for kind in (FULL, SLIDING) for value in hub.ANYTHING]
    return made


@pytest.mark.parametrize("architecture", FAMILIES)
def test_no_value_of_any_key_is_a_traceback(architecture: str, written: Any) -> None:
    loaded = 0
    for config in mutations(written(architecture)[1]):
        with contextlib.suppress(ModelUnsupported):
            loaded += config_from_hf(config).vocab > 0
    assert loaded > 100


def check_alike(path: Path, config: dict[str, Any]) -> None:
    """Both load and compute the same, or one of them refuses."""
    hub.change(path, config)
    try:
        count = min(len(hub.TOKENS), resolve_model(str(path)).config.max_context)
        got = hub.ours(path, count=count)
    except ModelUnsupported:
        return
    try:
        wanted = hub.theirs(path, count)
    except Exception:  # noqa: BLE001 - whatever a config that transformers does not take makes it raise
        return
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4, msg=json.dumps(config))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_mutated_configs_are_refused_or_computed_as_transformers_does(architecture: str, written: Any) -> None:
    path, config = written(architecture)
    for mutated in random.Random(architecture).sample(mutations(config), 12):
        check_alike(path, mutated)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FAMILIES)
def test_many_mutations_are_refused_or_computed_as_transformers_does(architecture: str, written: Any) -> None:
    path, config = written(architecture)
    for mutated in random.Random(architecture).sample(mutations(config), 150):
        check_alike(path, mutated)
