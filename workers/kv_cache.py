"""The paged KV cache as tensors: the same bytes as `kv_layout.KvMemory`, in the shapes that models compute with.

Inside a block each layer is one contiguous range, so that layers can be used as they arrive.
"""

from __future__ import annotations

import torch

from tanghulu.workers.kv_layout import KvLayout, KvMemory


class KvCache(KvMemory):
    """``blocks`` [num_blocks, *layout.part_shape], one part of each, and ``rows`` [-1, kv_heads, head_dim], all parts.

    Both share the buffer's memory.
    """

    def __init__(
        self, layout: KvLayout, num_blocks: int, buffer: memoryview | bytearray | None = None, part: int = 0
    ) -> None:
        super().__init__(layout, num_blocks, buffer)
        memory = torch.frombuffer(self._bytes, dtype=getattr(torch, layout.dtype))
        self.blocks = memory.view(num_blocks, layout.num_parts, *layout.part_shape)[:, part]
        self._first_row = part * layout.num_layers * 2 * layout.block_tokens
        self.rows = memory.view(-1, layout.num_kv_heads, layout.head_dim)

    def row_stride(self) -> int:
        """Rows of ``rows`` from one block to the next: parts x layers x 2 x block_tokens."""
        return self.layout.num_parts * self.layout.num_layers * 2 * self.layout.block_tokens

    def row_of(self, layer: int, kv: int) -> int:
        """First row of K (``kv`` 0) or V (1) of ``layer`` inside a block."""
        return self._first_row + (layer * 2 + kv) * self.layout.block_tokens
