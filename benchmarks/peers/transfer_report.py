"""The transfer comparison's figures for people: a table a size, and the targets with whether they hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .store_report import label

RESULTS = Path(__file__).parents[1] / "results"
SMALL, SIZES = 64 << 10, (64 << 10, 1 << 20, 16 << 20)
SHM, TCP, PEER = "tanghulu shm", "tanghulu tcp", "Mooncake tcp"
#: A fall of throughput below this share of one caller's counts as one.
STEADY = 0.95
Rows = Sequence[dict[str, Any]]


def show(rows: Rows, load: Sequence[float]) -> None:
    """All figures of one size."""
    print(f"load average {load}")
    print(
        f"{'op':6}{'callers':>7}  {'who':16} {'p50 us':>10} {'GB/s':>7} {'best':>7} {'mover cpu s/GB':>14} {'owner':>7}"
    )
    for row in sorted(rows, key=lambda row: (row["op"], row["callers"])):
        cpu = f"{row['mover_cpu_s_per_gb']:14.3f} {row['owner_cpu_s_per_gb']:7.3f}"
        speed = f"{row['p50_us']:10.1f} {row['gb_s']:7.2f} {row['best_gb_s']:7.2f}"
        print(f"{row['op']:6}{row['callers']:>7}  {row['who']:16} {speed} {cpu}")


def summary() -> None:
    """Every target beside what is kept."""
    kept: dict[int, Rows] = {}
    for path in RESULTS.glob("transfer-*.json"):
        rows = json.loads(path.read_text())["rows"]
        kept[rows[0]["size_bytes"]] = rows
    print()
    for size in SIZES:
        for op in ("READ", "WRITE"):
            for line in judge(kept.get(size, ()), size, op):
                print(line)


def judge(rows: Rows, size: int, op: str) -> list[str]:
    """The targets of one size and direction."""
    what = f"{op:5} {label(size):>6}"
    if not rows:
        return [f"{what}: not measured"]
    shm, tcp, peer = (_find(rows, who, op) for who in (SHM, TCP, PEER))
    limit, stream = _find(rows, "memmove", op), _find(rows, "one stream", op)
    lines = []
    if size == SMALL and shm:
        lines.append(_line(f"{what} shm: {shm['p50_us']:.1f} us a transfer", "under 25 us", shm["p50_us"] < 25))
    elif shm and limit:
        share = limit["p50_us"] / shm["p50_us"]
        lines.append(_line(f"{what} shm: {share:.0%} of memmove", "85 %", share >= 0.85))
    if tcp and stream:
        share = stream["p50_us"] / tcp["p50_us"]
        if size > SMALL:
            lines.append(_line(f"{what} tcp: {share:.0%} of one plain stream", "90 %", share >= 0.9))
        if peer:
            times = peer["p50_us"] / tcp["p50_us"]
            text = f"{what} tcp: {times:.2f} times Mooncake, {share:.0%} of a stream"
            lines.append(_line(text, "1.5 or 90 %", times >= 1.5 or share >= 0.9))
    lines += [_steady(rows, who, op, what) for who in (SHM, TCP)]
    return lines


def _steady(rows: Rows, who: str, op: str, what: str) -> str:
    speeds = {row["callers"]: row["gb_s"] for row in rows if row["who"] == who and row["op"] == op}
    if len(speeds) < 2:
        return f"{what} {who}: not measured with several callers"
    shown = ", ".join(f"{callers}: {speed:.2f}" for callers, speed in sorted(speeds.items()))
    holds = min(speeds.values()) >= STEADY * speeds[min(speeds)]
    return _line(f"{what} {who}: GB/s by callers {shown}", "no fall", holds)


def _find(rows: Rows, who: str, op: str) -> dict[str, Any] | None:
    return next((row for row in rows if (row["who"], row["op"], row["callers"]) == (who, op, 1)), None)


def _line(text: str, wanted: str, holds: bool) -> str:
    return f"{text:84} wanted {wanted:12} {'holds' if holds else 'MISSES'}"
