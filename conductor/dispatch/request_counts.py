"""Metrics of one request: waits for its tokens, moves, and its outcome."""

from __future__ import annotations

from tanghulu.conductor.dispatch.lifecycle import End, Flight
from tanghulu.conductor.metrics import ConductorMetrics
from tanghulu.conductor.stories.story import RequestStatus
from tanghulu.errors import InvalidRequest, Overloaded
from tanghulu.session.outputs import FinishReason

#: Label of a move before the first token.
NOTHING_TO_CONTINUE = "exact"


def status_of(end: End) -> RequestStatus:
    """Return the end of a request as its client sees it."""
    if end.error is None:
        return RequestStatus.ABORTED if end.reason is FinishReason.ABORTED else RequestStatus.SERVED
    return RequestStatus.REFUSED if isinstance(end.error, InvalidRequest | Overloaded) else RequestStatus.FAILED


class RequestCounts:
    """Counts of ``flight``, a request for ``model`` that arrived at ``arrived_s``."""

    def __init__(self, metrics: ConductorMetrics, flight: Flight, model: str, arrived_s: float) -> None:
        self._metrics = metrics
        self._flight = flight
        self._model = model
        self._arrived_s = arrived_s
        self._first_token_s = self._last_token_s = 0.0
        #: How exactly the text continues at the current worker.
        self.exactness = NOTHING_TO_CONTINUE
        self._lost_s: float | None = None  # time of its last move; None if tokens have come since

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token; 0 without one."""
        return self._first_token_s - self._arrived_s if self._first_token_s else 0.0

    @property
    def tbt_s(self) -> float:
        """Mean seconds between two tokens; 0 without two."""
        gaps = len(self._flight.generated) - 1
        return (self._last_token_s - self._first_token_s) / gaps if gaps > 0 else 0.0

    def tokens(self, num_tokens: int, now_s: float) -> bool:
        """Count tokens that came together; return whether they are the first."""
        is_first = not self._last_token_s
        if is_first:
            self._first_token_s = now_s
            self._metrics.ttft.observe(now_s - self._arrived_s)
        else:
            self._metrics.tbt.observe(now_s - self._last_token_s)
        self._last_token_s = now_s
        if self._lost_s is not None:
            self._metrics.pause.observe(now_s - self._lost_s)
            self._count_move("resumed")
            self._lost_s = None
        self._metrics.generated_tokens.inc(num_tokens)
        return is_first

    def lost(self, now_s: float) -> None:
        """Count the loss of its worker."""
        if self._lost_s is not None:
            self._count_move("lost_again")
        self._lost_s = now_s
        self._metrics.carried_tokens.inc(len(self._flight.generated))

    def ended(self, end: End, now_s: float) -> None:
        """Count its outcome. An aborted or refused request was not served, however quickly."""
        flight, metrics = self._flight, self._metrics
        outcome = end.error.code.lower() if end.error is not None else end.reason.value if end.reason else "unknown"
        metrics.requests.labels(outcome).inc()
        if flight.lost_at is not None:
            self._count_move("failed" if end.error is not None else "ended")
        if flight.num_submissions:
            metrics.prompt_tokens.inc(len(flight.request.prompt))
        elif isinstance(end.error, Overloaded):
            metrics.refused_tokens.inc(len(flight.request.prompt))
        if status_of(end) is RequestStatus.SERVED:
            metrics.e2e.observe(now_s - self._arrived_s)
        metrics.cached_tokens.inc(flight.cached_tokens or 0)

    def _count_move(self, outcome: str) -> None:
        """Count the pending move by its outcome."""
        kind = "ongoing_request" if self._flight.lost_at else "new_request"
        self._metrics.migrations.labels(self._model, kind, self.exactness, outcome).inc()
