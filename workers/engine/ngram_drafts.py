"""Speculative decoding without a second model: the next tokens are guessed from earlier repetitions.

The guess (prompt lookup, https://github.com/apoorvumang/prompt-lookup-decoding): find the last few tokens once more,
earlier in the sequence, and propose the tokens that followed there. Worked example, drafts of 3: in ``7 8 9 4 5 7 8``
the final pair ``7 8`` occurred before, followed by ``9 4 5``; these are proposed.

A step computes the proposed tokens after the last one, as a run of a prompt, and draws a token after each of them. As
long as the drawn tokens equal the proposed ones, the next row's logits are those of the text; the rest is discarded at
the first difference. Since a draw is a function of logits, seed and position alone, the text equals, token by token,
the one without drafts, greedy or drawn: a proposal is accepted with the model's own probability of it. If all three
above are right, one step yields four tokens. (Speculative decoding: https://arxiv.org/abs/2211.17192.)

Pure. A request's drafts follow from its tokens, so they survive preemption, hand-over and a move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from tanghulu.errors import ConfigError

#: Most tokens of a draft: discarded ones cost as much as accepted ones.
MAX_DRAFT_TOKENS = 32
_METHOD = "ngram"


@dataclass(frozen=True, slots=True)
class NgramProposer:
    """Proposes up to ``num_tokens`` tokens from an earlier occurrence of the last ``least`` to ``most`` tokens."""

    num_tokens: int
    least: int = 2
    most: int = 4

    @classmethod
    def of(cls, text: str) -> Self | None:
        """Return the proposer for ``ngram:K``, of K tokens; None for an empty text. Raises ConfigError for others."""
        if not text:
            return None
        method, _, count = text.partition(":")
        if method != _METHOD or not count.isdecimal() or not 1 <= int(count) <= MAX_DRAFT_TOKENS:
            raise ConfigError(f"--speculative is {text!r}; it must be {_METHOD}:K with K from 1 to {MAX_DRAFT_TOKENS}")
        return cls(int(count))

    def propose(self, tokens: npt.NDArray[np.uint32], limit: int) -> tuple[int, ...]:
        """Return at most ``limit`` tokens that may follow ``tokens``; none if its end did not occur before.

        The longest match is taken, and of several the last. The tokens between it and the end are assumed to repeat:
        ``5 5 5`` continues with fives.
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
        """Return where the last tokens occur again, with the longest match; ascending."""
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
