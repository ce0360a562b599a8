"""The expected length of answers, and the blocks that answers in progress will still fill while decoding. Pure.

A worker reports the blocks currently in use. Its requests will need more, depending on the length of the answers, which
is unknown until they end, so a decaying mean of ended answers to prompts that begin alike (or the request's limit, if
lower) is expected. The expectation shrinks as tokens come; an answer that is longer than expected is expected to end
at once.

Example: answers have 256 tokens on average, blocks 64. A request sent to a worker counts four blocks in addition to its
prompt's, three after 100 tokens, none after 256. One with ``max_tokens`` 10 counts one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from tanghulu.conductor.routing.worker_state import LoadTracker

#: Expected output in tokens until the first answer has ended; and the weight of one more answer in the mean.
FIRST_EXPECTED_OUTPUT = 256.0
_WEIGHT = 0.02
#: Answers to prompts that begin alike from which their own mean is used; and the prefixes remembered at most.
MIN_ANSWERS = 16
MOST_PREFIXES = 10_000


class OutputEstimate:
    """Expected output of requests, in tokens: decaying means of the answers that have ended; of all in ``tokens``.

    Prompts of one tool or agent begin alike, and their answers have lengths of their own. So an answer is expected to
    be as long as those to prompts with the same 1, 2, 4, 8, ... leading blocks: the most blocks that MIN_ANSWERS share.
    Example: chats have answers of 300 tokens, a tool's calls of 20, and all begin with the same block; the second one
    tells them apart.
    """

    def __init__(self) -> None:
        self.tokens = FIRST_EXPECTED_OUTPUT
        self._means: OrderedDict[Hashable, _Mean] = OrderedDict()

    def __len__(self) -> int:
        return len(self._means)

    def of(self, blocks: Sequence[Hashable]) -> float:
        """Return the expected tokens of the answer to a prompt of ``blocks``."""
        tokens = self.tokens
        for block in _leading(blocks):
            mean = self._means.get(block)
            if mean is None or mean.num_answers < MIN_ANSWERS:
                break
            tokens = mean.tokens
        return tokens

    def ended(self, num_tokens: int, blocks: Sequence[Hashable]) -> None:
        """Count an ended answer of ``num_tokens`` to a prompt of ``blocks``."""
        self.tokens += _WEIGHT * (num_tokens - self.tokens)
        for block in _leading(blocks):
            mean = self._means.setdefault(block, _Mean())
            self._means.move_to_end(block)
            mean.num_answers += 1
            mean.tokens += max(_WEIGHT, 1 / mean.num_answers) * (num_tokens - mean.tokens)
            if mean.num_answers < MIN_ANSWERS:
                break
        while len(self._means) > MOST_PREFIXES:
            self._means.popitem(last=False)


@dataclass(slots=True)
class _Mean:
    num_answers: int = 0
    tokens: float = 0.0


def _leading(blocks: Sequence[Hashable]) -> Iterator[Hashable]:
    """Yield the last of the first 1, 2, 4, 8, ... blocks: it names them all."""
    number = 1
    while number <= len(blocks):
        yield blocks[number - 1]
        number *= 2


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
        """Record that ``num_tokens`` of them have come; no error for a submission without an expectation."""
        answer = self._answers.get(wire_id)
        if answer is not None and answer.left_tokens > 0:
            before = answer.num_blocks
            answer.left_tokens -= num_tokens
            if before != answer.num_blocks:
                answer.load.expect(answer.num_blocks - before)

    def end(self, wire_id: str) -> None:
        """Drop the expectation for a submission; no error if already dropped."""
        answer = self._answers.pop(wire_id, None)
        if answer is not None:
            answer.load.expect(-answer.num_blocks)

    def check(self) -> None:
        sums: dict[int, int] = {}
        for answer in self._answers.values():
            sums[id(answer.load)] = sums.get(id(answer.load), 0) + answer.num_blocks
        assert all(answer.load.expected_blocks == sums[id(answer.load)] for answer in self._answers.values())
