"""The paged KV cache: one buffer, block first, so that a block is one contiguous range of bytes.

    [num_blocks, layers, 2 (K, V), block_tokens, kv_heads, head_dim]

A block is what is transferred, stored and checksummed, without packing; and inside it each layer is one
contiguous range too, so that layers can be used as they arrive. Owns the memory's shape; which block belongs
to whom is `block_pool`'s business.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from tanghulu.errors import ConfigError
from tanghulu.types import format_size
from tanghulu.workers.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of one block. All sizes follow from it; tensor-parallel ranks have their own ``num_kv_heads``."""

    num_layers: int
    block_tokens: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: ModelConfig, block_tokens: int, dtype: torch.dtype) -> KvLayout:
        """The layout of ``config``'s cache."""
        return cls(config.num_layers, block_tokens, config.num_kv_heads, config.head_dim, dtype)

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """``(layers, 2, block_tokens, kv_heads, head_dim)``."""
        return (self.num_layers, 2, self.block_tokens, self.num_kv_heads, self.head_dim)

    @property
    def layer_bytes(self) -> int:
        """Bytes of K and V of one layer inside a block: also the distance between layers."""
        return 2 * self.block_tokens * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.num_layers * self.layer_bytes

    def num_blocks_in(self, capacity_bytes: int) -> int:
        """Whole blocks that fit; raises ConfigError with the figures if that is none."""
        num_blocks = capacity_bytes // self.block_bytes
        if num_blocks < 1:
            raise ConfigError(
                f"a KV cache of {format_size(capacity_bytes)} holds no block of {self.block_tokens} tokens, "
                f"which takes {format_size(self.block_bytes)}; give the cache more memory or blocks fewer tokens"
            )
        return num_blocks


class KvCache:
    """The blocks' memory as tensors (for the model) and as bytes (for transfers).

    ``buffer`` is any writable buffer of at least ``num_blocks * layout.block_bytes`` bytes that outlives the
    cache, such as the mmap of a memfd; without one the cache allocates its own memory, zeroed. The bytes of a
    supplied buffer are used as they are: block ids that are never committed are never read.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, buffer: memoryview | bytearray | None = None) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.capacity_bytes = num_blocks * layout.block_bytes
        self._memory = self._as_tensor(buffer)
        self.blocks = self._memory.view(num_blocks, *layout.block_shape)
        self.rows = self._memory.view(-1, layout.num_kv_heads, layout.head_dim)

    def _as_tensor(self, buffer: memoryview | bytearray | None) -> torch.Tensor:
        dtype = self.layout.dtype
        if buffer is None:
            return torch.zeros(self.capacity_bytes // dtype.itemsize, dtype=dtype)
        size = memoryview(buffer).nbytes
        if size < self.capacity_bytes:
            raise ConfigError(f"{self.num_blocks} blocks need {self.capacity_bytes} bytes; the buffer has {size}")
        return torch.frombuffer(buffer, dtype=dtype, count=self.capacity_bytes // dtype.itemsize)

    def block_offset(self, block_id: int) -> int:
        """Where the block begins in the buffer, in bytes."""
        assert 0 <= block_id < self.num_blocks, f"block {block_id} of {self.num_blocks}"
        return block_id * self.layout.block_bytes

    def block_view(self, block_id: int) -> memoryview:
        """The block's raw bytes, writable, valid while the cache lives; no copy."""
        address = self._memory.data_ptr() + self.block_offset(block_id)
        array = (ctypes.c_char * self.layout.block_bytes).from_address(address)
        return memoryview(array).cast("B")

    def row_stride(self) -> int:
        """Rows of ``rows`` from one block to the next: layers x 2 x block_tokens."""
        return self.layout.num_layers * 2 * self.layout.block_tokens

    def row_of(self, layer: int, kv: int) -> int:
        """First row of K (``kv`` 0) or V (1) of ``layer`` inside a block."""
        return (layer * 2 + kv) * self.layout.block_tokens

    def __repr__(self) -> str:
        size = format_size(self.capacity_bytes)
        return f"KvCache({self.num_blocks} blocks of {self.layout.block_tokens} tokens, {size})"
