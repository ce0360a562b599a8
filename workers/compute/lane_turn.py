"""The one thing in which lanes of a step depend on each other: a sequence cut in two attends to its own earlier half.

Rows of a step meet nowhere but in attention, and there the later rows of a sequence see the earlier ones and not the
other way round. So a lane waits, layer by layer, until the lane before has written its K and V, and for nothing else;
the first never waits. See `tanghulu.workers.compute.lanes`.
"""

from __future__ import annotations

import threading


class LaneGate:
    """How many layers of K and V the lane before has written, and, by its own waiting, all lanes before that."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_written = 0
        self._ended = False

    def open(self, layer: int) -> None:
        """Layers up to and with ``layer`` are written."""
        with self._changed:
            self._num_written = layer + 1
            self._changed.notify()

    def end(self) -> None:
        """Nothing more will be written."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def wait(self, layer: int) -> None:
        """Until ``layer`` is written; raises RuntimeError if the lane before ended without."""
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
        """The lane's K and V of ``layer`` are in the cache; returns when those that it may attend to are, too."""
        if self._before is not None:
            self._before.wait(layer)
        if self._after is not None:
            self._after.open(layer)

    def end(self) -> None:
        """The lane is done, or failed: whoever waits for it need not any more."""
        if self._after is not None:
            self._after.end()
