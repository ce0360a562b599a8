"""Slices of one batch under way on one path: window, progress, measured rate. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from tanghulu.transfer_engine.core.config import TransportLimits
from tanghulu.transfer_engine.core.paths import Path, PathTable
from tanghulu.transfer_engine.core.slices import Slice

#: Least bytes, and least time, over which a path's rate is measured.
MEASURED_BYTES = 1 << 20
MEASURED_S = 0.005


@dataclass(slots=True)
class PathLoad:
    """The slices of a batch now on ``path``, by number."""

    path: Path
    table: PathTable
    limits: TransportLimits
    slices: dict[int, Slice] = field(default_factory=dict)
    num_bytes: int = 0
    progress_s: float = 0.0
    busy_from_s: float = 0.0
    busy_bytes: int = 0

    @property
    def full(self) -> bool:
        """Whether the window takes no more slices."""
        return self.num_bytes >= self.limits.window_bytes or len(self.slices) >= self.limits.window_slices

    def add(self, piece: Slice, now_s: float) -> None:
        """Count a slice posted on the path."""
        if not self.slices:
            self.progress_s = self.busy_from_s = now_s
            self.busy_bytes = 0
        self.slices[piece.slice_id] = piece
        self.num_bytes += piece.length
        self.table.begun(self.path, piece.length)

    def remove(self, piece: Slice, now_s: float) -> None:
        """Count a slice that has ended there, with any outcome."""
        del self.slices[piece.slice_id]
        self.num_bytes -= piece.length
        self.progress_s = now_s
        self.table.ended(self.path, piece.length)

    def measure(self, num_bytes: int, now_s: float) -> None:
        """Count an arrival, and report the rate to the table when enough was counted."""
        self.busy_bytes += num_bytes
        took_s = now_s - self.busy_from_s
        if self.busy_bytes >= MEASURED_BYTES and took_s >= MEASURED_S:
            self.table.measured(self.path, self.busy_bytes / took_s, now_s)
            self.busy_from_s, self.busy_bytes = now_s, 0

    def check(self) -> None:
        """Assert the invariants: the window is kept, except by the last slice."""
        assert self.num_bytes == sum(piece.length for piece in self.slices.values())
        assert len(self.slices) <= self.limits.window_slices
        longest = max((piece.length for piece in self.slices.values()), default=0)
        assert self.num_bytes < self.limits.window_bytes + longest
