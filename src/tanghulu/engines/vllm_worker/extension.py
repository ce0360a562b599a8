"""Runs in vLLM's processes, mixed into its worker class: reports facts known only there and ends them with ours."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from tanghulu.engines.vllm.facts import fingerprint_of

_LOOK_S = 1.0


class InVllmProcess:
    """Functions that ``AsyncLLM.collective_rpc`` calls by name; they return plain data."""

    vllm_config: Any
    model_runner: Any

    def tanghulu_facts(self, namespace: str) -> dict[str, Any]:
        """Return the fingerprint of the blocks' bytes, as in the store's connector, and the size of a block."""
        cache = self.model_runner.kv_cache_config
        if len(cache.kv_cache_groups) != 1:
            return {"num_groups": len(cache.kv_cache_groups)}
        (group,) = cache.kv_cache_groups
        return {
            "num_groups": 1,
            "fingerprint": fingerprint_of(self.vllm_config, cache, namespace).hex(),
            "block_tokens": group.kv_cache_spec.block_size,
            "block_bytes": group.kv_cache_spec.page_size_bytes * len(group.layer_names),
            "num_blocks": cache.num_blocks,
        }

    def tanghulu_end_with(self, worker: int) -> int:
        """End this process when the process ``worker`` is gone, as it may be killed without notice."""
        threading.Thread(target=_end_with, args=(worker,), name="end-with-worker", daemon=True).start()
        return os.getpid()


def _end_with(worker: int) -> None:
    while _is_there(worker):
        time.sleep(_LOOK_S)
    os._exit(1)


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
