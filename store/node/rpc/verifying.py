"""Compares chunks with their checksums, a slice at a time: other calls are served in between."""

from __future__ import annotations

import asyncio

from tanghulu.store.node.state.chunk import Chunk
from tanghulu.store.node.state.node_chunks import NodeChunks
from tanghulu.store.node.writes.puts import PutService
from tanghulu.store.protocol.checksums import RunningChecksums

#: Bytes compared before other calls are served: some tenths of a millisecond.
SLICE_BYTES = 4 << 20


class Verifier:
    """The comparisons of one call."""

    def __init__(self, chunks: NodeChunks, puts: PutService) -> None:
        self._chunks = chunks
        self._puts = puts
        self._left_bytes = SLICE_BYTES  # of this turn

    async def drop_if_corrupt(self, chunk: Chunk) -> bool:
        """Return whether the chunk was dropped because its bytes did not match."""
        if await self.is_intact(chunk) or self._chunks.find(chunk.key) is not chunk:
            return False
        return not self._puts.verify(chunk)

    async def is_intact(self, chunk: Chunk) -> bool:
        """Return whether the chunk's bytes match; True for one that is dropped meanwhile."""
        if not chunk.checksums.parts:
            return True
        running = RunningChecksums(chunk.size_bytes, chunk.checksums.part_bytes)
        position = 0
        while position < chunk.size_bytes:
            if self._left_bytes <= 0:
                self._left_bytes = SLICE_BYTES
                await asyncio.sleep(0)
                if self._chunks.find(chunk.key) is not chunk:
                    return True
            end = min(position + self._left_bytes, chunk.size_bytes)
            running.add(self._puts.bytes_of(chunk)[position:end])
            self._left_bytes -= end - position
            position = end
        return running.end().parts == chunk.checksums.parts
