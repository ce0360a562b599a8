"""Runs in vLLM's environment: vLLM's own manager of offloading with the tier below it, without an engine.

The first line that it reads is ``master`` and ``model``. Each later line is ``do`` (``store`` or ``load``), ``numbers``
of chunks and ``rows`` of host memory, for a manager of its own; the answer says how many leading chunks are there.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import uuid
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

CHUNK_BYTES = 8192
DEADLINE_S = 60.0
NO_REQUESTS = ScheduleEndContext((), ())


def a_manager(spec: dict[str, Any], num_rows: int) -> Any:
    tier = {"type": "TanghuluTier", "module_path": "tanghulu.engines.vllm.tier", "master": spec["master"]}
    tier |= {"load_deadline_s": 1.0, "save_deadline_s": 1.0, "lookup_deadline_s": 0.5}
    parallel = {"rank": 0, "world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    parallel |= {"data_parallel_index": 0, "data_parallel_size": 1}
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(64, ("layer",), 0),),
        worker_kv_bytes_per_block=CHUNK_BYTES,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": num_rows * CHUNK_BYTES, "secondary_tiers": [tier]},
        engine_id=uuid.uuid4().hex,
        model=OffloadingModelConfig(spec["model"], "float32"),
        cache=OffloadingCacheConfig(64, 1),
        parallel=OffloadingParallelConfig(**parallel, data_parallel_rank_local=None, is_parallelism_agnostic=True),
    )
    return TieringOffloadingSpec(config).get_manager()


def memory_of(manager: Any) -> Any:
    return np.asarray(manager.primary_tier.get_kv_memoryview()).view(np.uint8)


def key(number: int) -> Any:
    return make_offload_key(hashlib.sha256(str(number).encode()).digest(), 0)


def until_idle(manager: Any) -> None:
    """Steps of an engine without requests."""
    until_s = time.monotonic() + DEADLINE_S
    while manager.has_pending_work():
        assert time.monotonic() < until_s, "work that never ends"
        manager.on_schedule_end(NO_REQUESTS)
        time.sleep(0.005)


def store(manager: Any, numbers: list[int]) -> int:
    request = ReqContext("stores")
    manager.on_new_request(request)
    given = manager.prepare_store([key(number) for number in numbers], request)
    memory = memory_of(manager)
    for number, row in zip(numbers, given.store_spec.chunk_ids, strict=True):
        memory[row] = number
    manager.complete_store(given.keys_to_store, request)
    until_idle(manager)
    manager.on_request_finished(request)
    return len(given.keys_to_store)


def load(manager: Any, numbers: list[int]) -> int:
    """As vLLM's scheduler asks: for each chunk of a prefix until one is missing, at each step anew."""
    request = ReqContext("loads")
    manager.on_new_request(request)
    until_s = time.monotonic() + DEADLINE_S
    while (num_found := leading(manager, request, numbers)) is None:
        assert time.monotonic() < until_s, "asked for ever"
        manager.on_schedule_end(NO_REQUESTS)
        time.sleep(0.005)
    found = [key(number) for number in numbers[:num_found]]
    rows, memory = manager.prepare_load(found, request).chunk_ids, memory_of(manager)
    for number, row in zip(numbers, rows, strict=False):
        assert (memory[row] == number).all(), f"other bytes than those of chunk {number}"
    manager.complete_load(found, request)
    manager.on_request_finished(request)
    until_idle(manager)
    return num_found


def leading(manager: Any, request: ReqContext, numbers: list[int]) -> int | None:
    waits, num_found = False, 0
    for number in numbers:
        result = manager.lookup(key(number), request)
        if result is LookupResult.MISS:
            break
        waits |= result is not LookupResult.HIT
        num_found += 1
    return None if waits else num_found


def main() -> None:
    spec = json.loads(sys.stdin.readline())
    for line in sys.stdin:
        asked = json.loads(line)
        manager = a_manager(spec, asked["rows"])
        try:
            perform = {"store": store, "load": load}[asked["do"]]
            print(json.dumps({"chunks": perform(manager, asked["numbers"])}), flush=True)
        finally:
            manager.shutdown()


if __name__ == "__main__":
    main()
