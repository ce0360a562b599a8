"""A prompt's own log probabilities token by token, as workers told them in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tanghulu.conductor.routing.requests import PromptLogprobs

#: Rows that become Python's numbers at one time.
_ROWS: Final = 256


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One token of a prompt: its log probability and rank, and the most likely tokens there as (id, logprob).

    ``asked`` are the log probabilities of the tokens that the request names by id, in their order.
    """

    position: int
    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]
    asked: list[float]


def scored_tokens(prompt: Sequence[int], parts: Sequence[PromptLogprobs]) -> Iterator[ScoredToken]:
    """The tokens of ``prompt`` that ``parts`` tell of, in order; made as they are taken."""
    for part in parts:
        for start in range(0, len(part.logprobs), _ROWS):
            yield from _rows(prompt, part, slice(start, start + _ROWS))


def _rows(prompt: Sequence[int], part: PromptLogprobs, chosen: slice) -> Iterator[ScoredToken]:
    rows = zip(
        part.logprobs[chosen].tolist(),
        part.ranks[chosen].tolist(),
        part.top_ids[chosen].tolist(),
        part.top_logprobs[chosen].tolist(),
        part.asked_logprobs[chosen].tolist(),
        strict=True,
    )
    for position, (logprob, rank, ids, values, asked) in enumerate(rows, part.position + chosen.start):
        top = list(zip(ids, values, strict=True))
        yield ScoredToken(position, int(prompt[position]), logprob, rank, top, asked)
