"""The store behind vLLM's native offloading, with copies in host memory in place of a GPU's (``cpu_offloading``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tanghulu
from tests.engines.vllm.conftest import MODEL, Vllm
from tests.engines.vllm.test_connector import names_of, prompts_of_2000_tokens, spoil
from tests.engines.vllm.test_store_trouble import prompts_of
from tests.store.cluster import Cluster

pytestmark = [pytest.mark.engine_vllm, pytest.mark.timeout(3000)]
ENGINE = Path(__file__).parent / "engine_process.py"
MIB = 1 << 20
#: Of SmolLM2 in float32, with 64 tokens to a block.
BLOCK_BYTES = 64 * 30 * 2 * 3 * 64 * 4


def spec_of(store: Cluster, prompts: list[list[int]], host_bytes: int = 512 * MIB, **arguments: Any) -> dict[str, Any]:
    tier = {"master": store.address, "cpu_bytes_to_use": host_bytes, "lookup_deadline_s": 2.0}
    return {"model": str(MODEL), "dtype": "float32", "tier": tier, "prompts": prompts, "arguments": arguments}


def test_another_process_loads_the_prefix_and_says_the_same(vllm: Vllm, store: Cluster) -> None:
    prompts = prompts_of_2000_tokens()
    *cold, end = vllm.run(ENGINE, spec_of(store, prompts))
    assert end == {"unpinned": True}
    assert [each["cached"] for each in cold] == [0, 1024, 0, 0], "its own prefix cache"
    *loaded, end = vllm.run(ENGINE, spec_of(store, prompts))
    assert end == {"unpinned": True}
    assert [each["answered"] for each in loaded] == [each["answered"] for each in cold]
    assert all(each["cached"] >= 1920 for each in loaded), loaded
    print([(one["ttft_s"], two["ttft_s"]) for one, two in zip(cold, loaded, strict=True)])

    with tanghulu.connect(store.address) as client:
        for prompt, block in zip(prompts[1:], (5, 0, 30), strict=True):
            spoil(client, names_of(prompt)[block])
    # No policy says what a lost load does: vLLM computes it. And there is room for 4 of a prompt's 31 blocks.
    *broken, end = vllm.run(ENGINE, spec_of(store, prompts[1:]))
    assert end == {"unpinned": True}
    assert [each["answered"] for each in broken] == [each["answered"] for each in cold[1:]]
    *narrow, end = vllm.run(ENGINE, spec_of(store, prompts[:2], host_bytes=4 * BLOCK_BYTES))
    assert end == {"unpinned": True}
    assert [each["answered"] for each in narrow] == [each["answered"] for each in cold[:2]]
    assert narrow[0]["cached"] == 4 * 64, "as much as fits"


def test_connector_and_tier_have_nothing_in_common(vllm: Vllm, store: Cluster) -> None:
    prompts = prompts_of(1, 700)
    connector = {"model": str(MODEL), "dtype": "float32", "connector": {"master": store.address}, "prompts": prompts}
    first, _ = vllm.run(ENGINE, connector)
    second, _ = vllm.run(ENGINE, spec_of(store, prompts))
    assert (second["answered"], second["cached"]) == (first["answered"], 0), "bytes lie in another order"
    with tanghulu.connect(store.address) as client:
        assert len({info.key.split("/")[1] for info in client.list_keys("kv/")}) == 2
