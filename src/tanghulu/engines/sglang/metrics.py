"""The metrics of SGLang's connector: those that SGLang shows for any store, and the outcomes of our calls."""

from __future__ import annotations

import threading
from collections import Counter as Counts
from collections import deque
from collections.abc import Mapping

from prometheus_client import Counter, Gauge

#: Transfers remembered until SGLang collects them.
_MAX_TRANSFERS = 1024
_RANK = ("tp_rank", "pp_rank")
_CALLS = Counter(
    "tanghulu_hicache_outcomes",
    "lookups, loads and saves of SGLang's pages that failed as a whole, and keys by what came of them",
    ("outcome", *_RANK),
)
_OPEN = Gauge(
    "tanghulu_hicache_store_open",
    "1 while the store is used, 0 while it is left alone because it did not answer",
    _RANK,
    multiprocess_mode="mostrecent",
)


class Rates:
    """The pages of the last transfers, and their rates in GB/s; the oldest are dropped if never collected."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._transfers: deque[tuple[int, float]] = deque(maxlen=_MAX_TRANSFERS)

    def add(self, num_pages: int, num_bytes: int, seconds: float) -> None:
        """Note a transfer; one that moved nothing has no rate."""
        if num_pages and seconds > 0:
            with self._lock:
                self._transfers.append((num_pages, num_bytes / seconds / 1e9))

    def take(self) -> tuple[list[int], list[float]]:
        """Return the pages and the rates since the last call."""
        with self._lock:
            taken, self._transfers = self._transfers, deque(maxlen=_MAX_TRANSFERS)
        return [num_pages for num_pages, _ in taken], [rate for _, rate in taken]


class StoreMetrics:
    """Exports one rank's counts to this process's Prometheus registry, which SGLang's /metrics includes."""

    def __init__(self, tp_rank: int, pp_rank: int) -> None:
        self._rank = (str(tp_rank), str(pp_rank))
        self._shown: Counts[str] = Counts()

    def show(self, counts: Mapping[str, int], is_open: bool) -> None:
        """Add the counts since the last call."""
        for outcome, total in list(counts.items()):
            _CALLS.labels(outcome, *self._rank).inc(total - self._shown[outcome])
            self._shown[outcome] = total
        _OPEN.labels(*self._rank).set(is_open)
