"""The paged KV cache as tensors, in the shapes that models compute with: in main memory or on a GPU.

In main memory they are the same bytes as `kv_layout.KvMemory`, which transfers read and write in place. On a GPU bytes
come and go through pinned memory (`kv.staging`). Inside a block each layer is one contiguous range, so that layers can
be used as they arrive.
"""

from __future__ import annotations

from typing import Protocol

import torch

from tanghulu.workers.engine.kv_layout import KvBlocks, KvLayout, KvMemory


class KvTensors(Protocol):
    """What attention reads and writes.

    ``blocks`` [num_blocks, *layout.part_shape], one part of each, and ``rows`` [-1, kv_heads, head_items], all parts,
    of the same memory: elements as `kv_rows` makes and reads them.
    """

    layout: KvLayout
    blocks: torch.Tensor
    rows: torch.Tensor

    def row_stride(self) -> int:
        """Rows of ``rows`` from one block to the next."""

    def row_of(self, layer: int, kv: int) -> int:
        """First row of K (``kv`` 0) or V (1) of ``layer`` inside a block."""


class KvCache(KvMemory):
    """`KvTensors` in main memory; parts of tensor-parallel ranks lie side by side in a block."""

    def __init__(
        self, layout: KvLayout, num_blocks: int, buffer: memoryview | bytearray | None = None, part: int = 0
    ) -> None:
        super().__init__(layout, num_blocks, buffer)
        memory = torch.frombuffer(self._bytes, dtype=getattr(torch, layout.dtype))
        self.blocks = memory.view(num_blocks, layout.num_parts, *layout.part_shape)[:, part]
        self._first_row = part * layout.num_layers * 2 * layout.block_tokens
        self.rows = memory.view(-1, layout.num_kv_heads, layout.head_items)

    def row_stride(self) -> int:
        return self.layout.num_parts * self.layout.num_layers * 2 * self.layout.block_tokens

    def row_of(self, layer: int, kv: int) -> int:
        return self._first_row + (layer * 2 + kv) * self.layout.block_tokens


class DeviceKvCache(KvBlocks):
    """`KvTensors` of this process's own part, in memory of ``device``'s own, zeroed.

    ``memory`` uint8 [num_blocks + 1, part_bytes] is the same memory as bytes. The block behind the last, ``scratch``,
    belongs to nobody: rows that only fill up a batch are written there, and read from there.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        super().__init__(layout, num_blocks)
        self.scratch = num_blocks
        self.memory = torch.zeros(num_blocks + 1, layout.part_bytes, dtype=torch.uint8, device=device)
        elements = self.memory.view(getattr(torch, layout.dtype))
        self.blocks = elements.view(num_blocks + 1, *layout.part_shape)
        self.rows = elements.view(-1, layout.num_kv_heads, layout.head_items)

    def row_stride(self) -> int:
        return self.layout.num_layers * 2 * self.layout.block_tokens

    def row_of(self, layer: int, kv: int) -> int:
        return (layer * 2 + kv) * self.layout.block_tokens
