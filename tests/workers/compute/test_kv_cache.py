"""The paged cache: layout, bytes and a buffer from outside."""

from __future__ import annotations

import mmap
import random

import pytest
import torch

from tanghulu.errors import ConfigError
from tanghulu.workers.compute.forward_batch import SequenceChunk, build_forward_batch
from tanghulu.workers.compute.kv_cache import KvCache
from tanghulu.workers.compute.models.model import Model
from tanghulu.workers.engine.kv_layout import KvLayout
from tests.workers.tiny import BLOCK, VOCAB

LAYOUT = KvLayout(num_layers=3, block_tokens=8, num_kv_heads=2, head_dim=4, dtype="float32")


def test_sizes() -> None:
    assert LAYOUT.layer_bytes == 2 * 8 * 2 * 4 * 4
    assert LAYOUT.block_bytes == 3 * LAYOUT.layer_bytes
    assert LAYOUT.num_blocks_in(10 * LAYOUT.block_bytes + 5) == 10
    with pytest.raises(ConfigError, match="holds no block of 8 tokens"):
        LAYOUT.num_blocks_in(LAYOUT.block_bytes - 1)


def test_a_block_is_one_range_of_the_buffer() -> None:
    memory = mmap.mmap(-1, 4 * LAYOUT.block_bytes + 100)
    cache = KvCache(LAYOUT, 4, memoryview(memory))
    cache.blocks[2] = torch.arange(LAYOUT.block_bytes // 4).view(LAYOUT.part_shape)
    start = cache.block_offset(2)
    assert memory[start : start + LAYOUT.block_bytes] == cache.block_view(2).tobytes()
    layer_one = torch.frombuffer(cache.block_view(2)[LAYOUT.layer_bytes : 2 * LAYOUT.layer_bytes], dtype=torch.float32)
    torch.testing.assert_close(layer_one.view(2, 8, 2, 4), cache.blocks[2, 1])
    cache.block_view(3)[:] = cache.block_view(2)
    assert torch.equal(cache.blocks[3], cache.blocks[2])
    assert not cache.blocks[1].any()


def test_rows_address_the_same_memory_as_blocks() -> None:
    cache = KvCache(LAYOUT, 4)
    block, layer, kv, offset = 2, 1, 1, 5
    cache.rows[block * cache.row_stride + cache.row_of(layer, kv) + offset] = 7.0
    assert torch.equal(cache.blocks[block, layer, kv, offset], torch.full((2, 4), 7.0))
    assert cache.blocks.sum() == 7.0 * 8


def test_a_buffer_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="need"):
        KvCache(LAYOUT, 4, bytearray(4 * LAYOUT.block_bytes - 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_blocks_moved_as_bytes_continue_the_text(tiny_model: Model, dtype: str) -> None:
    """What a transfer does: the KV of one cache, copied block by block to other places of another one."""
    layout = KvLayout.of(tiny_model.config, BLOCK, dtype)
    tokens = random.Random(5).choices(range(VOCAB), k=30)
    source, target = KvCache(layout, 6), KvCache(layout, 9)
    here, there = [5, 1, 3, 0], [8, 2, 7, 4]
    tiny_model.forward(build_forward_batch([SequenceChunk(tokens[:29], 0, here, False)], BLOCK), source)
    for old, new in zip(here, there, strict=True):
        target.block_view(new)[:] = source.block_view(old)
    last = [SequenceChunk(tokens[29:], 29, blocks, True) for blocks in (here, there)]
    expected = tiny_model.forward(build_forward_batch(last[:1], BLOCK), source)
    assert torch.equal(tiny_model.forward(build_forward_batch(last[1:], BLOCK), target), expected)
