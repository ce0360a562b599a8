"""A stand-in for torch's FlashAttention that holds callers to its rules."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool = True,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor | None,
    num_splits: int | None,
) -> torch.Tensor:
    """What torch documents, in float64; and FlashAttention 2 as torch has it: what it would get wrong fails here."""
    for lengths in (cu_seq_q, seqused_k, *([] if cu_seq_k is None else [cu_seq_k])):
        assert lengths.dtype is torch.int32
        assert lengths.is_contiguous()
    assert enable_gqa
    heads, kv_heads = query.shape[1], key.shape[-2]
    one_each = max_q == 1 and heads > kv_heads and window_size == (-1, -1)
    assert num_splits == 1 or one_each, "split over keys with packed queries"
    out = torch.empty_like(query)
    for index, context in enumerate(seqused_k.tolist()):
        first, end = cu_seq_q[index : index + 2].tolist()
        assert end - first <= max_q
        assert context <= max_k
        if block_table is not None:
            assert block_table.dtype is torch.int32
            assert block_table.stride(-1) == 1
            keys, values = (each[block_table[index].long()].flatten(0, 1) for each in (key, value))
        else:
            assert cu_seq_k is not None
            span = slice(*cu_seq_k[index : index + 2].tolist())
            assert context <= span.stop - span.start
            keys, values = key[span], value[span]
        seen = torch.arange(context) <= torch.arange(context - (end - first), context)[:, None]
        if window_size == (-1, -1):
            seen = torch.ones_like(seen)
        else:
            assert window_size == (-1, 0)
        keys, values = (
            each[:context].double().repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for each in (keys, values)
        )
        attended = F.scaled_dot_product_attention(query[first:end].double().transpose(0, 1), keys, values, seen)
        out[first:end] = attended.transpose(0, 1).to(query.dtype)
    return out
