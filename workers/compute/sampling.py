"""From logits to tokens: penalties, bias, grammar, temperature, top-k, top-p, min-p, and a repeatable draw.

The draw for a request's n-th generated token is a function of (seed, n) alone: u = hash(seed, n) in [0, 1), and the
token is the first at which the cumulative probability exceeds u. No generator has state, so the same seed gives the
same text whatever else is in the batch, after a preemption, and on the worker to which a request migrates. Greedy rows
(temperature 0) are an exact argmax and draw nothing.

Example: probabilities 0.5, 0.3, 0.2 and u = 0.6 give the second token. With top_p 0.7 the third is cut off,
0.8 remains, and the draw compares 0.6 x 0.8 = 0.48 with 0.5: the first.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from tanghulu.session.outputs import TokenLogprobs
from tanghulu.session.sampling import Sampling
from tanghulu.workers.compute.device import upload
from tanghulu.workers.engine.grammar import Grammar
from tanghulu.workers.engine.requests import EngineRequest
from tanghulu.workers.engine.step import Sampled

#: Most likely tokens that top-p alone tries first; it sorts all only if they do not suffice.
_NUCLEUS_FIRST = 512
_UNIT = 2.0**-53
_LOWEST = float("-inf")


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """Inputs of one request's draw. ``tokens`` uint32: its sequence, of which ``num_prompt`` are prompt."""

    params: Sampling
    tokens: npt.NDArray[np.uint32]
    num_prompt: int
    banned: frozenset[int]
    grammar: Grammar | None = None

    @classmethod
    def of(cls, request: EngineRequest, draft: tuple[int, ...] = ()) -> SamplingRow:
        """Return the row of ``request``'s next token, or of the one after ``draft``, if that follows."""
        tokens = request.sequence.tokens
        return cls(
            request.sampling,
            np.append(tokens, np.asarray(draft, dtype=tokens.dtype)) if draft else tokens,
            request.num_prompt_tokens,
            request.banned_ids(request.num_generated + len(draft)),
            request.grammar,
        )

    @property
    def num_generated(self) -> int:
        """Index of the token to be drawn among the generated ones."""
        return len(self.tokens) - self.num_prompt


def unit_uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) with which a request of ``seed`` draws its ``position``-th generated token."""
    digest = xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed & (2**64 - 1), position), seed=0x7A6E)
    return (digest >> 11) * _UNIT


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Sampled:
    """Draw one token per row. ``logits`` float32 [rows, vocab]; not changed."""
    assert len(logits) == len(rows)
    changed = adjusted(logits, rows)
    tokens: list[int] = changed.argmax(dim=-1).tolist()
    for index, row in enumerate(rows):
        if row.params.temperature > 0:
            tokens[index] = draw_one(changed[index], row.params, unit_uniform(row.params.seed or 0, row.num_generated))
    logprobs = [
        None if row.params.num_logprobs is None else _logprobs(logits[index], tokens[index], row.params)
        for index, row in enumerate(rows)
    ]
    return Sampled(tokens, logprobs)


def adjusted(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Return the logits after penalties, bias and bans; the tensor itself if no row has any."""
    if not any(map(_touches, rows)):
        return logits
    changed, device = logits.clone(), logits.device
    scaled, added, biased, banned = (_Entries() for _ in range(4))
    forbidden: dict[int, npt.NDArray[np.bool_]] = {}
    for index, row in enumerate(rows):
        _collect_penalties(index, row, scaled, added)
        biased.add(index, list(row.params.logit_bias), list(row.params.logit_bias.values()))
        if (mask := _forbidden_by_grammar(row)) is not None:
            forbidden[index] = mask
        else:
            banned.add(index, list(row.banned), [_LOWEST] * len(row.banned))
    if scaled:
        where, factors = scaled.on(device)
        values = changed[where]
        changed.index_put_(where, torch.where(values > 0, values / factors, values * factors))
    for entries in (added, biased, banned):
        if entries:
            where, values = entries.on(device)
            changed.index_put_(where, changed[where] + values)
    if forbidden:
        indices = upload(np.asarray(list(forbidden)), device)
        masks = upload(np.stack(list(forbidden.values())), device)
        changed[indices] = changed[indices].masked_fill(masks, _LOWEST)
    return changed


def _collect_penalties(index: int, row: SamplingRow, scaled: _Entries, added: _Entries) -> None:
    """Collect repetition (CTRL, over prompt and output), presence and frequency penalties (OpenAI's, over output)."""
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = np.unique(row.tokens)
        scaled.add(index, seen, np.full(len(seen), params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = np.unique(row.tokens[row.num_prompt :], return_counts=True)
        added.add(index, ids, -(params.presence_penalty + params.frequency_penalty * counts))


class _Entries:
    """Unique places in the logits, and a value for each."""

    def __init__(self) -> None:
        self._rows: list[npt.NDArray[np.int64]] = []
        self._tokens: list[npt.NDArray[np.int64]] = []
        self._values: list[npt.NDArray[np.float32]] = []

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: int, tokens: npt.ArrayLike, values: npt.ArrayLike) -> None:
        ids = np.asarray(tokens, dtype=np.int64)
        if len(ids):
            self._rows.append(np.full(len(ids), row, dtype=np.int64))
            self._tokens.append(ids)
            self._values.append(np.asarray(values, dtype=np.float32))

    def on(self, device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return the places as (rows, tokens), and the values, as tensors on ``device``."""
        places = upload(np.stack((np.concatenate(self._rows), np.concatenate(self._tokens))), device)
        return (places[0], places[1]), upload(np.concatenate(self._values), device)


def _touches(row: SamplingRow) -> bool:
    """Return whether the row's logits are changed before sampling."""
    return bool(row.params.has_penalties or row.params.logit_bias or row.banned or row.grammar is not None)


def _forbidden_by_grammar(row: SamplingRow) -> npt.NDArray[np.bool_] | None:
    """Return a flag per token, for those barred by the grammar, or banned, unless nothing else may follow.

    None without a grammar, and for a text that left it (it was not made under it) and cannot be brought back.
    """
    if row.grammar is None:
        return None
    allowed = row.grammar.allowed(row.tokens[row.num_prompt :])
    wanted = allowed.copy()
    wanted[sorted(row.banned)] = False
    chosen = wanted if wanted.any() else allowed
    return ~chosen if chosen.any() else None


def draw_one(logits: torch.Tensor, params: Sampling, uniform: float) -> int:
    """Draw one token of one row. In float64, so that a cumulative sum over a whole vocabulary stays exact enough."""
    # Subtracting the maximum first keeps tiny temperatures from overflowing.
    probabilities = torch.softmax((logits - logits.max()).double() / params.temperature, dim=-1)
    ids: torch.Tensor | None = None
    if 0 < params.top_k < len(probabilities):
        probabilities, ids = probabilities.topk(params.top_k)
    if params.top_p < 1:
        probabilities, ids = _nucleus(probabilities, ids, params.top_p)
    if params.min_p > 0:
        probabilities = torch.where(probabilities >= params.min_p * probabilities.max(), probabilities, 0.0)
    cumulative = probabilities.cumsum(dim=-1)
    target = uniform * cumulative[-1]
    index = min(int(torch.searchsorted(cumulative, target, right=True)), len(cumulative) - 1)
    return index if ids is None else int(ids[index])


def _nucleus(probabilities: torch.Tensor, ids: torch.Tensor | None, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest set of most likely tokens whose share is at least ``top_p``, best first."""
    total = probabilities.cumsum(dim=-1)[-1]  # in a fixed order; that of a sum depends on the number of threads
    if ids is None:
        best, ids = probabilities.topk(min(_NUCLEUS_FIRST, len(probabilities)))
        if best.sum() < top_p * total:
            best, ids = probabilities.sort(descending=True, stable=True)
    else:
        best = probabilities
    # A token belongs if those before it do not reach top_p yet; the best always does.
    before = best.cumsum(dim=-1) - best
    count = max(1, int((before < top_p * total).sum()))
    return best[:count], ids[:count]


def _logprobs(logits: torch.Tensor, token: int, params: Sampling) -> TokenLogprobs:
    values, num_top = torch.log_softmax(logits, dim=-1), params.num_logprobs or 0
    ids = [token]
    if num_top:
        ids += values.topk(min(num_top, len(values))).indices.tolist()
    ids += params.logprob_token_ids
    return TokenLogprobs(tuple(ids), tuple(values[ids].tolist()))
