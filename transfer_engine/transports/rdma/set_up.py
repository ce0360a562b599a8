"""Connecting a queue pair in a thread of its own, because the kernel may look for the peer's address for a second.

Owns the pair's end where nobody wants it any more before it is connected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from tanghulu.errors import TanghuluError
from tanghulu.transfer_engine.transports.rdma.devices import LocalDevices
from tanghulu.transfer_engine.transports.rdma.verbs import QueuePair
from tanghulu.transfer_engine.transports.rdma.wire import QueuePairAddress


class SetUp:
    """Begins at once. ``wake`` is called when it is done, unless it was abandoned before."""

    def __init__(
        self, pair: QueuePair, peer: QueuePairAddress, devices: LocalDevices, wake: Callable[[], None]
    ) -> None:
        self.done = False
        #: Why it failed; only when it is done.
        self.error: TanghuluError | None = None
        self._pair, self._peer, self._devices, self._wake = pair, peer, devices, wake
        self._lock = threading.Lock()
        self._abandoned = False
        devices.use()
        threading.Thread(target=self._run, name="tanghulu-rdma-set-up", daemon=True).start()

    def abandon(self) -> None:
        """Close the pair: now if its thread has ended, else when it ends. Nothing was ever posted on it."""
        with self._lock:
            self._abandoned = True
            if self.done:
                self._pair.close()

    def _run(self) -> None:
        try:
            self._pair.connect(self._peer)
        except TanghuluError as error:
            self.error = error
        with self._lock:
            self.done = True
            if self._abandoned:
                self._pair.close()
            else:
                self._wake()
        self._devices.let_go()
