"""Speculative decoding without a second model: what comes next is guessed from what followed the same words before.

The guess (prompt lookup, https://github.com/apoorvumang/prompt-lookup-decoding): find the last few tokens once more,
earlier in the sequence, and propose what followed them there. Worked example, drafts of 3: behind ``7 8 9 4 5 7 8`` the
pair ``7 8`` was there before and ``9 4 5`` followed; these are proposed.

A step computes the proposed tokens behind the last one, as a run of a prompt, and draws a token behind each of them. As
long as what was drawn is what was proposed, the next row's logits are those of the text; at the first that differs the
rest is thrown away. Since a draw is a function of logits, seed and position alone, the text is token by token the one
without drafts, greedy or drawn: a proposal is accepted with the model's own probability of it. Four tokens for one
step, where all three above were right. (Speculative decoding: https://arxiv.org/abs/2211.17192.)

Pure. What a request has of drafts follows from its tokens, so it goes through preemption, hand-over and a move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from tanghulu.errors import ConfigError

#: Drafts of more tokens are refused: what is thrown away costs as much as what is kept.
MAX_DRAFT_TOKENS = 32
_METHOD = "ngram"


@dataclass(frozen=True, slots=True)
class NgramProposer:
    """Proposes up to ``num_tokens`` tokens from where the last ``least`` to ``most`` tokens stood before."""

    num_tokens: int
    least: int = 2
    most: int = 4

    @classmethod
    def of(cls, text: str) -> Self | None:
        """The proposer that ``ngram:K`` names, of K tokens; None for an empty text. Raises ConfigError for others."""
        if not text:
            return None
        method, _, count = text.partition(":")
        if method != _METHOD or not count.isdecimal() or not 1 <= int(count) <= MAX_DRAFT_TOKENS:
            raise ConfigError(f"--speculative is {text!r}; it must be {_METHOD}:K with K from 1 to {MAX_DRAFT_TOKENS}")
        return cls(int(count))

    def propose(self, tokens: npt.NDArray[np.uint32], limit: int) -> tuple[int, ...]:
        """At most ``limit`` tokens that may follow ``tokens``; none if its end was not there before.

        Of several places the longest match is taken, of these the last. What lies between it and the end is taken to
        come again and again: ``5 5 5`` goes on with fives.
        """
        count = min(limit, self.num_tokens)
        if count < 1:
            return ()
        ends = self._matches(tokens)
        if not len(ends):
            return ()
        between = tokens[int(ends[-1]) + 1 :]
        return tuple(np.resize(between[:count], count).tolist())

    def _matches(self, tokens: npt.NDArray[np.uint32]) -> npt.NDArray[np.intp]:
        """Where the last tokens end once more, as many of them as match anywhere; ascending."""
        if len(tokens) <= self.least:
            return np.empty(0, dtype=np.intp)
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        for length in range(2, self.most + 1):
            longer = ends[ends >= length - 1]
            longer = longer[tokens[longer - (length - 1)] == tokens[-length]] if len(tokens) >= length else longer[:0]
            if not len(longer):
                return ends if length > self.least else longer
            ends = longer
        return ends
