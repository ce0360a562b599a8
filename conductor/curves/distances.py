"""Stack distances of LRU (Mattson et al., 1970): one pass gives the hits of an LRU cache of every size.

The distance of a block is the number of distinct blocks used since its last use; a cache of C blocks has it if the
distance is less than C. After a, b, c, b the distances are: b 0, c 1, a 2, so a cache of two holds b and c.

Each use takes the next position; of a block only the last one is set. The distance is the number of set positions
behind its own: bits in words of WORD positions, and a count for each word, so that a query adds few numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

WORD: Final = 256
#: Positions beyond twice the number of blocks at which positions are numbered anew.
_SLACK: Final = 4096


class StackDistances:
    """Blocks in the order of their last use, with their distances."""

    def __init__(self) -> None:
        self._positions: dict[int, int] = {}  # from the least to the most recently used
        self._words: list[int] = []
        self._counts: list[int] = []
        self._end = 0

    def __len__(self) -> int:
        return len(self._positions)

    def distance(self, block: int) -> int | None:
        """Return the number of distinct blocks used since ``block``; None if it is unknown."""
        at = self._positions.get(block)
        if at is None:
            return None
        word = at // WORD
        return (self._words[word] >> (at % WORD + 1)).bit_count() + sum(self._counts[word + 1 :])

    def use(self, block: int) -> None:
        """Make ``block`` the most recently used."""
        at = self._positions.pop(block, None)
        if at is not None:
            word = at // WORD
            self._words[word] ^= 1 << at % WORD
            self._counts[word] -= 1
        at = self._positions[block] = self._end
        if at % WORD == 0:
            self._words.append(0)
            self._counts.append(0)
        self._words[-1] |= 1 << at % WORD
        self._counts[-1] += 1
        self._end += 1
        if self._end > 2 * len(self._positions) + _SLACK:
            self._renumber(self._positions)

    def keep(self, num_blocks: int, wanted: Callable[[int], bool] = lambda block: True) -> None:
        """Forget all but the ``num_blocks`` most recently used, and the blocks that are not ``wanted``."""
        skipped = max(0, len(self._positions) - num_blocks)
        self._renumber([b for i, b in enumerate(self._positions) if i >= skipped and wanted(b)])

    def _renumber(self, blocks: Iterable[int]) -> None:
        self._positions = {block: at for at, block in enumerate(blocks)}
        self._end = len(self._positions)
        whole, rest = divmod(self._end, WORD)
        self._counts = [WORD] * whole + [rest] * (rest > 0)
        self._words = [(1 << count) - 1 for count in self._counts]

    def check(self) -> None:
        """Assert that positions and counts agree."""
        assert sum(self._counts) == len(self._positions)
        assert [word.bit_count() for word in self._words] == self._counts
        assert list(self._positions.values()) == sorted(self._positions.values())
