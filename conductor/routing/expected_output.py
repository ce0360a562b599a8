"""The expected length of answers, and the blocks that answers under way will still fill where they decode. Pure.

A worker reports the blocks that are in use now. Its requests will need more: as many as the answers are long, which
nobody knows before their end, so a decaying mean of those that ended (or what the request allows, if that is less) is
expected. As tokens come the expectation decays; an answer that is longer than expected is expected to end at once.

Example: answers have 256 tokens on the mean, blocks 64. A request that is sent to a worker counts four blocks beside
its prompt's, after 100 tokens three, after 256 none. One with ``max_tokens`` 10 counts one.
"""

from __future__ import annotations

from dataclasses import dataclass

from tanghulu.conductor.routing.worker_state import LoadTracker

#: Expected output while no answer has ended, in tokens; and the weight of one more answer in the mean.
FIRST_EXPECTED_OUTPUT = 256.0
_WEIGHT = 0.02


class OutputEstimate:
    """The expected output of a request, in ``tokens``: a decaying mean of the answers that have ended."""

    def __init__(self) -> None:
        self.tokens = FIRST_EXPECTED_OUTPUT

    def ended(self, num_tokens: int) -> None:
        """Count an answer of ``num_tokens`` that has ended."""
        self.tokens += _WEIGHT * (num_tokens - self.tokens)


@dataclass(slots=True)
class _Answer:
    load: LoadTracker
    block_tokens: int
    left_tokens: float

    @property
    def num_blocks(self) -> int:
        return max(0, -int(-self.left_tokens // self.block_tokens))


class ExpectedBlocks:
    """The expected blocks, an entry for each submission that decodes where it was sent; the dispatcher bounds them."""

    def __init__(self) -> None:
        self._answers: dict[str, _Answer] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def begin(self, wire_id: str, load: LoadTracker, block_tokens: int, num_tokens: float) -> None:
        """Expect ``num_tokens`` more of a submission to the worker with that load."""
        assert wire_id not in self._answers
        answer = self._answers[wire_id] = _Answer(load, block_tokens, num_tokens)
        load.expect(answer.num_blocks)

    def came(self, wire_id: str, num_tokens: int) -> None:
        """Note that ``num_tokens`` of them have come; no error for a submission that nothing is expected of."""
        answer = self._answers.get(wire_id)
        if answer is not None and answer.left_tokens > 0:
            before = answer.num_blocks
            answer.left_tokens -= num_tokens
            if before != answer.num_blocks:
                answer.load.expect(answer.num_blocks - before)

    def end(self, wire_id: str) -> None:
        """Expect no more of a submission; no error if that is known."""
        answer = self._answers.pop(wire_id, None)
        if answer is not None:
            answer.load.expect(-answer.num_blocks)

    def check(self) -> None:
        sums: dict[int, int] = {}
        for answer in self._answers.values():
            sums[id(answer.load)] = sums.get(id(answer.load), 0) + answer.num_blocks
        assert all(answer.load.expected_blocks == sums[id(answer.load)] for answer in self._answers.values())
