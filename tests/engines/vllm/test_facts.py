"""What the connector refuses at its start, and which facts keep blocks apart. vLLM's configuration as plain objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tanghulu.engines.common.options import ConnectorOptions
from tanghulu.engines.vllm.facts import fingerprint_of, refuse_what_cannot_work
from tanghulu.errors import ConfigError

OPTIONS = ConnectorOptions(master="h:1")


def config(**changes: Any) -> tuple[Any, Any]:
    """vLLM's two configurations, with ``changes`` by attribute name, wherever it stands."""
    hf = {"rope_theta": 1e4, "_name_or_path": changes.pop("path", "/one"), **changes.pop("hf", {})}
    spec = SimpleNamespace(block_size=64, page_size_bytes=4096)
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


def test_what_works_is_let_in():
    refuse_what_cannot_work(*config())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_load_failure_policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
        ({"prefix_caching_hash_algo": "xxhash_cbor"}, "sha256_cbor"),
        ({"enable_prefix_caching": False}, "--no-enable-prefix-caching"),
        ({"kv_cache_groups": [1, 2]}, "2 groups"),
        ({"device_type": "cuda"}, "on CPUs, not on 'cuda'"),
        ({"pipeline_parallel_size": 2}, "knows only 1"),
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
        {"tensor_parallel_size": 2},
        {"prefix_caching_hash_algo": "sha256"},
        {"revision": "v2"},
        {"model": "org/other"},
        {"hf": {"rope_theta": 1e6}},
    ],
)
def test_blocks_that_mean_something_else_have_other_names(changes):
    assert fingerprint_of(*config(**changes), OPTIONS) != fingerprint_of(*config(), OPTIONS)


def test_where_the_model_lies_does_not_matter_and_a_namespace_does(monkeypatch):
    one = fingerprint_of(*config(), OPTIONS)
    assert fingerprint_of(*config(path="/two"), OPTIONS) == one
    assert fingerprint_of(*config(), ConnectorOptions(master="other:1", namespace="b")) != one
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert fingerprint_of(*config(), OPTIONS) != one
