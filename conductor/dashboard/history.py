"""The figures of the last minutes, sampled once a second: rates, ratios and quantiles between two samples. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tanghulu.store.dashboard.history import SampleLog, ratio


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters since the conductor's start. Buckets are cumulative, as Prometheus' are."""

    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    generated_tokens: float = 0.0
    ended: float = 0.0
    moved: float = 0.0
    in_flight: float = 0.0
    queued: float = 0.0
    ttft: tuple[float, ...] = ()
    tbt: tuple[float, ...] = ()


def quantile(share: float, bounds: Sequence[float], counts: Sequence[float]) -> float | None:
    """The value below which ``share`` of the observations lie, as histogram_quantile of Prometheus; None without any.

    ``counts[i]`` observations were at most ``bounds[i]``; the last bound is infinite. Of (1, 2, inf) and counts
    (5, 10, 10) the quantile .75 is 1.5: half way through the ten's second half.
    """
    if not counts or counts[-1] <= 0:
        return None
    rank = share * counts[-1]
    at = next(i for i, count in enumerate(counts) if count >= rank)
    below, least = (counts[at - 1], bounds[at - 1]) if at else (0.0, 0.0)
    if at == len(bounds) - 1:
        return least
    return least + (bounds[at] - least) * (rank - below) / max(counts[at] - below, 1e-9)


class History:
    """Samples of the last minutes. ``ttft_bounds`` and ``tbt_bounds`` are the buckets' upper ends."""

    def __init__(self, ttft_bounds: Sequence[float], tbt_bounds: Sequence[float]) -> None:
        self._ttft_bounds, self._tbt_bounds = tuple(ttft_bounds), tuple(tbt_bounds)
        self._log: SampleLog[Totals] = SampleLog()

    def __len__(self) -> int:
        return len(self._log)

    def append(self, now_s: float, totals: Totals) -> None:
        """Take a sample."""
        self._log.append(now_s, totals)

    def now(self) -> dict[str, Any]:
        """The figures of the last minute, and the hit ratio since the start."""
        window = self._log.window()
        if window is None:
            return {}
        seconds, first, last = window
        return self._between(first, last) | {
            "in_flight": last.in_flight,
            "queued": last.queued,
            "requests_per_s": (last.ended - first.ended) / seconds,
            "tokens_per_s": (last.generated_tokens - first.generated_tokens) / seconds,
            "hit_ratio_total": ratio(last.cached_tokens, last.prompt_tokens),
            "moved_total": last.moved,
            "ended_total": last.ended,
        }

    def points(self, num_points: int) -> list[dict[str, Any]]:
        """At most ``num_points`` points over what is kept, each of the time since the one before it."""
        return [
            {"at_s": at_s, "in_flight": totals.in_flight, "queued": totals.queued} | self._between(before, totals)
            for at_s, _, before, totals in self._log.pairs(num_points)
        ]

    def _between(self, first: Totals, last: Totals) -> dict[str, Any]:
        ttft, tbt = _growth(first.ttft, last.ttft), _growth(first.tbt, last.tbt)
        return {
            "ttft_p50_s": quantile(0.5, self._ttft_bounds, ttft),
            "ttft_p95_s": quantile(0.95, self._ttft_bounds, ttft),
            "tbt_p50_s": quantile(0.5, self._tbt_bounds, tbt),
            "tbt_p95_s": quantile(0.95, self._tbt_bounds, tbt),
            "hit_ratio": ratio(last.cached_tokens - first.cached_tokens, last.prompt_tokens - first.prompt_tokens),
        }


def _growth(first: tuple[float, ...], last: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(b - a for a, b in zip(first, last, strict=True)) if first else last
