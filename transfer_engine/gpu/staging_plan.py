"""Schedule of a GPU's memory through the halves of the staging ring: pure decisions.

The ring has two halves, so that the device copies into or out of one while the other is being moved. Requests are cut
into rounds of at most half a ring; round n uses half n % 2. A half goes through these states in a round:

    FREE -- fill --> FILLING -- move --> MOVING -- drain --> DRAINING -- free --> FREE

``steps`` yields the steps in order. Example, three rounds a, b, c in halves 0, 1, 0:

    free 0, fill 0 (a) | free 1, fill 1 (b), move 0, drain 0 | free 0, fill 0 (c), move 1, drain 1 | move 0, drain 0
    | free 0, free 1

If nothing is to be filled (READs only), a round moves as soon as its half is free, so that the drain of the previous
round runs meanwhile:

    free 0, fill 0, move 0, drain 0 (a) | free 1, fill 1, move 1, drain 1 (b) | free 0, fill 0, move 0, drain 0 (c)
    | free 1, free 0

*fill* starts the device's copies of a round's WRITEs into the half, *move* waits for them and then moves the round's
bytes between the half and the segment, *drain* starts the device's copies of its READs out of the half, *free* waits
for those. So while round a is moved, the copies of b run, or those of the round before a.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple


class Piece(NamedTuple):
    """Some bytes of one request, and their temporary place in the ring."""

    request_index: int
    offset: int
    ring_offset: int
    length: int


class StagingEvent(Enum):
    """Operation on a half."""

    FILL = "fill"
    MOVE = "move"
    DRAIN = "drain"
    FREE = "free"


class HalfState(Enum):
    """Content of a half."""

    #: Nothing of use.
    FREE = "free"
    #: The device copies into it.
    FILLING = "filling"
    #: Its bytes go to, or come from, the segment.
    MOVING = "moving"
    #: The device copies out of it.
    DRAINING = "draining"


TRANSITIONS: dict[tuple[HalfState, StagingEvent], HalfState] = {
    (HalfState.FREE, StagingEvent.FREE): HalfState.FREE,
    (HalfState.FREE, StagingEvent.FILL): HalfState.FILLING,
    (HalfState.FILLING, StagingEvent.MOVE): HalfState.MOVING,
    (HalfState.MOVING, StagingEvent.DRAIN): HalfState.DRAINING,
    (HalfState.DRAINING, StagingEvent.FREE): HalfState.FREE,
}


class StagingStep(NamedTuple):
    """Instruction: do ``event`` with the half, for the pieces of its round."""

    event: StagingEvent
    half: int
    pieces: tuple[Piece, ...]


class StagingPlan:
    """The rounds of one batch of requests with these lengths through a ring of two halves.

    ``fills``: some bytes are to be copied into the ring before they are moved.
    """

    def __init__(self, lengths: Sequence[int], half_bytes: int, *, fills: bool = True) -> None:
        assert half_bytes > 0, "a half holds something"
        assert all(length > 0 for length in lengths), "a request has at least one byte"
        self._half_bytes = half_bytes
        self._fills = fills
        self.rounds = [tuple(each) for each in _rounds(lengths, half_bytes)]
        self._states = [HalfState.FREE, HalfState.FREE]

    def steps(self) -> Iterator[StagingStep]:
        """Yield the steps in order; each must have been done before the next is taken."""
        for number, pieces in enumerate(self.rounds):
            yield self._step(StagingEvent.FREE, number)
            yield self._step(StagingEvent.FILL, number, pieces)
            if not self._fills:
                yield from self._move(number)
            elif number:
                yield from self._move(number - 1)
        if self._fills and self.rounds:
            yield from self._move(len(self.rounds) - 1)
        for number in range(min(2, len(self.rounds))):
            yield self._step(StagingEvent.FREE, len(self.rounds) - min(2, len(self.rounds)) + number)

    def check(self) -> None:
        """Assert the invariants: a round's pieces lie in its half, side by side."""
        for number, pieces in enumerate(self.rounds):
            position = number % 2 * self._half_bytes
            for piece in pieces:
                assert piece.ring_offset == position
                position += piece.length
            assert position <= (number % 2 + 1) * self._half_bytes
            indices = [piece.request_index for piece in pieces]
            assert len(set(indices)) == len(indices), "one piece of a request in a round"

    def _move(self, number: int) -> Iterator[StagingStep]:
        yield self._step(StagingEvent.MOVE, number, self.rounds[number])
        yield self._step(StagingEvent.DRAIN, number, self.rounds[number])

    def _step(self, event: StagingEvent, number: int, pieces: tuple[Piece, ...] = ()) -> StagingStep:
        half = number % 2
        following = TRANSITIONS.get((self._states[half], event))
        assert following is not None, f"half {half} cannot take {event.value} in {self._states[half].value}"
        self._states[half] = following
        return StagingStep(event, half, pieces)


def _rounds(lengths: Sequence[int], half_bytes: int) -> Iterator[list[Piece]]:
    """Fill one half after the other: with 100 bytes a half, 150 and 80 give (100) (50, 50) (30)."""
    pieces: list[Piece] = []
    number = used = 0
    for index, length in enumerate(lengths):
        offset = 0
        while offset < length:
            if used == half_bytes:
                yield pieces
                pieces, used, number = [], 0, number + 1
            size = min(length - offset, half_bytes - used)
            pieces.append(Piece(index, offset, number % 2 * half_bytes + used, size))
            offset, used = offset + size, used + size
    if pieces:
        yield pieces
