"""How the lanes of a step wait for each other where a sequence was cut in two: it attends to its own earlier half.

Rows of a step meet nowhere but in attention, and there the later rows of a sequence see the earlier ones and not the
other way round. So a lane waits, layer by layer, until the lane before has written its K and V, and for nothing else;
the first never waits. See `tanghulu.workers.compute.lanes`.
"""

from __future__ import annotations

import threading


class LaneGate:
    """Counts the layers of K and V that a lane has written; the next lane waits here."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_written = 0
        self._ended = False

    def open(self, layer: int) -> None:
        """Say that the layers up to and including ``layer`` are written."""
        with self._changed:
            self._num_written = layer + 1
            self._changed.notify()

    def end(self) -> None:
        """Say that the lane will write nothing more."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def wait(self, layer: int) -> None:
        """Wait until ``layer`` is written; raises RuntimeError if the lane before ended without writing it."""
        with self._changed:
            while self._num_written <= layer:
                if self._ended:
                    raise RuntimeError(f"the lane before ended with {self._num_written} layers of KV, not {layer + 1}")
                self._changed.wait()


class LaneTurn:
    """A lane's place among its neighbours: the gate it waits at and the one it opens, each if there is one."""

    def __init__(self, before: LaneGate | None, after: LaneGate | None) -> None:
        self._before, self._after = before, after

    def written(self, layer: int) -> None:
        """Say that the lane wrote K and V of ``layer``; returns when the lanes before have written theirs."""
        if self._before is not None:
            self._before.wait(layer)
        if self._after is not None:
            self._after.open(layer)

    def end(self) -> None:
        """Say that the lane is done or failed, so that the next one does not wait for it."""
        if self._after is not None:
            self._after.end()
