"""The paged KV cache as tensors: the same bytes as `kv_layout.KvMemory`, in the shapes that models compute with.

Inside a block each layer is one contiguous range, so that layers can be used as they arrive.
"""

from __future__ import annotations

import torch

from tanghulu.workers.kv_layout import KvLayout, KvMemory


class KvCache(KvMemory):
    """``blocks`` [num_blocks, *layout.block_shape] and ``rows`` [-1, kv_heads, head_dim] share the buffer's memory."""

    def __init__(self, layout: KvLayout, num_blocks: int, buffer: memoryview | bytearray | None = None) -> None:
        super().__init__(layout, num_blocks, buffer)
        memory = torch.frombuffer(self._bytes, dtype=getattr(torch, layout.dtype))
        self.blocks = memory.view(num_blocks, *layout.block_shape)
        self.rows = memory.view(-1, layout.num_kv_heads, layout.head_dim)

    def row_stride(self) -> int:
        """Rows of ``rows`` from one block to the next: layers x 2 x block_tokens."""
        return self.layout.num_layers * 2 * self.layout.block_tokens

    def row_of(self, layer: int, kv: int) -> int:
        """First row of K (``kv`` 0) or V (1) of ``layer`` inside a block."""
        return (layer * 2 + kv) * self.layout.block_tokens
