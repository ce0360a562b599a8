"""Log probabilities of a prompt's own tokens: those that a step computes, and their values.

The log probability of token p comes from the logits of token p - 1. So a request for them from position s on has to
compute everything from token s - 1 on, whatever is cached (`EngineRequest.most_reused`), and the run of tokens ``a ..
b`` of a step scores the positions ``a + 1 .. b``. Example: a prompt of 10 tokens, requested from 4 on, blocks of 2: two
tokens are reused, the runs 2 .. 6 and 6 .. 10 score 4 .. 6 and 7 .. 9; the first new token is drawn from the logits of
token 9.

Independent of tensors: the code that computes the logits writes into the arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from tanghulu.types import RequestId
from tanghulu.workers.engine.step_plan import ScheduledRun


@dataclass(frozen=True, slots=True, eq=False)
class PromptScoreArrays:
    """Scores of the prompt tokens ``position .. position + n`` of a request, whose ids are ``targets``.

    ``logprobs`` float32 [n]; ``ranks`` uint32 [n], 1 where no token was more likely; ``top_ids`` uint32 and
    ``top_logprobs`` float32 [n, num_top], best first; ``asked_logprobs`` float32 [n, len(asked)].
    """

    request_id: RequestId
    position: int
    targets: npt.NDArray[np.uint32]
    asked: tuple[int, ...]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.uint32]
    top_ids: npt.NDArray[np.uint32]
    top_logprobs: npt.NDArray[np.float32]
    asked_logprobs: npt.NDArray[np.float32]

    @classmethod
    def of(cls, run: ScheduledRun, vocab: int) -> Self | None:
        """Make room for the scores that ``run`` must compute; None if there are none."""
        request = run.request
        first_unscored = request.first_unscored
        if first_unscored is None or request.scoring is None:
            return None
        first, end = max(first_unscored, run.start + 1), min(run.start + run.num_tokens + 1, request.num_prompt_tokens)
        count = end - first
        if count <= 0:
            return None
        num_top, asked = min(request.scoring.num_top, vocab), request.sampling.logprob_token_ids
        return cls(
            request.request_id,
            first,
            request.sequence.tokens[first:end],
            asked,
            np.zeros(count, np.float32),
            np.zeros(count, np.uint32),
            np.zeros((count, num_top), np.uint32),
            np.zeros((count, num_top), np.float32),
            np.zeros((count, len(asked)), np.float32),
        )

    @property
    def end(self) -> int:
        """Position after the last one."""
        return self.position + len(self.targets)

    @property
    def num_top(self) -> int:
        return int(self.top_ids.shape[1])

    def part(self, start: int, end: int) -> PromptScoreArrays:
        """Return the scores number ``start .. end`` of these; the arrays are shared."""
        return PromptScoreArrays(
            self.request_id,
            self.position + start,
            self.targets[start:end],
            self.asked,
            self.logprobs[start:end],
            self.ranks[start:end],
            self.top_ids[start:end],
            self.top_logprobs[start:end],
            self.asked_logprobs[start:end],
        )
