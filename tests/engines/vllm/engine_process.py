"""Runs in vLLM's environment: one engine that answers prompts, as lines of JSON. Knows nothing of the tests.

The argument is JSON: ``model``, ``dtype``, ``connector`` (kv_connector_extra_config, or null for none), ``prompts``.
"""

from __future__ import annotations

import asyncio
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
    if spec["connector"] is not None:
        args["kv_transfer_config"] = KVTransferConfig(
            kv_connector="TanghuluConnector",
            kv_connector_module_path="tanghulu.engines.vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=spec["connector"],
        )
    return AsyncEngineArgs(
        model=spec["model"],
        dtype=spec["dtype"],
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_model_len=4096,
        prefix_caching_hash_algo="sha256_cbor",
        **args,
    )


async def answer(engine: AsyncLLM, number: int, prompt: list[int]) -> dict[str, Any]:
    began_s, first_s, last = time.perf_counter(), None, None
    sampling = SamplingParams(temperature=0, max_tokens=NUM_ANSWERED, ignore_eos=True)
    async for output in engine.generate({"prompt_token_ids": prompt}, sampling, f"request-{number}"):
        first_s = first_s or time.perf_counter() - began_s
        last = output
    assert last is not None
    assert first_s is not None
    answered = list(last.outputs[0].token_ids)
    return {"ttft_s": round(first_s, 3), "cached": last.num_cached_tokens, "answered": answered}


async def main(spec: dict[str, Any]) -> None:
    engine = AsyncLLM.from_engine_args(engine_args(spec))
    try:
        for number, prompt in enumerate(spec["prompts"]):
            print(json.dumps(await answer(engine, number, prompt)), flush=True)
        deadline_s = time.monotonic() + 60
        while not (unpinned := await engine.reset_prefix_cache()) and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(0.1)  # saves are under way behind the last answer
        print(json.dumps({"unpinned": unpinned}), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.stdin.read())))
