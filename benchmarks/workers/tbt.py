"""Time between tokens of running decodes while a long prefill is in flight: on one worker, and beside one.

One worker: the prefill shares the decodes' steps, cut into chunks so that no step has more than
--max-num-batched-tokens tokens; a decode waits for the step, so the bound is the time of a step so large.
Two workers: the prefill runs in another process, each pinned to a core of its own. The plot has a panel for each.
SmolLM2 in bfloat16, one thread an engine, no HTTP and no routing in between.

    python -m benchmarks.workers.tbt
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.common.report import RESULTS, ROOT, keep

DECODES = 4
CONTEXT = 128
LIMIT_S = 120.0
NEIGHBOUR_BUDGET = 512


def engine(budget: int) -> Any:
    """A tanghulu engine on one thread."""
    os.environ["MAX_NUM_BATCHED_TOKENS"] = str(budget)
    from benchmarks.workers.engine_subject import Tanghulu

    return Tanghulu("smollm2", "bfloat16", 1)


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(100, 49152) for _ in range(length)]


def decode_steps(core: Any, goes_on: Callable[[float], bool]) -> list[tuple[float, float]]:
    """Step while ``goes_on`` of the seconds so far: (when, gap) of every step in which the decodes got a token."""
    start = last = time.perf_counter()
    gaps = []
    while goes_on(time.perf_counter() - start):
        result = core.step()
        now = time.perf_counter()
        if sum(len(output.tokens) for output in result.outputs) >= DECODES:
            gaps.append((now - start, now - last))
            last = now
    return gaps


def decoder(budget: int, prefill_tokens: int, seconds: float, folder: Path) -> dict[str, Any]:
    """Decode quietly, then while a prefill is in flight: here (``prefill_tokens`` > 0), or next door."""
    subject, rng = engine(budget), random.Random(1)
    core = subject._core
    for _ in range(DECODES):
        subject._add(prompt(rng, CONTEXT), 100_000)
    while core.scheduler.pending[0] > DECODES:
        core.step()
    decode_steps(core, lambda at: at < 1.0)
    quiet = decode_steps(core, lambda at: at < seconds)
    if prefill_tokens:
        for _ in range(2):  # SmolLM2's context is 2,048: two prompts of half the length
            subject._add(prompt(rng, prefill_tokens // 2), 1)
    else:
        (folder / "start").touch()
        while not (folder / "begun").exists():
            core.step()

    def in_flight(_: float) -> bool:
        if prefill_tokens:
            return bool(core.scheduler.num_running + core.scheduler.num_waiting > DECODES)
        return not (folder / "done").exists()

    return {"quiet": quiet, "busy": decode_steps(core, in_flight)}


def prefiller(tokens: int, folder: Path) -> None:
    """Wait for the file ``start``, prefill ``tokens`` between the files ``begun`` and ``done``."""
    subject, rng = engine(NEIGHBOUR_BUDGET), random.Random(2)
    subject.generate([prompt(rng, NEIGHBOUR_BUDGET)], 1)
    (folder / "loaded").touch()
    until = time.monotonic() + LIMIT_S
    while not (folder / "start").exists() and time.monotonic() < until:
        time.sleep(0.01)
    (folder / "begun").touch()
    for _ in range(2):
        subject.generate([prompt(rng, tokens // 2)], 1)
    (folder / "done").touch()


def child(core: int, *words: str) -> subprocess.Popen[str]:
    command = ["taskset", "-c", str(core), sys.executable, "-m", "benchmarks.workers.tbt", "--part", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def finished(process: subprocess.Popen[str]) -> str:
    """What the child printed; ends the benchmark with its last words if it failed or took too long."""
    try:
        out, words = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise SystemExit(f"{process.args!r} took more than {LIMIT_S} s") from None
    if process.returncode:
        raise SystemExit(f"{process.args!r} failed: {words[-2000:]}")
    return out


def measured(process: subprocess.Popen[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(finished(process).splitlines()[-1])
    return found


def two_workers(tokens: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        neighbour = child(1, "prefill", str(NEIGHBOUR_BUDGET), str(tokens), str(seconds), folder)
        while not (Path(folder) / "loaded").exists() and neighbour.poll() is None:
            time.sleep(0.05)
        found = measured(child(0, "decode", str(NEIGHBOUR_BUDGET), "0", str(seconds), folder))
        finished(neighbour)
        return found


def summary(case: str, budget: int, found: dict[str, Any]) -> dict[str, Any]:
    quiet, busy = ([gap for _, gap in found[kind]] for kind in ("quiet", "busy"))
    return {
        "case": case,
        "max_num_batched_tokens": budget,
        "quiet_median_s": statistics.median(quiet),
        "busy_median_s": statistics.median(busy),
        "busy_worst_s": max(busy),
        "num_busy_steps": len(busy),
        "ratio_of_medians": statistics.median(busy) / statistics.median(quiet),
        "load_average": os.getloadavg()[0],
        "gaps": {kind: [(round(at, 4), round(gap, 5)) for at, gap in found[kind]] for kind in ("quiet", "busy")},
    }


def panel(row: dict[str, Any], left: int, width: int, height: int, top_s: float) -> list[str]:
    """One case as SVG: time in seconds to the right, each token's gap upwards (milliseconds, logarithmic)."""
    quiet, busy = row["gaps"]["quiet"], row["gaps"]["busy"]
    begin, end = quiet[0][0] - quiet[-1][0], max(busy[-1][0], 0.1)
    lowest = 0.005
    parts = [f'<text x="{left}" y="14">{row["case"]}: {row["ratio_of_medians"]:.2f} x</text>']
    parts.append(f'<rect x="{left}" y="20" width="{width}" height="{height}" fill="none" stroke="#999"/>')

    def x(at: float) -> float:
        return left + width * (at - begin) / (end - begin)

    def y(gap: float) -> float:
        return 20 + height * (1 - math.log(max(gap, lowest) / lowest) / math.log(top_s / lowest))

    for gap_ms in (10, 30, 100, 300, 1000, 3000):
        if gap_ms / 1e3 < top_s:
            level = y(gap_ms / 1e3)
            parts.append(f'<path d="M{left} {level:.1f}h{width}" stroke="#ddd"/>')
            parts.append(f'<text x="{left + 2}" y="{level - 2:.1f}" fill="#666">{gap_ms} ms</text>')
    for points, shift, colour in ((quiet, -quiet[-1][0], "#2a7"), (busy, 0.0, "#c33")):
        parts += [f'<circle cx="{x(at + shift):.1f}" cy="{y(gap):.1f}" r="1.5" fill="{colour}"/>' for at, gap in points]
    parts.append(f'<text x="{x(0):.1f}" y="{height + 34}" fill="#c33">prefill</text>')
    return parts


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """All cases side by side; green is quiet, red while the prefill is in flight."""
    width, height = 230, 220
    top_s = 1.3 * max(row["busy_worst_s"] for row in rows)
    parts = [part for i, row in enumerate(rows) for part in panel(row, 10 + i * (width + 15), width, height, top_s)]
    size = f'width="{10 + len(rows) * (width + 15)}" height="{height + 45}"'
    style = 'font-family="sans-serif" font-size="11"'
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(parts) + "\n</svg>\n")


@click.command()
@click.option("--part", nargs=5, default=None, help="used by the benchmark itself")
@click.option("--tokens", default=4000, show_default=True)
@click.option("--budgets", default="64,256,512,1024", show_default=True)
@click.option("--seconds", default=5.0, show_default=True, help="of quiet decoding before the prefill")
@click.option("--name", default="tbt", show_default=True, help="the files in results/")
def main(part: tuple[str, ...] | None, tokens: int, budgets: str, seconds: float, name: str) -> None:
    """Measure, keep results/NAME.json and results/NAME.svg."""
    if part is not None:
        kind, budget, prefill_tokens, quiet_s, folder = part
        if kind == "prefill":
            prefiller(int(prefill_tokens), Path(folder))
        else:
            print(json.dumps(decoder(int(budget), int(prefill_tokens), float(quiet_s), Path(folder))))
        return
    rows = [summary("two workers", NEIGHBOUR_BUDGET, two_workers(tokens, seconds))]
    for budget in budgets.split(","):
        found = measured(child(0, "decode", budget, str(tokens), str(seconds), ""))
        rows.append(summary(f"one worker, {budget}", int(budget), found))
    table = Table("case", "quiet TBT", "median with prefill", "worst", "ratio", "steps")
    for row in rows:
        times = (row["quiet_median_s"], row["busy_median_s"], row["busy_worst_s"])
        numbers = f"{row['ratio_of_medians']:.2f}", str(row["num_busy_steps"])
        table.add_row(row["case"], *(f"{each * 1e3:.0f} ms" for each in times), *numbers)
    Console().print(table)
    keep(name, rows, seed=1, decodes=DECODES, prefill_tokens=tokens)
    plot(rows, RESULTS / f"{name}.svg")


if __name__ == "__main__":
    main()
