"""The cache of vLLM on a GPU: its layouts, its stream and its copies. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from tanghulu.engines.common.options import ConnectorOptions
from tanghulu.engines.common.requests import LoadJob, SaveJob
from tanghulu.engines.common.transfers import NUM_SAVE_THREADS, Ended, Transfers
from tanghulu.engines.vllm.cache_memory import memory_of
from tanghulu.store.client.block_store import BlockStore
from tests.engines.vllm.test_cache_memory import (
    LAYOUTS,
    NUM_BLOCKS,
    WholeBlocks,
    block_bytes,
    keys_of,
    layers_in,
    named,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="hardware: no GPU, torch.cuda.is_available() is False"),
]

GPU = torch.device("cuda", 0)
OPTIONS = ConnectorOptions(master="127.0.0.1:1")


def end(transfers: Transfers) -> Ended:
    while (ended := transfers.take_ended(10)) == Ended():
        pass
    return ended


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_are_saved_when_computed_and_loaded_when_free(layout: str):
    """The stream is behind by a second of products at both calls, and the connector waits for neither."""
    layers, store = layers_in(layout, GPU), WholeBlocks()
    memory = memory_of(layers, NUM_BLOCKS, keys_of, OPTIONS.threads + NUM_SAVE_THREADS)
    transfers = Transfers(BlockStore(store), memory, OPTIONS)  # type: ignore[arg-type]
    busy = torch.rand(8192, 8192, device=GPU)
    torch.cuda.synchronize()

    def compute(value: float) -> None:
        for _ in range(100):
            torch.mm(busy, busy)
        for layer in layers.values():
            layer[:4].fill_(value)

    compute(7)
    transfers.save(SaveJob(0, named(0, 1, 2, 3)), memory.mark())
    assert end(transfers).saved == {0: 1}
    wanted = [block_bytes(layout, layers, block) for block in range(4)]
    assert [store.chunks[key] for key in keys_of([bytes([at]) for at in range(4)])] == wanted
    compute(0)
    transfers.load(LoadJob("r", named(3, 5, 7, 8)), memory.mark())
    ended = end(transfers)
    assert (ended.loaded, ended.bad_block_ids) == ({"r"}, set())
    torch.cuda.synchronize()
    assert [block_bytes(layout, layers, block) for block in (3, 5, 7, 8)] == wanted
    transfers.close()
    memory.close()
