"""Decoding over block tables in static shapes, in plain torch: for any device, and for CUDA graphs.

Every sequence is gathered to the width of the table and masked behind its own tokens; no shape and no decision depends
on the sequences' lengths, so the same operations serve every step of one shape. A kernel that reads block tables saves
the gathered copy: this path is for devices and block sizes without such a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tanghulu.workers.compute.forward_batch import DecodeTables
from tanghulu.workers.compute.kv_cache import KvTensors, from_rows

#: Tokens gathered at a time: bounds the copy for any batch. With 8 KV heads of 128 in bfloat16: K and V 1 GiB.
MAX_GATHERED_TOKENS = 262_144


def hidden_tokens(contexts: torch.Tensor, num_tokens: int, window: int | None = None) -> torch.Tensor:
    """Return bool [B, num_tokens]: tokens behind the first ``contexts[b]`` of row b, or before the last ``window``.

    The query of row b is the last of these tokens.
    """
    at, ends = torch.arange(num_tokens, device=contexts.device), contexts[:, None]
    return at >= ends if window is None else (at >= ends) | (at < ends - window)


def tokens_mask(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [B, 1, 1, num_tokens], -inf where ``hidden`` [B, num_tokens], else 0.

    It does not hide NaN, which a block may hold from its last owner: ``hidden`` K and V are also zeroed.
    """
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, float("-inf"))[:, None, None, :]


@dataclass(frozen=True, slots=True)
class StaticDecode:
    """One query for each row of ``tables`` [B, width]; ``hidden`` and ``mask`` as in `tokens_mask`."""

    tables: torch.Tensor
    hidden: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, cache: KvTensors, decodes: DecodeTables, dtype: torch.dtype, window: int | None = None) -> StaticDecode:
        """Prepare a step's decodes for queries of ``dtype``, by operations on the device alone."""
        num_tokens = decodes.tables.shape[1] * cache.layout.block_tokens
        hidden = hidden_tokens(decodes.contexts, num_tokens, window)
        return cls(decodes.tables, hidden, tokens_mask(hidden, dtype))

    @property
    def rows(self) -> slice:
        return slice(0, len(self.tables))

    def attend(self, cache: KvTensors, layer: int, query: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(query)
        for part in self._parts():
            folded = query[part].view(len(query[part]), cache.layout.num_kv_heads, -1, cache.layout.head_dim)
            key, value = (self._gathered(cache, layer, kv, part, query.dtype) for kv in (0, 1))
            result = F.scaled_dot_product_attention(folded, key, value, attn_mask=self.mask[part])
            out[part] = result.reshape(-1, *query.shape[1:])
        return out

    def _parts(self) -> Iterator[slice]:
        """Return runs of rows of at most `MAX_GATHERED_TOKENS` tokens, or of one row."""
        count = max(1, MAX_GATHERED_TOKENS // self.mask.shape[-1])
        return (slice(at, at + count) for at in range(0, len(self.tables), count))

    def _gathered(self, cache: KvTensors, layer: int, kv: int, part: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return K or V as [rows, kv_heads, tokens, head_dim]."""
        tables, layout = self.tables[part], cache.layout
        blocks = from_rows(cache.blocks[:, layer, kv].index_select(0, tables.flatten()), dtype)
        tokens = blocks.view(len(tables), -1, layout.num_kv_heads, layout.head_dim)
        return tokens.masked_fill_(self.hidden[part, :, None, None], 0).transpose(1, 2)
