"""The options of ``tanghulu vllm-worker`` as vLLM's engine arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tanghulu.engines.common.options import ConnectorOptions
from tanghulu.engines.vllm_worker.config import VllmWorkerConfig
from tanghulu.errors import ConfigError
from tanghulu.masters import Masters
from tanghulu.runtime.kv_endpoints import EventEndpoints

SOCKETS = EventEndpoints("ipc:///run/events", "ipc:///run/replay")


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def arguments(**options: Any) -> dict[str, Any]:
    return VllmWorkerConfig(**options).engine_arguments(SOCKETS)


def test_the_store_and_further_arguments(model):
    made = arguments(
        model=model, master=Masters.parse("h:1,h:2"), tenant="t", token="secret", vllm='{"max_model_len": 99}'
    )
    assert (made["max_model_len"], made["model"]) == (99, model)
    assert made["kv_events_config"]["replay_endpoint"] == "ipc:///run/replay"
    transfer = made["kv_transfer_config"]
    assert transfer["kv_load_failure_policy"] == "recompute"
    options = ConnectorOptions.parse(transfer["kv_connector_extra_config"])
    assert (options.master, options.tenant, options.token) == ("h:1,h:2", "t", "secret")
    assert "kv_transfer_config" not in arguments(model=model, store=False)


def test_sizes_are_vllm_s_own_unless_given(model):
    sizes = {"block_size", "kv_cache_memory_bytes", "max_num_batched_tokens"}
    assert not sizes & arguments(model=model).keys()
    made = arguments(model=model, block_tokens=32, kv_memory=1 << 28, max_num_batched_tokens=256)
    assert [made[each] for each in sorted(sizes)] == [32, 1 << 28, 256]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"vllm": "nonsense"}, "not valid JSON"),
        ({"vllm": "[1]"}, "JSON object"),
        ({"vllm": '{"block_size": 16}'}, "use --block-tokens"),
        ({"vllm": '{"prefix_caching_hash_algo": "xxhash"}'}, "the conductor depends"),
        ({"model": "/nowhere"}, "/nowhere"),
        ({"kv_events": "tcp://10.0.0.1:5557"}, "vLLM listens at every interface only"),
        ({"kv_events": "5557"}, "is not of the form tcp://HOST:PORT"),
        ({"role": "prefill", "store": False}, "--role prefill hands prompts over through the store"),
    ],
)
def test_what_is_refused_at_the_start(options, said, model):
    with pytest.raises(ConfigError, match=said):
        VllmWorkerConfig(**{"model": model, **options})
