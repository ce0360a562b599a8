"""What the connector refuses at its start, and which facts keep blocks apart. vLLM's configuration as plain objects."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tanghulu.engines.vllm.facts import fingerprint_of, fingerprint_of_tier, refuse_what_cannot_work
from tanghulu.errors import ConfigError


def config(**changes: Any) -> tuple[Any, Any]:
    """vLLM's two configurations, with ``changes`` by attribute name, wherever it stands."""
    hf = {"rope_theta": 1e4, "_name_or_path": changes.pop("path", "/one"), **changes.pop("hf", {})}
    spec = SimpleNamespace(block_size=64, page_size_bytes=4096, kv_quant_mode=0)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["0", "1"])
    parts = {
        "kv_transfer_config": SimpleNamespace(kv_load_failure_policy="recompute"),
        "cache_config": SimpleNamespace(
            prefix_caching_hash_algo="sha256_cbor", enable_prefix_caching=True, cache_dtype="auto"
        ),
        "device_config": SimpleNamespace(device_type="cpu"),
        "parallel_config": SimpleNamespace(
            pipeline_parallel_size=1, tensor_parallel_size=1, decode_context_parallel_size=1
        ),
        "model_config": SimpleNamespace(
            model="org/model", revision=None, dtype="float32", quantization=None, hf_config=None
        ),
    }
    parts["model_config"].hf_config = SimpleNamespace(to_dict=lambda: dict(hf))
    cache = SimpleNamespace(kv_cache_groups=[group], kv_cache_layout="NHD")
    for name, value in changes.items():
        (owner,) = [each for each in (*parts.values(), spec, group, cache) if hasattr(each, name)]
        setattr(owner, name, value)
    return SimpleNamespace(**parts), cache


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_what_works_is_let_in(device_type):
    refuse_what_cannot_work(*config(device_type=device_type))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_load_failure_policy": "fail"}, 'set it to "recompute"'),
        ({"prefix_caching_hash_algo": "xxhash_cbor"}, "sha256_cbor"),
        ({"enable_prefix_caching": False}, "--no-enable-prefix-caching"),
        ({"kv_cache_groups": [1, 2]}, "2 KV cache groups"),
        ({"device_type": "xpu"}, "on CPUs and CUDA GPUs, not on 'xpu'"),
        ({"pipeline_parallel_size": 2}, "supports only 1"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_change(changes, message, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match=message):
        refuse_what_cannot_work(*config(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"cache_dtype": "fp8"},
        {"quantization": "awq"},
        {"block_size": 128},
        {"page_size_bytes": 8192},
        {"layer_names": ["0"]},
        {"kv_cache_layout": "HND"},
        {"device_type": "cuda"},
        {"kv_quant_mode": 5},
        {"tensor_parallel_size": 2},
        {"prefix_caching_hash_algo": "sha256"},
        {"revision": "v2"},
        {"model": "org/other"},
        {"hf": {"rope_theta": 1e6}},
    ],
)
def test_blocks_that_mean_something_else_have_other_names(changes):
    assert fingerprint_of(*config(**changes), "") != fingerprint_of(*config(), "")


def test_where_the_model_lies_does_not_matter_and_a_namespace_does(monkeypatch):
    one = fingerprint_of(*config(), "")
    assert fingerprint_of(*config(path="/two"), "") == one
    assert fingerprint_of(*config(), "b") != one
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert fingerprint_of(*config(), "") != one


def tier_config(model: str, **changes: Any) -> Any:
    """vLLM's ``OffloadingConfig``, with ``changes`` by name, wherever it stands."""
    group = SimpleNamespace(group_id=0, tokens_per_block=64, layer_names=("0", "1"))
    parallel = SimpleNamespace(world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1)
    parts = {
        "model": SimpleNamespace(name=model, dtype="float32"),
        "cache": SimpleNamespace(tokens_per_hash=64, blocks_per_chunk=1),
        "parallel": parallel,
    }
    whole = SimpleNamespace(
        **parts,
        groups=(group,),
        worker_kv_bytes_per_block=4000,
        kv_cache_layout="NHD",
        replicated_layout=False,
        canonical_layout=False,
    )
    for name, value in changes.items():
        (owner,) = [each for each in (*parts.values(), group, whole) if hasattr(each, name)]
        setattr(owner, name, value)
    return whole


def test_a_tier_of_a_model_without_a_folder_needs_a_namespace() -> None:
    with pytest.raises(ConfigError, match="revision of 'org/model'"):
        fingerprint_of_tier(tier_config("org/model"), 4096, "cuda", "")
    one, two = (fingerprint_of_tier(tier_config("org/model"), 4096, "cuda", name) for name in ("v1", "v2"))
    assert one != two


def test_facts_that_keep_chunks_of_tiers_apart(tmp_path: Path) -> None:
    def said(**changes: Any) -> Any:
        return fingerprint_of_tier(tier_config(str(tmp_path), **changes), 4096, "cuda", "")

    (tmp_path / "config.json").write_text('{"rope_theta": 10000, "_name_or_path": "/one"}')
    plain = said()
    changes: list[dict[str, Any]] = [
        *({"dtype": "bfloat16"}, {"tokens_per_block": 32}, {"layer_names": ("0",)}, {"blocks_per_chunk": 2}),
        *({"tp_size": 2}, {"kv_cache_layout": "HND"}, {"canonical_layout": True}, {"tokens_per_hash": 32}),
    ]
    assert len({plain, *(said(**each) for each in changes)}) == 1 + len(changes)
    (tmp_path / "config.json").write_text('{"rope_theta": 10000, "_name_or_path": "/two"}')
    assert said() == plain, "where it came from"
    (tmp_path / "config.json").write_text('{"rope_theta": 500000}')
    assert said() != plain
