"""Runs in vLLM's environment: one engine that answers prompts, as lines of JSON. Knows nothing of the tests.

The first line that it reads is ``model``, ``dtype``, ``connector`` (kv_connector_extra_config, or null for none) or
``tier`` (arguments of TanghuluTier, with ``cpu_bytes_to_use``) or ``transfer`` (a whole kv_transfer_config, with
``beside``, the folders of its packages), ``prompts`` and further engine ``arguments``, if any.
Each later line is a round: ``prompts`` that are asked at once, and ``abort``, prompts that are given up after a number
of seconds each. A round ends with an empty cache, host memory included.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from typing import Any

from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

BLOCK_TOKENS = 64
NUM_ANSWERED = 24


def engine_args(spec: dict[str, Any]) -> AsyncEngineArgs:
    args: dict[str, Any] = {}
    if "tier" in spec:
        args["kv_transfer_config"] = offloading(spec["tier"])
    elif "transfer" in spec:
        args["kv_transfer_config"] = KVTransferConfig(**spec["transfer"])
    elif spec["connector"] is not None:
        args["kv_transfer_config"] = KVTransferConfig(
            kv_connector="TanghuluConnector",
            kv_connector_module_path="tanghulu.engines.vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=spec["connector"],
        )
    plain = {
        "model": spec["model"],
        "dtype": spec["dtype"],
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "max_model_len": 4096,
        "prefix_caching_hash_algo": "sha256_cbor",
    }
    return AsyncEngineArgs(**plain | args | spec.get("arguments", {}))


def offloading(tier: dict[str, Any]) -> KVTransferConfig:
    """vLLM's native offloading with the tier; what a failed load does is vLLM's default."""
    second = {"type": "TanghuluTier", "module_path": "tanghulu.engines.vllm.tier", **tier}
    extra = {"spec_name": "CpuTieringSpec", "spec_module_path": "tests.engines.vllm.cpu_offloading"}
    extra["cpu_bytes_to_use"] = second.pop("cpu_bytes_to_use")
    extra["secondary_tiers"] = [second]
    return KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra)


async def answer(engine: AsyncLLM, name: str, prompt: list[int]) -> dict[str, Any]:
    began_s, first_s, last = time.perf_counter(), None, None
    sampling = SamplingParams(temperature=0, max_tokens=NUM_ANSWERED, ignore_eos=True)
    async for output in engine.generate({"prompt_token_ids": prompt}, sampling, name):
        first_s = first_s or time.perf_counter() - began_s
        last = output
    assert last is not None
    assert first_s is not None
    answered = list(last.outputs[0].token_ids)
    return {"ttft_s": round(first_s, 3), "cached": last.num_cached_tokens, "answered": answered}


async def give_up(engine: AsyncLLM, name: str, prompt: list[int], after_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(after_s):
            await answer(engine, name, prompt)


async def ask_at_once(engine: AsyncLLM, number: int, asked: dict[str, Any], with_host_memory: bool) -> dict[str, Any]:
    """One round: all of its prompts, side by side."""
    given_up = [
        give_up(engine, f"gone-{number}-{at}", prompt, after_s)
        for at, (prompt, after_s) in enumerate(asked.get("abort", ()))
    ]
    answers = [answer(engine, f"round-{number}-{at}", prompt) for at, prompt in enumerate(asked["prompts"])]
    answered = await asyncio.gather(*answers, *given_up)
    return {"answers": answered[: len(answers)], "unpinned": await unpinned(engine, with_host_memory)}


async def unpinned(engine: AsyncLLM, with_host_memory: bool) -> bool:
    """Empty the cache; False if blocks stay in use: saves are under way behind the last answer for a moment only."""
    deadline_s = time.monotonic() + 60
    done = await engine.reset_prefix_cache(reset_connector=with_host_memory)
    while not done and time.monotonic() < deadline_s:
        await asyncio.sleep(0.1)
        done = await engine.reset_prefix_cache(reset_connector=with_host_memory)
    return bool(done)


async def main() -> None:
    spec = json.loads(sys.stdin.readline())
    sys.path += spec.get("beside", [])
    engine = AsyncLLM.from_engine_args(engine_args(spec))
    try:
        for number, prompt in enumerate(spec["prompts"]):
            print(json.dumps(await answer(engine, f"request-{number}", prompt)), flush=True)
        print(json.dumps({"unpinned": await unpinned(engine, "tier" in spec)}), flush=True)
        number = 0
        while line := await asyncio.to_thread(sys.stdin.readline):
            told = await ask_at_once(engine, number, json.loads(line), "tier" in spec)
            print(json.dumps(told), flush=True)
            number += 1
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
