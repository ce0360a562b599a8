"""Log probabilities of prompt tokens from a forward pass, a few rows of logits at a time.

The logits of a whole run of a prompt would be gigabytes (8,192 tokens of a vocabulary of 128,000: 4 GB). So the model's
head is applied to ``MAX_LOGITS`` values at a time, of which only the requested ones are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tanghulu.workers.compute.device import upload
from tanghulu.workers.engine.step import PromptScoreArrays

#: Most logits in memory at a time, 16 MiB; at least those of one row.
MAX_LOGITS = 4 << 20


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRows:
    """Rows ``first_row .. first_row + len(into.targets)`` of a forward batch, whose logits give the scores ``into``."""

    first_row: int
    into: PromptScoreArrays


def score(
    scored: Sequence[ScoredRows], logits_of: Callable[[torch.Tensor], torch.Tensor], vocab: int, device: torch.device
) -> None:
    """Fill in all scores. ``logits_of`` returns the logits of rows, int64 [n], as float32 [n, vocab].

    Ranks other than 0 get no logits and fill in nothing, but compute their share of them.
    """
    most = max(1, MAX_LOGITS // vocab)
    for rows in scored:
        for start in range(0, len(rows.into.targets), most):
            part = rows.into.part(start, start + most)
            first = rows.first_row + start
            logits = logits_of(torch.arange(first, first + len(part.targets), device=device))
            if len(logits):
                _fill(part, logits)


def _fill(scores: PromptScoreArrays, logits: torch.Tensor) -> None:
    device = logits.device
    values = logits.log_softmax(dim=-1)  # as for generated tokens: the same bits
    targets = upload(scores.targets.astype(np.int64)[:, None], device)
    scores.logprobs[:] = values.gather(1, targets)[:, 0].cpu().numpy()
    scores.ranks[:] = ((logits > logits.gather(1, targets)).sum(dim=-1) + 1).cpu().numpy()
    if scores.num_top:
        best = logits.topk(scores.num_top, dim=-1)
        scores.top_ids[:] = best.indices.cpu().numpy()
        scores.top_logprobs[:] = values.gather(1, best.indices).cpu().numpy()
    if scores.named:
        named = upload(np.asarray(scores.named, dtype=np.int64), device)
        scores.named_logprobs[:] = values[:, named].cpu().numpy()
