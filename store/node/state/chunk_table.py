"""Every chunk of a node, found by key, and the chunks that clients find by themselves.

Owns the indexes; decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from sortedcontainers import SortedList

from tanghulu.parted_dict import PartedDict
from tanghulu.store.node.state.chunk import Chunk, ChunkEvent, ChunkState
from tanghulu.store.protocol.shared_index import IndexWriter
from tanghulu.store.protocol.terms import Term
from tanghulu.store.protocol.types import Pin
from tanghulu.types import ChunkKey

_INDEXED = (ChunkState.ANNOUNCING, ChunkState.LIVE)


class Published:
    """The chunks in the node's shared index: LIVE ones with one checksum and no end of their own.

    Entries are written when the call that made the chunk LIVE has been answered, so nobody waits for them, and removed
    before the chunk's range can be given to another. Without a ``writer`` there is no index.
    """

    def __init__(self, writer: IndexWriter | None = None) -> None:
        self._writer = writer
        self._fresh: list[Chunk] = []

    def add(self, chunk: Chunk) -> None:
        """Enter the LIVE chunk into the index with the next ``flush``."""
        if self._writer is not None and chunk.expires_s is None and isinstance(chunk.compact_checksums, int):
            self._fresh.append(chunk)

    def flush(self) -> None:
        """Write the added entries."""
        if not self._fresh:
            return
        assert self._writer is not None
        for chunk in self._fresh:
            checksum = chunk.compact_checksums
            if chunk.state is ChunkState.LIVE and isinstance(checksum, int):
                self._writer.publish(chunk.key, chunk.version, chunk.offset, chunk.size_bytes, checksum)
        self._fresh.clear()

    def remove(self, chunk: Chunk) -> None:
        """Remove a chunk that is about to be dropped."""
        if self._writer is not None:
            self.flush()
            self._writer.withdraw(chunk.key)

    def beat(self, now_s: float) -> None:
        """Give readers a sign of life; to be called several times in ``MAX_SILENCE_S``."""
        if self._writer is not None:
            self.flush()
            self._writer.beat(now_s)

    def publish_term(self, term: Term) -> None:
        """Publish to readers the newest master that the node obeys."""
        if self._writer is not None:
            self._writer.publish_term(term)

    def close(self) -> None:
        """Tell readers to stop reading the index."""
        if self._writer is not None:
            self._writer.close()

    def check(self, chunks: PartedDict[ChunkKey, Chunk]) -> None:
        """Assert that every entry belongs to a LIVE chunk."""
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


class ChunkTable:
    """A key names at most one ANNOUNCING or LIVE chunk; the few RESERVED and CONDEMNED ones are kept separately."""

    def __init__(self, published: Published | None = None) -> None:
        self._by_key = PartedDict[ChunkKey, Chunk]()
        self._nameless: dict[int, Chunk] = {}  # RESERVED and CONDEMNED chunks by offset
        self._ends = SortedList()  # (expires_s, id, chunk) of those in _by_key with an end
        self._published = published or Published()
        self.hard_pinned_bytes = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Chunk]:
        return chain(self._by_key.values(), self._nameless.values())

    def find(self, key: ChunkKey) -> Chunk | None:
        """Return the ANNOUNCING or LIVE chunk of ``key``."""
        return self._by_key.get(key)

    def keys(self) -> list[ChunkKey]:
        """Return a list of the keys of all ANNOUNCING and LIVE chunks."""
        return list(self._by_key)

    @property
    def writing(self) -> bool:
        """Whether some reservation may still become a chunk."""
        return any(chunk.state is ChunkState.RESERVED for chunk in self._nameless.values())

    def enter(self, chunk: Chunk) -> None:
        """Enter a new reservation."""
        assert chunk.offset not in self._nameless, f"offset {chunk.offset} is taken"
        self._nameless[chunk.offset] = chunk
        if chunk.pin is Pin.HARD:
            self.hard_pinned_bytes += chunk.size_bytes

    def publish(self, chunk: Chunk, event: ChunkEvent) -> None:
        """Give a committed reservation its key."""
        assert chunk.key not in self._by_key, f"{chunk.key!r} is there already"
        chunk.step(event)
        del self._nameless[chunk.offset]
        self._by_key[chunk.key] = chunk
        if chunk.state is ChunkState.LIVE:
            self._published.add(chunk)
        if chunk.expires_s is not None:
            self._ends.add((chunk.expires_s, id(chunk), chunk))

    def go_live(self, chunk: Chunk, event: ChunkEvent) -> None:
        """Make an announced chunk LIVE: the master has decided, or nobody waits for it any more."""
        was_live = chunk.state is ChunkState.LIVE
        chunk.step(event)
        if not was_live:
            self._published.add(chunk)

    def place(self, chunk: Chunk, offset: int) -> None:
        """Move an unleased chunk's bytes to ``offset``; clients find it there with the next flush."""
        assert self._by_key.get(chunk.key) is chunk, f"{chunk!r} cannot move"
        assert chunk.num_leases == 0, f"{chunk!r} is leased"
        self._published.remove(chunk)
        chunk.offset = offset
        self._published.add(chunk)

    def condemn(self, chunk: Chunk) -> None:
        """Hide the chunk from look-ups."""
        if chunk.state is ChunkState.LIVE:
            self._published.remove(chunk)
        if self._by_key.get(chunk.key) is chunk:
            del self._by_key[chunk.key]
            self._nameless[chunk.offset] = chunk
            if chunk.expires_s is not None:
                self._ends.discard((chunk.expires_s, id(chunk), chunk))
        chunk.step(ChunkEvent.DROP)

    def forget(self, chunk: Chunk) -> None:
        """Forget a condemned chunk whose last lease ended."""
        assert chunk.num_leases == 0, f"{chunk.key!r} is leased"
        chunk.step(ChunkEvent.LAST_LEASE_ENDED)
        del self._nameless[chunk.offset]
        if chunk.pin is Pin.HARD:
            self.hard_pinned_bytes -= chunk.size_bytes

    def expired(self, now_s: float, max_num: int) -> list[Chunk]:
        """Return at most ``max_num`` of the expired chunks, each once."""
        due: list[Chunk] = []
        while self._ends and self._ends[0][0] <= now_s and len(due) < max_num:
            due.append(self._ends.pop(0)[2])
        return due

    def flush(self) -> None:
        """Publish new LIVE chunks to clients."""
        self._published.flush()

    def check(self) -> None:
        """Assert that the indexes match the chunks' states and counts."""
        self._by_key.check()
        for key, chunk in self._by_key.items():
            assert chunk.key == key
            assert chunk.state in _INDEXED, f"{chunk!r} is indexed"
        for offset, chunk in self._nameless.items():
            assert chunk.offset == offset
            assert chunk.state in (ChunkState.RESERVED, ChunkState.CONDEMNED), f"{chunk!r} has no name"
        assert len(self._ends) == sum(chunk.expires_s is not None for chunk in self._by_key.values())
        assert all(self._by_key.get(chunk.key) is chunk for _, _, chunk in self._ends)
        for chunk in self:
            assert chunk.state is not ChunkState.CONDEMNED or chunk.num_leases, f"{chunk!r} should be gone"
        hard = sum(c.size_bytes for c in self if c.pin is Pin.HARD)
        assert hard == self.hard_pinned_bytes
        self._published.check(self._by_key)

    def __repr__(self) -> str:
        return f"ChunkTable({len(self._by_key)} keys)"
