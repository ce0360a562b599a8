"""Ends transfers from a worker whose host has fallen silent: nobody else would look before their deadline."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from tanghulu.errors import NodeUnavailable
from tanghulu.rpc.fast_client import FastConnection

#: How often the connections are looked at, under which something is being read.
LOOK_S = 0.5


class SilenceWatch:
    """Looks at connections from a thread of its own, as long as there are any. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[object, tuple[FastConnection, Callable[[], None], list[NodeUnavailable]]] = {}
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    @contextlib.contextmanager
    def over(self, connection: FastConnection, cancel: Callable[[], None]) -> Iterator[list[NodeUnavailable]]:
        """Call ``cancel``, from another thread, if ``connection`` is lost inside the block; gives a list for why."""
        key, reasons = object(), list[NodeUnavailable]()
        with self._lock:
            self._watched[key] = connection, cancel, reasons
            if self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(target=self._run, name="peer silence", daemon=True)
                self._thread.start()
        try:
            yield reasons
        finally:
            with self._lock:
                del self._watched[key]

    def close(self) -> None:
        """Look no more."""
        self._ended.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            with self._lock:
                watched = list(self._watched.values())
                if not watched:
                    self._thread = None
                    return
            for connection, cancel, reasons in watched:
                reason = connection.failure()
                if reason is not None:
                    reasons.append(reason)
                    cancel()
