"""The store comparison's figures for people: one table a size, and the targets with whether they hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tanghulu.types import parse_size

RESULTS = Path(__file__).parents[1] / "results"
OURS, OURS_TCP, PEER = "tanghulu shm", "tanghulu tcp", "mooncake"
Rows = Sequence[dict[str, Any]]


class Target(NamedTuple):
    """``who``'s median of ``op`` at ``size`` is at most ``factor`` times ``beside``'s."""

    who: str
    op: str
    size: int
    factor: float


def targets() -> list[Target]:
    """What we want to reach."""
    singles = ("put", "get", "put_from", "get_into")
    wanted = [Target(OURS, op, 4 << 10, 0.3 if op.startswith("get") else 0.5) for op in singles]
    wanted += [Target(OURS, op, 64 << 10, 0.5) for op in singles]
    for size, by_shm in ((1 << 20, 1 / 2), (16 << 20, 1 / 3)):
        wanted += [Target(OURS, op, size, by_shm) for op in singles]
        wanted += [Target(OURS_TCP, op, size, 1 / 1.3) for op in singles]
    return [*wanted, Target(OURS, "exists_many", 4 << 10, 1.0)]


def label(size: int) -> str:
    """``4KiB``."""
    return f"{size >> 20}MiB" if size >= 1 << 20 else f"{size >> 10}KiB"


def parse_sizes(text: str) -> list[int]:
    """``4KiB,1MiB``."""
    return [parse_size(each) for each in text.split(",")]


def show(rows: Rows, load: Sequence[float]) -> None:
    """All figures of one piece."""
    print(f"load average {load}")
    print(f"{'op':14} {'who':14} {'p50 us':>10} {'least':>10} {'GB/s':>6} {'beside peer':>11} {'cpu us: client':>14} "
          f"{'servers':>9}")  # fmt: skip
    order = {op: number for number, op in enumerate(dict.fromkeys(row["op"] for row in rows))}
    for row in sorted(rows, key=lambda row: order[row["op"]]):
        peer = find(rows, PEER, row["op"])
        ratio = f"{row['p50_us'] / peer['p50_us']:.2f}" if peer else ""
        counts = row["who"] == "echo" or row["op"].startswith("exists")
        moved = 0 if counts else row["size_bytes"] * row["batch"]
        speed = f"{moved / row['p50_us'] / 1e3:.2f}" if moved else ""
        cpu = [f"{row[key]:.0f}" if key in row else "" for key in ("client_cpu_us", "server_cpu_us")]
        times = f"{row['p50_us']:10.1f} {row['least_p50_us']:10.1f}"
        print(f"{row['op']:14} {row['who']:14} {times} {speed:>6} {ratio:>11} {cpu[0]:>14} {cpu[1]:>9}")


def find(rows: Rows, who: str, op: str) -> dict[str, Any] | None:
    """The row of ``who`` and ``op``."""
    return next((row for row in rows if row["who"] == who and row["op"] == op), None)


def summary() -> None:
    """Every target beside what is kept; a line that cannot be judged says what is missing."""
    kept = {path.stem.partition("-")[2]: json.loads(path.read_text()) for path in RESULTS.glob("store_compare-*.json")}
    print(f"\n{'target':44} {'ours us':>10} {'Mooncake us':>11} {'ratio':>6} {'wanted':>7}")
    for target in targets():
        piece = "exists" if target.op.startswith("exists") else label(target.size)
        print(judge(target, kept[piece]["rows"] if piece in kept else []))
    started = kept.get("start", {"rows": []})["rows"]
    for row in started:
        outcome = ("holds" if row["p50_us"] <= 1e6 else "MISSES") if row["who"] == "tanghulu" else ""
        print(f"start-up of {row['who']:32} {row['p50_us'] / 1e6:10.2f} s {'':>17} {'1.00 s':>7} {outcome}")


def judge(target: Target, rows: Rows) -> str:
    """One line: the figures, their ratio, and whether it is what we want."""
    ours, peer = find(rows, target.who, target.op), find(rows, PEER, target.op)
    name = f"{target.who} {target.op} {label(target.size)}"
    if ours is None or peer is None:
        return f"{name:44} not measured: {target.who if ours is None else PEER} is missing"
    ratio = ours["p50_us"] / peer["p50_us"]
    line = f"{name:44} {ours['p50_us']:10.1f} {peer['p50_us']:11.1f} {ratio:6.2f} {target.factor:7.2f}"
    if ratio <= target.factor:
        return f"{line} holds"
    stream = find(rows, "stream" if target.op.startswith("get") else "stream_up", "limit")
    if target.who == OURS_TCP and stream is not None:
        share = stream["p50_us"] / ours["p50_us"]
        outcome = "holds" if share >= 0.9 else "MISSES"
        return f"{line} {outcome} ({share:.0%} of a plain stream, 90% would do)"
    return f"{line} MISSES"
