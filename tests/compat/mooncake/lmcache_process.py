"""Runs in LMCache's environment: LMCache's own connector to Mooncake's store, with its own host memory.

The argument is the master's address. Prints, as JSON, for chunks stored with and without their description: whether
they were found before and after the put, and whether they came back as they were; a missing chunk is the last.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import CreateConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

MASTER = sys.argv[1]
CHUNK_TOKENS, LAYERS, HEADS, HEAD_DIM = 64, 4, 2, 16
NUM_CHUNKS = 5


def settings(with_description: bool) -> dict[str, Any]:
    return {
        "mooncake_master_server_addr": MASTER,
        "mooncake_metadata_server": "P2PHANDSHAKE",
        "mooncake_local_hostname": "localhost",
        "mooncake_global_segment_size": "64 MB",
        "mooncake_prefer_local_alloc": True,
        "save_chunk_meta": with_description,
        "transfer_timeout": 30,
    }


async def round_trip(with_description: bool) -> dict[str, Any]:
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK_TOKENS, max_local_cpu_size=0.1, extra_config=settings(with_description)
    )
    shape = (LAYERS, 2, CHUNK_TOKENS, HEADS, HEAD_DIM)
    metadata = LMCacheMetadata("org/model", 1, 1, 0, 0, torch.float32, shape, chunk_size=CHUNK_TOKENS)
    memory = LocalCPUBackend(config, metadata, "cpu")
    connector = CreateConnector("mooncakestore://" + MASTER, asyncio.get_running_loop(), memory, config, metadata)
    name = 1000 * with_description
    keys = [CacheEngineKey("org/model", 1, 0, name + at, torch.float32) for at in range(NUM_CHUNKS + 1)]
    chunks = []
    for _ in range(NUM_CHUNKS):
        chunk = memory.allocate(metadata.get_shapes(), metadata.get_dtypes(), MemoryFormat.KV_2LTD)
        chunk.raw_tensor.random_()
        chunks.append(chunk)
    contents = [chunk.raw_tensor.clone() for chunk in chunks]  # a put gives its chunks back
    before = [bool(await connector.exists(key)) for key in keys]
    await connector.batched_put(keys[:NUM_CHUNKS], chunks)
    after = [bool(await connector.exists(key)) for key in keys]
    leading = await connector.batched_async_contains("lookup", keys)
    back = await connector.batched_get(keys)
    same = [bool((one == other.raw_tensor).all()) for one, other in zip(contents, back, strict=False)]
    await connector.close()
    return {"before": before, "after": after, "leading": leading, "same": same, "missing": back[-1] is None}


async def main() -> None:
    print("\nanswer " + json.dumps([await round_trip(True), await round_trip(False)]), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
