"""The paged KV cache as tensors, in the shapes that models compute with: in main memory or on a GPU.

In main memory they are the same bytes as `kv_layout.KvMemory`, which transfers read and write in place. On a GPU, bytes
are transferred through pinned memory (`kv.staging`). Inside a block each layer is one contiguous range, so that layers
can be used as they arrive.

K and V of a token become elements of the cache (`to_rows`), and come back (`from_rows`), rounded to its type, or in
int8 with a scale. In int8 each head of each token has a scale of its own, its largest magnitude / 127, which follows
its values in the cache (`KvLayout`). So a row depends only on its token: its bytes are the same whatever is computed
beside it. A value comes back within half a scale. A row with a non-finite value comes back as all NaN: overflow is not
hidden. Worked example, a head of four values:

    .5, -2.54, 0, 1.273  ->  scale 2.54 / 127 = .02  ->  25, -127, 0, 64  ->  .5, -2.54, 0, 1.28
"""

from __future__ import annotations

import torch

from tanghulu.workers.engine.kv_layout import SCALE_BYTES, KvBlocks, KvLayout, KvMemory


class KvTensors:
    """The tensors that attention reads and writes.

    ``blocks`` [num_blocks, *layout.part_shape], one part of each, and ``rows`` [-1, kv_heads, head_items], all parts,
    of the same memory: elements as `to_rows` makes and `from_rows` reads them. ``row_stride`` rows lie between one
    block and the next; the part's begin at ``first_row`` of the block's.
    """

    layout: KvLayout
    blocks: torch.Tensor
    rows: torch.Tensor
    row_stride: int
    first_row = 0

    def row_of(self, layer: int, kv: int) -> int:
        """Return the first row of K (``kv`` 0) or V (1) of ``layer`` inside a block."""
        return self.first_row + (layer * 2 + kv) * self.layout.block_tokens


class KvCache(KvMemory, KvTensors):
    """`KvTensors` in main memory; parts of tensor-parallel ranks lie side by side in a block."""

    def __init__(
        self, layout: KvLayout, num_blocks: int, buffer: memoryview | bytearray | None = None, part: int = 0
    ) -> None:
        super().__init__(layout, num_blocks, buffer)
        memory = torch.frombuffer(self._bytes, dtype=getattr(torch, layout.dtype))
        self.blocks = memory.view(num_blocks, layout.num_parts, *layout.part_shape)[:, part]
        self.rows = memory.view(-1, layout.num_kv_heads, layout.head_items)
        part_rows = layout.num_layers * 2 * layout.block_tokens
        self.row_stride, self.first_row = layout.num_parts * part_rows, part * part_rows


class DeviceKvCache(KvBlocks, KvTensors):
    """`KvTensors` of this process's own part, in memory of ``device``, zeroed.

    ``memory`` uint8 [num_blocks + 1, part_bytes] is the same memory as bytes. The block after the last, ``scratch``, is
    unowned: the filling rows of a batch are written to it and read from it.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        super().__init__(layout, num_blocks)
        self.scratch = num_blocks
        self.memory = torch.zeros(num_blocks + 1, layout.part_bytes, dtype=torch.uint8, device=device)
        elements = self.memory.view(getattr(torch, layout.dtype))
        self.blocks = elements.view(num_blocks + 1, *layout.part_shape)
        self.rows = elements.view(-1, layout.num_kv_heads, layout.head_items)
        self.row_stride = layout.num_layers * 2 * layout.block_tokens


_LEVELS = 127
#: Lower bound of a row's largest magnitude, so that scales are normal numbers; rows of far less are zero.
LEAST_MAGNITUDE = 1e-30


def to_rows(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert ``values`` [..., head_dim] to a cache of ``dtype``: returns [..., `KvLayout.head_items`]."""
    if dtype != torch.int8:
        return values.to(dtype)
    values = values.float()
    scale = values.abs().amax(dim=-1, keepdim=True).clamp_(min=LEAST_MAGNITUDE).div_(_LEVELS)
    return torch.cat((values.div(scale).round_().to(torch.int8), scale.view(torch.int8)), dim=-1)


def from_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the content of ``rows`` [..., head_items] of a cache as ``dtype`` [..., head_dim], copied if needed.

    In int8, rows must lie as they do in the cache: their scales are read in place.
    """
    if rows.dtype != torch.int8:
        return rows.to(dtype)
    values, scale = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:].view(torch.float32)
    return values.to(torch.float32).mul_(scale).to(dtype)


def gathered_item_bytes(kept: torch.dtype, computed: torch.dtype) -> int:
    """Return the bytes that attention needs at a time per value gathered from a cache of ``kept`` as ``computed``."""
    if kept == computed:
        return kept.itemsize
    between = torch.float32.itemsize if kept == torch.int8 and computed != torch.float32 else 0
    return kept.itemsize + between + computed.itemsize
