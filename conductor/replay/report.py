"""The report of a replay: TTFT, TBT, goodput, hit ratio and balance, by requests and by tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from tanghulu.conductor.replay.model import Job


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Figures of one run over the counted requests. Times in seconds, shares of 1; NaN where no request is left.

    ``good``: TTFT and TBT (the mean of a request's longest tenth of gaps) within the SLOs. ``ttft_s`` and ``tbt_s`` are
    the sorted samples behind the percentiles, for plots.
    """

    trace: str
    policy: str
    num_requests: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tbt_mean_s: float
    tbt_worst_p90_s: float
    good_requests: float
    good_tokens: float
    hit_requests: float
    hit_tokens: float
    rejected_requests: float
    rejected_tokens: float
    failed_requests: float
    busy_mean: float
    busy_most: float
    fetched_blocks: int
    ttft_s: tuple[float, ...] = field(repr=False)
    tbt_s: tuple[float, ...] = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for --json, without their samples."""
        return {name: value for name, value in asdict(self).items() if name not in ("ttft_s", "tbt_s")}


def make_report(
    trace: str,
    policy: str,
    jobs: Sequence[Job],
    busy_s: Sequence[float],
    fetched_blocks: int,
    slo_s: tuple[float, float],
) -> ReplayReport:
    """Build the report over ``jobs``; ``slo_s`` are the bounds on TTFT and TBT, ``busy_s`` is empty if unknown."""
    counted = [job for job in jobs if job.request.counted]
    done = [job for job in counted if job.ttft_s is not None]
    ttft = sorted(job.ttft_s for job in done if job.ttft_s is not None)
    decoded = [job for job in done if job.num_decode_steps]
    good = [job for job in done if (job.ttft_s or 0.0) <= slo_s[0] and job.worst_tbt_s <= slo_s[1]]
    end_s = max((job.first_s for job in done), default=1.0) or 1.0
    tokens = sum(job.request.num_tokens for job in counted)
    return ReplayReport(
        trace=trace,
        policy=policy,
        num_requests=len(counted),
        ttft_mean_s=_mean(ttft),
        ttft_p50_s=_percentile(ttft, 0.5),
        ttft_p90_s=_percentile(ttft, 0.9),
        ttft_p99_s=_percentile(ttft, 0.99),
        tbt_mean_s=_mean([job.tbt_s for job in decoded]),
        tbt_worst_p90_s=_percentile(sorted(job.worst_tbt_s for job in decoded), 0.9),
        good_requests=_share(len(good), len(counted)),
        good_tokens=_share(sum(job.request.num_tokens for job in good), tokens),
        hit_requests=_mean([job.hit_tokens / job.request.num_tokens for job in done]),
        hit_tokens=_share(sum(job.hit_tokens for job in done), sum(job.request.num_tokens for job in done)),
        rejected_requests=_share(sum(job.rejected for job in counted), len(counted)),
        rejected_tokens=_share(sum(job.request.num_tokens for job in counted if job.rejected), tokens),
        failed_requests=_share(sum(job.failed for job in counted), len(counted)),
        busy_mean=_mean(busy_s) / end_s,
        busy_most=max(busy_s, default=float("nan")) / end_s,
        fetched_blocks=fetched_blocks,
        ttft_s=tuple(ttft),
        tbt_s=tuple(sorted(job.tbt_s for job in decoded)),
    )


def deviation(live: ReplayReport, simulated: ReplayReport) -> str:
    """Return in words how far ``live`` figures are from those of the same trace in virtual time."""
    return (
        f"mean TTFT {live.ttft_mean_s / simulated.ttft_mean_s - 1:+.1%} from the simulated one, hits "
        f"{100 * (live.hit_tokens - simulated.hit_tokens):+.1f} points, requests within the SLOs "
        f"{100 * (live.good_requests - simulated.good_requests):+.1f} points"
    )


def table(reports: Sequence[ReplayReport]) -> Table:
    """Return the reports of one trace for people, one row each."""
    caption = "times in s; good (within the SLOs), hit, rejected and failed in % of requests / of tokens"
    found = Table(title=f"{reports[0].trace}, {reports[0].num_requests} requests", caption=caption, box=SIMPLE)
    found.add_column("policy", no_wrap=True)
    for heading in ("TTFT", "P50", "P90", "P99", "TBT", "good", "hit", "rejected", "failed", "busy"):
        found.add_column(heading, justify="right", no_wrap=True)
    for r in reports:
        times = (r.ttft_mean_s, r.ttft_p50_s, r.ttft_p90_s, r.ttft_p99_s)
        found.add_row(
            r.policy,
            *(f"{time:.3f}" for time in times),
            f"{r.tbt_mean_s:.4f}",
            _percents(r.good_requests, r.good_tokens),
            _percents(r.hit_requests, r.hit_tokens),
            _percents(r.rejected_requests, r.rejected_tokens),
            _percents(r.failed_requests),
            _percents(r.busy_mean),
        )
    return found


def _percents(*shares: float) -> str:
    return " / ".join("-" if math.isnan(share) else f"{100 * share:.1f}" for share in shares)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _share(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
