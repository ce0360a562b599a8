"""Which chunks of a node stand in its shared index: LIVE ones with one checksum and no end of their own.

Entries are written when the call that made the chunk LIVE has been answered, so nobody waits for them, and taken away
before the chunk's range can be given to anybody else.
"""

from __future__ import annotations

from collections.abc import Mapping

from tanghulu.store.node.state.chunk import Chunk, ChunkState
from tanghulu.store.protocol.shared_index import IndexWriter
from tanghulu.types import ChunkKey


class Published:
    """Keeps the index up to date; without a ``writer`` there is none."""

    def __init__(self, writer: IndexWriter | None = None) -> None:
        self._writer = writer
        self._fresh: list[Chunk] = []

    def add(self, chunk: Chunk) -> None:
        """The chunk is LIVE; it enters the index with the next ``flush``."""
        if self._writer is not None and chunk.expires_s is None and isinstance(chunk.compact_checksums, int):
            self._fresh.append(chunk)

    def flush(self) -> None:
        """Write what was added."""
        if not self._fresh:
            return
        assert self._writer is not None
        for chunk in self._fresh:
            checksum = chunk.compact_checksums
            if chunk.state is ChunkState.LIVE and isinstance(checksum, int):
                self._writer.publish(chunk.key, chunk.version, chunk.offset, chunk.size_bytes, checksum)
        self._fresh.clear()

    def remove(self, chunk: Chunk) -> None:
        """The chunk is about to go."""
        if self._writer is not None:
            self.flush()
            self._writer.withdraw(chunk.key)

    def beat(self, now_s: float) -> None:
        """A sign of life for the readers; to be given several times in ``MAX_SILENCE_S``."""
        if self._writer is not None:
            self.flush()
            self._writer.beat(now_s)

    def close(self) -> None:
        """Readers shall not look any more."""
        if self._writer is not None:
            self._writer.close()

    def check(self, chunks: Mapping[ChunkKey, Chunk]) -> None:
        """Assert that every entry is that of a LIVE chunk."""
        if self._writer is None:
            return
        self.flush()
        entries = self._writer.entries()
        for key, chunk in chunks.items():
            entry = entries.pop(self._writer.digest(key), None)
            if entry is not None:
                assert chunk.state is ChunkState.LIVE, f"{chunk!r} is published"
                assert (entry.version, entry.offset, entry.size_bytes) == (
                    chunk.version,
                    chunk.offset,
                    chunk.size_bytes,
                )
        assert not entries, f"{len(entries)} entries of chunks that are gone"
