"""A device in main memory whose copies are as late as copies may be: they happen when somebody waits for them."""

from __future__ import annotations

import threading

import torch

from tanghulu.transfer_engine.gpu.staging import DeviceCopier


class LateCopier(DeviceCopier):
    """Copies when it is waited for, and not before. Threads that wait at once all return behind the copies."""

    def __init__(self) -> None:
        self._queued: tuple[list[tuple[torch.Tensor, torch.Tensor]], ...] = ([], [])
        self._copying = threading.Lock()

    def copy(self, half: int, to: torch.Tensor, source: torch.Tensor) -> None:
        self._queued[half].append((to, source))

    def wait(self, half: int) -> None:
        with self._copying:
            while self._queued[half]:
                to, source = self._queued[half].pop(0)
                to.copy_(source)

    @property
    def num_under_way(self) -> int:
        return sum(map(len, self._queued))
