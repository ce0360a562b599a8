"""Which chunks were read most since the last announcement: bounded, and nearly free for the reads. Pure.

Only every ``SAMPLE``-th read of a chunk comes here (a chunk counts its own reads), so a chunk that is read less often
than that in its life costs nothing. Beyond ``MAX_KEYS`` the least counted key makes place and the new one inherits its
count (space-saving, Metwally et al. 2005).
"""

from __future__ import annotations

from tanghulu.store.node.state.chunk import Chunk
from tanghulu.types import ChunkKey

SAMPLE = 16
MAX_KEYS = 64
#: Told at once, most-read first.
MAX_TOLD = 16


class HotKeys:
    """See the module."""

    def __init__(self) -> None:
        self._counts: dict[ChunkKey, int] = {}

    def read(self, chunk: Chunk) -> None:
        """Count a read of ``chunk`` at the chunk."""
        chunk.num_hits += 1
        if not chunk.num_hits % SAMPLE:
            self.saw(chunk.key)

    def saw(self, key: ChunkKey) -> None:
        """``key`` was read ``SAMPLE`` more times."""
        counts = self._counts
        inherited = 0
        if key not in counts and len(counts) >= MAX_KEYS:
            inherited = counts.pop(min(counts, key=counts.__getitem__))
        counts[key] = counts.get(key, 0) + inherited + SAMPLE

    def take(self) -> list[tuple[ChunkKey, int]]:
        """(key, reads) of those that are worth telling; counting begins anew."""
        counts, self._counts = self._counts, {}
        return sorted(counts.items(), key=lambda entry: entry[1], reverse=True)[:MAX_TOLD]

    def check(self) -> None:
        """It is bounded."""
        assert len(self._counts) <= MAX_KEYS

    def __repr__(self) -> str:
        return f"HotKeys({len(self._counts)})"
