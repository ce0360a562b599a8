"""Shape and bytes of the paged KV cache, without torch: for transfers, exports and the mock engine.

Block first, so that a block is one contiguous range of bytes:

    [num_blocks, parts, layers, 2 (K, V), block_tokens, kv_heads, head_dim]

In int8 a head's values are followed by the four bytes of their scale (`compute.kv_cache`), which is thus transferred,
stored and checksummed with them. Example, heads of 64: a head of a token takes 68 bytes, 128 in bfloat16.

A part is a tensor-parallel rank's share of the KV heads; without tensor parallelism there is one. Owns sizes and
offsets; `block_pool` owns the blocks' assignment, `kv_cache` the tensors over them.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Protocol

from tanghulu.errors import ConfigError
from tanghulu.types import format_size
from tanghulu.workers.weights.model_config import ModelConfig

#: Bytes of one element of each KV type.
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
#: Bytes of the scale, a float32, behind the values of each head in int8. A head's size must be a multiple of it.
SCALE_BYTES = 4


class BlockShape(Protocol):
    """Description of a block in cards and metrics; ``dtype`` is the KV's."""

    @property
    def block_tokens(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of one block. All sizes follow from it. ``num_kv_heads`` are those of one of the ``num_parts`` parts."""

    num_layers: int
    block_tokens: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    num_parts: int = 1

    @classmethod
    def of(cls, config: ModelConfig, block_tokens: int, dtype: str, num_parts: int = 1) -> KvLayout:
        """Return the layout of ``config``'s cache; ``dtype`` is in `ITEM_BYTES`, ``num_parts`` divides the KV heads.

        Raises ConfigError if heads of this width cannot be kept in int8.
        """
        if dtype == "int8" and config.head_dim % SCALE_BYTES:
            raise ConfigError(
                f"--kv-dtype int8 needs a head size that is a multiple of {SCALE_BYTES}, not {config.head_dim}; "
                "use another type"
            )
        kv_heads = config.num_kv_heads // num_parts
        return cls(config.num_layers, block_tokens, kv_heads, config.head_dim, dtype, num_parts)

    @property
    def head_items(self) -> int:
        """Elements of one head of a token: its values and, in int8, their scale."""
        return self.head_dim + (SCALE_BYTES if self.dtype == "int8" else 0)

    @property
    def part_shape(self) -> tuple[int, int, int, int, int]:
        """``(layers, 2, block_tokens, kv_heads, head_items)``: one part of a block."""
        return (self.num_layers, 2, self.block_tokens, self.num_kv_heads, self.head_items)

    @property
    def layer_bytes(self) -> int:
        """Bytes of K and V of one layer inside a part of a block: also the distance between layers."""
        return 2 * self.block_tokens * self.num_kv_heads * self.head_items * ITEM_BYTES[self.dtype]

    @property
    def part_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    @property
    def block_bytes(self) -> int:
        return self.num_parts * self.part_bytes

    def num_blocks_in(self, capacity_bytes: int) -> int:
        """Return the number of whole blocks that fit; raises ConfigError with the figures if there is none."""
        num_blocks = capacity_bytes // self.block_bytes
        if num_blocks < 1:
            raise ConfigError(
                f"a KV cache of {format_size(capacity_bytes)} holds no block of {self.block_tokens} tokens, "
                f"which takes {format_size(self.block_bytes)}; raise --kv-memory or lower --block-tokens"
            )
        return num_blocks


class KvBlocks:
    """The cache as the engine sees it: ``num_blocks`` blocks of ``layout``, in main memory or on a device."""

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.capacity_bytes = num_blocks * layout.block_bytes

    def __repr__(self) -> str:
        size = format_size(self.capacity_bytes)
        return f"{type(self).__name__}({self.num_blocks} blocks of {self.layout.block_tokens} tokens, {size})"


class KvMemory(KvBlocks):
    """Blocks in main memory, as bytes.

    ``buffer`` is any writable buffer of at least ``num_blocks * layout.block_bytes`` bytes that outlives the cache,
    such as the mmap of a memfd; without one the cache allocates its own memory, zeroed. A supplied buffer is used
    unchanged: block ids never committed are never read.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, buffer: memoryview | bytearray | None = None) -> None:
        super().__init__(layout, num_blocks)
        whole = memoryview(mmap.mmap(-1, self.capacity_bytes) if buffer is None else buffer).cast("B")
        if whole.nbytes < self.capacity_bytes:
            raise ConfigError(f"{num_blocks} blocks need {self.capacity_bytes} bytes; the buffer has {whole.nbytes}")
        self._bytes = whole[: self.capacity_bytes]

    def block_offset(self, block_id: int) -> int:
        """Return the offset of the block in the buffer, in bytes."""
        assert 0 <= block_id < self.num_blocks, f"block {block_id} of {self.num_blocks}"
        return block_id * self.layout.block_bytes

    def block_view(self, block_id: int) -> memoryview:
        """Return the block's raw bytes, writable, valid while the cache lives; no copy."""
        offset = self.block_offset(block_id)
        return self._bytes[offset : offset + self.layout.block_bytes]
