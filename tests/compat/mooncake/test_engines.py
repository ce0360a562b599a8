"""The backends for Mooncake's store that engines ship, unchanged, on ours: each in its engine's environment."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.compat.mooncake.conftest import SHIM, run_in
from tests.engines.vllm.conftest import MODEL, PYTHON, Vllm
from tests.store.cluster import Cluster

pytestmark = pytest.mark.timeout(900)
HERE = Path(__file__).parent


def answer_of(printed: str) -> object:
    (line,) = (line for line in printed.splitlines() if line.startswith("answer "))
    return json.loads(line.removeprefix("answer "))


@pytest.mark.engine_sglang
def test_sglang(cluster: Cluster) -> None:
    printed = run_in("sglang", HERE / "sglang_process.py", cluster.address, "a-tenant", PYTHONWARNINGS="ignore")
    whole = {"backend": "MooncakeStore", "counts": [0, 64, 8, 8, 0], "same": True}
    assert answer_of(printed) == [whole] * 2


@pytest.mark.engine_lmcache
def test_lmcache(cluster: Cluster) -> None:
    printed = run_in("lmcache", HERE / "lmcache_process.py", cluster.address, LMCACHE_TRACK_USAGE="false")
    whole = {"before": [False] * 6, "after": [True] * 5 + [False], "leading": 5, "same": [True] * 5, "missing": True}
    assert answer_of(printed) == [whole] * 2


@pytest.mark.engine_vllm
def test_vllm(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second vLLM process loads what the first has computed and saved, and answers the same."""
    if not (PYTHON.exists() and MODEL.exists()):
        pytest.skip("extra: vLLM's environment is missing; tools/engine_venv.py vllm builds it")
    settings = {
        "mode": "standalone-store",  # a segment of the first process's own would end with it
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": cluster.address,
        "protocol": "tcp",
        "global_segment_size": 0,
        "local_buffer_size": "16MB",
        "tenant_id": "vllm",
    }
    (tmp_path / "mooncake.json").write_text(json.dumps(settings))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(tmp_path / "mooncake.json"))
    prompts = [np.random.default_rng(seed).integers(1000, 40_000, 400).tolist() for seed in range(2)]
    spec = {
        "model": str(MODEL),
        "dtype": "float32",
        "beside": [SHIM],
        "prompts": [*prompts, prompts[0][:20]],  # what a step computed is saved with the step behind
        "transfer": {
            "kv_connector": "MooncakeOnCpus",
            "kv_connector_module_path": "benchmarks.engines.mooncake_on_cpus",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"load_async": True},
        },
    }
    vllm = Vllm(tmp_path)
    engine = Path(__file__).parents[2] / "engines" / "vllm" / "engine_process.py"
    cold, loaded = (vllm.run(engine, spec)[:2] for _ in range(2))
    assert [each["cached"] for each in cold] == [0, 0]
    assert all(each["cached"] >= 320 for each in loaded), loaded
    assert [each["answered"] for each in loaded] == [each["answered"] for each in cold]
