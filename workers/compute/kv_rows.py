"""How K and V of a token become elements of the cache, and come back: rounded to its type, or in int8 with a scale.

In int8 each head of each token has a scale of its own, its largest magnitude / 127, which follows its values in the
cache (`KvLayout`). So a row hangs on nothing but its token: whatever is computed beside it, it is the same bytes. A
value comes back within half a scale. A row with a value that is not finite comes back as NaN throughout: what
overflowed is not hidden. Worked example, a head of four values:

    .5, -2.54, 0, 1.273  ->  scale 2.54 / 127 = .02  ->  25, -127, 0, 64  ->  .5, -2.54, 0, 1.28
"""

from __future__ import annotations

import torch

from tanghulu.workers.engine.kv_layout import SCALE_BYTES

_LEVELS = 127
#: A row's largest magnitude counts as at least this, so that scales are normal numbers; rows of far less are zero.
LEAST_MAGNITUDE = 1e-30


def to_rows(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bring ``values`` [..., head_dim] into a cache of ``dtype``: returns [..., `KvLayout.head_items`]."""
    if dtype != torch.int8:
        return values.to(dtype)
    values = values.float()
    scale = values.abs().amax(dim=-1, keepdim=True).clamp_(min=LEAST_MAGNITUDE).div_(_LEVELS)
    return torch.cat((values.div(scale).round_().to(torch.int8), scale.view(torch.int8)), dim=-1)


def from_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what ``rows`` [..., head_items] of a cache hold, as ``dtype`` [..., head_dim]; not a copy if it is theirs.

    In int8 rows must lie as they do in the cache: their scales are read in place.
    """
    if rows.dtype != torch.int8:
        return rows.to(dtype)
    values, scale = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:].view(torch.float32)
    return values.to(torch.float32).mul_(scale).to(dtype)


def gathered_item_bytes(kept: torch.dtype, computed: torch.dtype) -> int:
    """Bytes that attention needs at a time for each value that it gathers from a cache of ``kept`` as ``computed``."""
    if kept == computed:
        return kept.itemsize
    between = torch.float32.itemsize if kept == torch.int8 and computed != torch.float32 else 0
    return kept.itemsize + between + computed.itemsize
