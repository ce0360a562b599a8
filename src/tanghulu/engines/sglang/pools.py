"""A pool of pages in SGLang's host memory: the memory of each page, its key, and the meaning of its bytes.

Takes SGLang's objects as they are and imports nothing of it. A page's key is
``sgl/<fingerprint>/<page hash>/<rank>[/<pool>]``. SGLang's page hashes identify the tokens, but neither the model
nor the layout of the bytes: the fingerprint does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from tanghulu.engines.common.names import make_fingerprint
from tanghulu.errors import ConfigError

#: The pool whose pages are the prompt's; keys of other pools end in the pool's name.
KV = "kv"
#: States of linear attention are split between ranks, even if the model's KV is the same on all of them.
_ALWAYS_SPLIT = ("mamba",)
#: Attributes of a pool that define the form of its pages, if present. None depends on its number of pages.
_FORM = (
    *("layout", "dtype", "page_size", "layer_num", "start_layer", "end_layer", "head_num", "head_dim", "v_head_dim"),
    *("head_group_num", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "size_per_token", "storage_format_tag"),
    *("temporal_dtype", "conv_dtype", "indexer_dtype", "dsa_kv_cache_store_fp8"),
)


class PagePool:
    """One pool of one rank. ``pool``: SGLang's; ``facts``: what decides the meaning of the bytes of all pools."""

    def __init__(self, name: str, pool: Any, config: Any, facts: Mapping[str, Any]) -> None:
        self.name, self._pool = name, pool
        # A pool without its own memory lends its indices to others (DeepSeek V4): its pages need no bytes.
        self.has_memory = name != KV or getattr(pool, "kv_buffer", pool) is not None
        self.page_tokens = int(pool.page_size or 1)
        self.is_split = is_split(name, pool, config)
        self.is_writer = self.is_split or bool(config.is_storage_writer)
        self._rank = config.tp_rank if self.is_split else 0
        piece_sizes = self._sizes_of_a_page() if self.has_memory else []
        self.page_bytes = sum(piece_sizes)
        form = {each: str(getattr(pool, each, None)) for each in _FORM}
        shares = shares_of(config, self.is_split)
        fingerprint = make_fingerprint({**facts, "form": form, "shares": shares, "pieces": piece_sizes})
        self.prefix = f"sgl/{fingerprint[:8].hex()}/"

    def keys(self, page_hashes: Sequence[str]) -> list[str]:
        """Return the store's key of each page."""
        tail = f"/{self._rank}" if self.name == KV else f"/{self._rank}/{self.name}"
        return [f"{self.prefix}{each}{tail}" for each in page_hashes]

    def buffers(self, indices: Any, num_pages: int) -> list[list[Any]] | None:
        """Return the memory of each page, in pieces; None if ``indices`` (of tokens) do not match ``num_pages``."""
        if indices is None or len(indices) != num_pages * self.page_tokens:
            return None
        addresses, sizes = self._pool.get_page_buffer_meta(indices)
        pieces = [_memory(address, size) for address, size in zip(addresses, sizes, strict=True)]
        each = len(pieces) // num_pages
        return [pieces[at : at + each] for at in range(0, len(pieces), each)]

    def _sizes_of_a_page(self) -> list[int]:
        try:
            _, sizes = self._pool.get_page_buffer_meta(_first_page(self.page_tokens))
        except (AttributeError, NotImplementedError, ValueError) as error:
            layout = getattr(self._pool, "layout", None)
            raise ConfigError(
                f"the pages of SGLang's pool {self.name!r} ({type(self._pool).__name__}, layout {layout!r}) cannot be "
                f"accessed in place: {error}; use --hicache-mem-layout page_first"
            ) from None
        return [int(size) for size in sizes]


def is_split(name: str, pool: Any, config: Any) -> bool:
    """Return whether each rank has its own part; otherwise all have the same bytes, and one of them writes."""
    if not config.is_mla_model or name in _ALWAYS_SPLIT:
        return True
    # A draft model's pool beside an MLA model: if it has heads it is split, as in any model with heads.
    return name.startswith("draft") and getattr(pool, "head_num", None) is not None


def shares_of(config: Any, split: bool) -> dict[str, int]:
    """Return this rank's part of the model's KV, except its place among the ranks, which is in the keys."""
    shares = {
        "pipeline": config.pp_size,
        "pipeline_rank": config.pp_rank,
        "context": config.attn_cp_size,
        "context_rank": config.attn_cp_rank,
        "decode_context": getattr(config, "dcp_size", 1),
        "decode_context_rank": getattr(config, "dcp_rank", 0),
    }
    return {**shares, "tensor": config.tp_size} if split else shares


def memory_of(tensor: Any) -> Any:
    """Return the bytes of a contiguous tensor in host memory, readable and writable."""
    return _memory(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _memory(address: int, size: int) -> Any:
    return (ctypes.c_ubyte * size).from_address(address)


def _first_page(num_tokens: int) -> Any:
    import torch

    return torch.arange(num_tokens)
