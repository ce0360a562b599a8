"""Sampling on the device of the logits: all rows at once, and one copy to main memory per step for any requests.

The rules and the draw are `sampling`'s, row by row (see there); the same u of (seed, position) decides, so a request's
text does not depend on the batch. Equal logits, which are common in bfloat16, are ordered by token id, so that a cut at
k tokens does not depend on the number that other rows need.

top-p considers a row's best `_CANDIDATES` tokens. The copy that brings the tokens marks the rows for which they did not
suffice (a flat distribution with a large top-p); those are drawn again over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tanghulu.session.outputs import TokenLogprobs
from tanghulu.workers.compute.device import upload
from tanghulu.workers.compute.sampling import SamplingRow, adjusted, draw_one, unit_uniform
from tanghulu.workers.engine.step import Sampled

_CANDIDATES = 1024


class _Columns(NamedTuple):
    """The rows' parameters as columns [R, 1], float64, on the device."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor


@torch.inference_mode()
def sample_on_device(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Sampled:
    """Draw one token per row. ``logits`` float32 [rows, vocab] on any device; not changed."""
    assert len(logits) == len(rows)
    changed = adjusted(logits, rows)
    tokens, suffices = changed.argmax(dim=-1), None
    if any(row.params.temperature > 0 for row in rows):
        columns = _columns(rows, logits.device)
        drawn, suffices = _drawn(changed, rows, columns)
        tokens = torch.where(columns.temperature[:, 0] > 0, drawn, tokens)
    copied = _pack(logits, rows, tokens, suffices).cpu().numpy()  # the step's one wait for the device
    if suffices is not None and not copied[:, 1].all():
        tokens = _redrawn(changed, rows, tokens, copied[:, 1])
        copied = _pack(logits, rows, tokens, None).cpu().numpy()
    return _unpack(copied, rows)


def _columns(rows: Sequence[SamplingRow], device: torch.device) -> _Columns:
    values = [
        (p.temperature, p.top_k, p.top_p, p.min_p, unit_uniform(p.seed or 0, row.num_generated))
        for row in rows
        for p in (row.params,)
    ]
    return _Columns(*upload(np.asarray(values, dtype=np.float64), device).T.unsqueeze(-1))


def _drawn(logits: torch.Tensor, rows: Sequence[SamplingRow], columns: _Columns) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token for each row, and return whether its candidates sufficed; rows of temperature 0 get any token."""
    temperature = torch.where(columns.temperature > 0, columns.temperature, 1.0)
    shifted = (logits - logits.max(dim=-1, keepdim=True).values).double()
    probabilities = torch.softmax(shifted / temperature, dim=-1)
    tokens, suffices = _first_above(_cut_min_p(probabilities, columns), columns.uniform), None
    vocab = logits.shape[1]
    is_cut = [_is_cut(row, vocab) for row in rows]
    if any(is_cut):
        count = min(vocab, max([_CANDIDATES, *(row.params.top_k for row in rows if row.params.top_k < vocab)]))
        order = _best(logits, count)
        best = probabilities.gather(1, order)
        kept, suffices = _cut(best, probabilities, columns)
        chosen = order.gather(1, _first_above(_cut_min_p(kept, columns), columns.uniform)[:, None])[:, 0]
        cut = upload(np.asarray(is_cut), logits.device)
        tokens, suffices = torch.where(cut, chosen, tokens), suffices | ~cut
    return tokens, torch.ones_like(tokens, dtype=torch.bool) if suffices is None else suffices


def _is_cut(row: SamplingRow, vocab: int) -> bool:
    params = row.params
    return params.temperature > 0 and (0 < params.top_k < vocab or params.top_p < 1)


def _best(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids of each row's ``count`` largest logits [R, count], best first; among equals, smaller ids first.

    Floats in ascending order are, by their bits, integers in ascending order if the negative ones' bits are flipped;
    with the id in the lower bits no two are equal, so that the order does not depend on ``count``.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    backwards = torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    keys = (ascending << 32) | backwards
    return logits.shape[1] - 1 - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)


def _cut(best: torch.Tensor, probabilities: torch.Tensor, columns: _Columns) -> tuple[torch.Tensor, torch.Tensor]:
    """Set to 0 what top-k and then top-p exclude from ``best``, and return for which rows ``best`` was long enough."""
    vocab, count = probabilities.shape[1], best.shape[1]
    ranks = torch.arange(count, device=best.device)
    limited = (columns.top_k > 0) & (columns.top_k < vocab)
    kept = torch.where(limited & (ranks >= columns.top_k), 0.0, best)
    total = torch.where(limited[:, 0], kept.sum(dim=-1), probabilities.sum(dim=-1))[:, None]
    cumulative = kept.cumsum(dim=-1)
    # A token belongs if those before it do not reach top_p yet; the best always does.
    belongs = (cumulative - kept < columns.top_p * total) | (ranks == 0)
    has_all = limited[:, 0] | (columns.top_p[:, 0] >= 1) | (cumulative[:, -1] >= (columns.top_p * total)[:, 0])
    return torch.where(belongs | (columns.top_p >= 1), kept, 0.0), has_all | (count == vocab)


def _cut_min_p(probabilities: torch.Tensor, columns: _Columns) -> torch.Tensor:
    largest = probabilities.max(dim=-1, keepdim=True).values
    return torch.where(probabilities >= columns.min_p * largest, probabilities, 0.0)


def _first_above(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the first place where the cumulative probability exceeds ``uniform`` of the whole; [R].

    The last one if there is none, as in a row whose logits are not finite.
    """
    cumulative = probabilities.cumsum(dim=-1)
    whole = cumulative[:, -1:]
    below = torch.nextafter(whole, torch.zeros_like(whole))  # rounding must not reach beyond the last
    places = torch.searchsorted(cumulative, torch.minimum(uniform * whole, below), right=True)[:, 0]
    return places.clamp(max=probabilities.shape[1] - 1)


def _redrawn(
    logits: torch.Tensor, rows: Sequence[SamplingRow], tokens: torch.Tensor, suffices: npt.NDArray[np.float64]
) -> torch.Tensor:
    tokens = tokens.clone()
    for index in np.flatnonzero(suffices == 0).tolist():
        params = rows[index].params
        tokens[index] = draw_one(logits[index], params, unit_uniform(params.seed or 0, rows[index].num_generated))
    return tokens


def _pack(
    logits: torch.Tensor, rows: Sequence[SamplingRow], tokens: torch.Tensor, suffices: torch.Tensor | None
) -> torch.Tensor:
    """Return float64 [R, 2 + 1 + 2 T + A]: token, suffices, its logprob, the T most likely ids and their logprobs.

    The logprobs of the ids requested by rows follow, at most A each.
    """
    columns = [tokens[:, None], torch.ones_like(tokens)[:, None] if suffices is None else suffices[:, None]]
    wanted = [row.params.num_logprobs for row in rows if row.params.num_logprobs is not None]
    if wanted:
        values = torch.log_softmax(logits, dim=-1)
        columns.append(values.gather(1, tokens[:, None]))
        best = values.topk(min(max(wanted), logits.shape[1]), dim=-1)
        columns += [best.indices, best.values]
        if (named := _named_ids(rows)).size:
            columns.append(values.gather(1, upload(named, logits.device)))
    return torch.cat([column.double() for column in columns], dim=1)


def _named_ids(rows: Sequence[SamplingRow]) -> npt.NDArray[np.int64]:
    """Return the ids whose log probabilities the rows request, int64 [R, A], filled with zeros."""
    ids = np.zeros((len(rows), max(len(row.params.logprob_token_ids) for row in rows)), dtype=np.int64)
    for line, row in zip(ids, rows, strict=True):
        line[: len(row.params.logprob_token_ids)] = row.params.logprob_token_ids
    return ids


def _unpack(copied: npt.NDArray[np.float64], rows: Sequence[SamplingRow]) -> Sampled:
    tokens = [int(token) for token in copied[:, 0]]
    num_named = max((len(row.params.logprob_token_ids) for row in rows), default=0)
    num_top = (copied.shape[1] - 3 - num_named) // 2
    logprobs: list[TokenLogprobs | None] = []
    for row, token, line in zip(rows, tokens, copied, strict=True):
        if row.params.num_logprobs is None:
            logprobs.append(None)
            continue
        count, named = min(row.params.num_logprobs, num_top), row.params.logprob_token_ids
        top = line[3 : 3 + count].astype(int).tolist()
        values = [*line[2:3], *line[3 + num_top :][:count], *line[3 + 2 * num_top :][: len(named)]]
        logprobs.append(TokenLogprobs((token, *top, *named), tuple(map(float, values))))
    return Sampled(tokens, logprobs)
