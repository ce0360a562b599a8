"""The memory that a node offers, and what lies where in it.

values, ``memory_bytes`` | the shared index, which clients read | heads and records of desks, which clients write
"""

from __future__ import annotations

import secrets

from tanghulu.store.node.state.published import Published
from tanghulu.store.node.writes.write_buffers import AREA_BYTES
from tanghulu.store.protocol.shared_index import IndexPlace, IndexWriter, index_bytes, num_buckets_for
from tanghulu.transfer_engine.core.segment import MemorySegment


class NodeMemory:
    """The segment, with an index in it. ``prefault`` touches all of it now."""

    def __init__(self, memory_bytes: int, now_s: float, *, prefault: bool) -> None:
        begin = -(-memory_bytes // 64) * 64
        self.index = IndexPlace(begin, num_buckets_for(memory_bytes), secrets.randbits(64))
        self.desks_begin = begin + index_bytes(self.index.num_buckets)
        self.segment = MemorySegment.create("store", self.desks_begin + AREA_BYTES, prefault=prefault)
        view = self.segment.view[begin : self.desks_begin]
        self.published = Published(IndexWriter(view, self.index.seed, now_s))
