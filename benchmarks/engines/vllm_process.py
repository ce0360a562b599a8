"""Runs in vLLM's environment: one engine that answers prompts one by one, told what to do by JSON lines.

Folders in ``beside`` come last on the path: packages that a connector needs and vLLM's environment lacks.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import psutil

from benchmarks.peers.jsonlines import serve

BLOCK_TOKENS = 64
NUM_ANSWERED = 24


def cpu_s() -> float:
    """CPU seconds of this process and all that it started and that still run."""
    me = psutil.Process()
    times = [each.cpu_times() for each in (me, *me.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


class Engine:
    """vLLM within this process, its own processes behind it."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner, self._llm = runner, None
        self._num_asked = 0

    def open(self, model: str, dtype: str, transfer: dict[str, Any] | None, beside: list[str]) -> float:
        """Start the engine, and let it compute something else once; the CPU seconds of all that."""
        sys.path += beside
        return self._runner.run(self._open(model, dtype, transfer))

    async def _open(self, model: str, dtype: str, transfer: dict[str, Any] | None) -> float:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        connector = {"kv_transfer_config": KVTransferConfig(**transfer)} if transfer is not None else {}
        args = AsyncEngineArgs(
            model=model,
            dtype=dtype,
            enforce_eager=True,
            block_size=BLOCK_TOKENS,
            max_model_len=4096,
            prefix_caching_hash_algo="sha256_cbor",
            **connector,
        )
        self._llm = AsyncLLM.from_engine_args(args)
        await self._ask(list(range(1000, 1300)))
        return cpu_s()

    def ask(self, prompt: list[int]) -> dict[str, Any]:
        """Answer a prompt: seconds and CPU seconds to the first token, tokens not computed, and the answer."""
        return self._runner.run(self._ask(prompt))

    async def _ask(self, prompt: list[int]) -> dict[str, Any]:
        from vllm import SamplingParams

        self._num_asked += 1
        sampling = SamplingParams(temperature=0, max_tokens=NUM_ANSWERED, ignore_eos=True)
        began_cpu_s, began_s, first, last = cpu_s(), time.perf_counter(), None, None
        async for output in self._llm.generate({"prompt_token_ids": prompt}, sampling, f"asked-{self._num_asked}"):
            first = first or (time.perf_counter() - began_s, cpu_s() - began_cpu_s)
            last = output
        return {
            "ttft_s": round(first[0], 4),
            "ttft_cpu_s": round(first[1], 3),
            "cached": last.num_cached_tokens,
            "answered": list(last.outputs[0].token_ids),
        }

    def close(self) -> None:
        """End the engine and its processes."""
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None


def main() -> None:
    with asyncio.Runner() as runner:
        engine = Engine(runner)
        try:
            handlers = {"open": engine.open, "ask": engine.ask, "cpu_s": cpu_s, "close": engine.close}
            serve(int(sys.argv[1]), handlers)
        finally:
            engine.close()


if __name__ == "__main__":
    main()
