"""Runs in vLLM's environment: one engine in this process, whose connector is used for some prompts, and not for others.

Two engines side by side, or one behind the other, differ in what the machine does meanwhile by more than a connector
costs. Here the same process computes with it and without it, prompt by prompt. Told what to do by JSON lines.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.engines.vllm_process import BLOCK_TOKENS
from benchmarks.peers.jsonlines import serve

#: What vLLM's own loop sleeps behind a step without requests, as there are while blocks are saved.
_IDLE_STEP_S = 0.001
_SAVED_DEADLINE_S = 120.0


class EngineInTurns:
    """vLLM's engine within this process, with TanghuluConnector."""

    def open(self, model: str, dtype: str, transfer: dict[str, Any]) -> None:
        """Start the engine, and let it compute and save something else once."""
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self._llm = LLM(
            model=model,
            dtype=dtype,
            enforce_eager=True,
            block_size=BLOCK_TOKENS,
            max_model_len=4096,
            prefix_caching_hash_algo="sha256_cbor",
            kv_transfer_config=KVTransferConfig(**transfer),
        )
        self._client = self._llm.llm_engine.engine_core
        self._connector = self._client.engine_core.scheduler.connector.scheduler
        self.ask(list(range(1000, 1300)), connected=True)

    def ask(self, prompt: list[int], connected: bool) -> dict[str, float]:
        """CPU seconds and seconds to the first token, and from there until all blocks are saved."""
        from vllm import SamplingParams

        # Without: nothing is looked up and nothing is saved.
        self._connector._loads, self._connector._save = connected, "all" if connected else "none"
        sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        began_cpu_s, began_s = time.process_time(), time.perf_counter()
        self._llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        first_cpu_s, first_s = time.process_time(), time.perf_counter()
        while self._client.engine_core.scheduler.has_requests():
            self._client.get_output()
            time.sleep(_IDLE_STEP_S)
            if time.perf_counter() - first_s > _SAVED_DEADLINE_S:
                raise TimeoutError("blocks are still being saved")
        return {
            "ttft_cpu_s": round(first_cpu_s - began_cpu_s, 3),
            "ttft_s": round(first_s - began_s, 2),
            "saved_cpu_s": round(time.process_time() - first_cpu_s, 3),
            "saved_s": round(time.perf_counter() - first_s, 2),
        }


def main() -> None:
    engine = EngineInTurns()
    serve(int(sys.argv[1]), {"open": engine.open, "ask": engine.ask})


if __name__ == "__main__":
    main()
