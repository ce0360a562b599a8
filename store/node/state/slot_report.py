"""A report of all chunks of a node, cut into pieces slot by slot of keys: pure.

A report begins with a list of the node's chunks, which is sorted into slots in small steps, so that a node with
millions of chunks continues to serve. Then ``take`` returns piece after piece, in the order of the slots; chunks
dropped meanwhile are skipped, and later ones are reported as new chunks are. A piece whose message was lost is taken
again.

A report covers some ranges of slots; the others are skipped. Reports to several masters share the sorted list.

Example: slots 0 and 1 have 3 and 2 chunks. ``take(4)`` gives piece 0 with the three and one more, which completes
slot 0 (``next_slot`` 1); after ``done``, ``take(4)`` gives piece 1 with the last one and ``next_slot`` 1024.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tanghulu.store.node.state.holdings import Holding
from tanghulu.store.protocol.key_slots import ALL_RANGES, NUM_SLOTS, RANGE_SLOTS, slot_of


@dataclass(frozen=True, slots=True)
class SlotPiece:
    """Piece ``number`` of a report: with ``chunks`` all slots below ``next_slot`` have been reported."""

    number: int
    next_slot: int
    chunks: Sequence[Holding]


class SortedChunks:
    """The chunks of a node by slot, sorted in small steps."""

    def __init__(self, chunks: list[Holding]) -> None:
        self._unsorted = chunks
        self.by_slot: list[list[Holding]] = [[] for _ in range(NUM_SLOTS)]

    @property
    def is_sorted(self) -> bool:
        """Whether everything is in its slot."""
        return not self._unsorted

    def sort(self, num_chunks: int) -> None:
        """Sort the next ``num_chunks`` chunks into their slots."""
        part = self._unsorted[-num_chunks:]
        del self._unsorted[-num_chunks:]
        for chunk in part:
            self.by_slot[slot_of(chunk.key)].append(chunk)


class SlotReport:
    """See the module. ``is_reported`` selects the chunks that belong in the report now."""

    def __init__(
        self,
        report_id: int,
        chunks: SortedChunks,
        is_reported: Callable[[Holding], bool],
        ranges: frozenset[int] = ALL_RANGES,
    ) -> None:
        self.report_id = report_id
        self.ranges = ranges
        self.chunks = chunks
        self._is_reported = is_reported
        self._by_slot = chunks.by_slot
        self._number = 0
        self._slot = 0  # the next piece begins with this one
        self._offset = 0  # behind this many of its chunks
        self._in_flight: tuple[int, int] | None = None  # start of the piece behind the one in flight

    @property
    def is_over(self) -> bool:
        """Whether everything was reported and acknowledged."""
        return self._slot == NUM_SLOTS or not self.ranges

    def drop(self, numbers: Iterable[int]) -> None:
        """Skip these ranges from now on."""
        self.ranges = self.ranges.difference(numbers)

    def take(self, num_keys: int) -> SlotPiece:
        """Return the next piece, of ``num_keys`` chunks at most, or once more the one in flight."""
        assert self.chunks.is_sorted
        assert not self.is_over
        slot, offset = self._slot, self._offset
        chunks: list[Holding] = []
        while slot < NUM_SLOTS and len(chunks) < num_keys:
            if slot // RANGE_SLOTS not in self.ranges:
                slot, offset = (slot // RANGE_SLOTS + 1) * RANGE_SLOTS, 0
                continue
            part = self._by_slot[slot][offset : offset + num_keys - len(chunks)]
            chunks += filter(self._is_reported, part)
            offset += len(part)
            if offset >= len(self._by_slot[slot]):
                slot, offset = slot + 1, 0
        self._in_flight = (slot, offset)
        return SlotPiece(self._number, slot, chunks)

    def done(self) -> None:
        """Record that the piece in flight was acknowledged."""
        assert self._in_flight is not None
        for slot in range(self._slot, self._in_flight[0]):
            if slot // RANGE_SLOTS in self.ranges:
                self._by_slot[slot] = []
        self._slot, self._offset = self._in_flight
        self._in_flight = None
        self._number += 1

    def __repr__(self) -> str:
        return f"SlotReport({self.report_id:x}, slot {self._slot} of {NUM_SLOTS})"
