"""Time between tokens of running decodes while a long prefill is in flight: on one worker, and beside one.

One worker: the prefill shares the decodes' steps, cut into chunks so that no step has more than
--max-num-batched-tokens tokens; a decode waits for the step, so the bound is the time of a step so large.
Two workers: the prefill runs in another process, each pinned to a core of its own. The plot has a panel for each.

    python benchmarks/tbt.py
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from report import RESULTS, keep

DECODES = 4
CONTEXT = 128


def engine(budget: int) -> Any:
    """A tanghulu engine on one thread."""
    os.environ["MAX_NUM_BATCHED_TOKENS"] = str(budget)
    from engine_subject import Tanghulu

    return Tanghulu("smollm2", "float32", 1)


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(100, 49152) for _ in range(length)]


def decode_steps(core: Any, seconds: float) -> list[tuple[float, float]]:
    """Step for ``seconds``: (when, gap) of every step in which the decodes got a token."""
    start = last = time.perf_counter()
    gaps = []
    while time.perf_counter() - start < seconds:
        result = core.step()
        now = time.perf_counter()
        if sum(len(output.tokens) for output in result.outputs) >= DECODES:
            gaps.append((now - start, now - last))
            last = now
    return gaps


def decoder(budget: int, prefill_tokens: int, quiet_s: float, busy_s: float, start_file: str) -> dict[str, Any]:
    """Decode quietly, then with a prefill here (``prefill_tokens`` > 0) or next door (told by ``start_file``)."""
    subject, rng = engine(budget), random.Random(1)
    core = subject._core
    for _ in range(DECODES):
        subject._add(prompt(rng, CONTEXT), 100_000)
    while core.scheduler.num_pending_tokens > DECODES:
        core.step()
    decode_steps(core, 1.0)
    quiet = decode_steps(core, quiet_s)
    if prefill_tokens:
        for _ in range(2):  # SmolLM2's context is 2,048: two prompts of half the length
            subject._add(prompt(rng, prefill_tokens // 2), 1)
    else:
        Path(start_file).touch()
    return {"quiet": quiet, "busy": decode_steps(core, busy_s)}


def prefiller(tokens: int, start_file: str, seconds: float) -> None:
    """Wait for ``start_file``, then prefill for ``seconds``."""
    subject, rng = engine(512), random.Random(2)
    subject.generate([prompt(rng, 64)], 1)
    print("loaded", flush=True)
    while not Path(start_file).exists():
        time.sleep(0.01)
    until = time.perf_counter() + seconds
    subject._add(prompt(rng, tokens // 2), 1)
    while time.perf_counter() < until:
        if not subject._core.scheduler.has_work:
            subject._add(prompt(rng, tokens // 2), 1)
        subject._core.step()


def child(core: int, *words: str) -> subprocess.Popen[str]:
    command = ["taskset", "-c", str(core), sys.executable, __file__, "--part", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent)


def measured(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=170)
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def summary(case: str, budget: int, found: dict[str, Any]) -> dict[str, Any]:
    quiet = [gap for _, gap in found["quiet"]]
    busy = [gap for _, gap in found["busy"]]
    return {
        "case": case,
        "max_num_batched_tokens": budget,
        "quiet_median_s": statistics.median(quiet),
        "busy_median_s": statistics.median(busy),
        "busy_worst_s": max(busy),
        "ratio_of_medians": statistics.median(busy) / statistics.median(quiet),
        "load_average": os.getloadavg()[0],
    }


def plot(found: dict[str, dict[str, Any]], path: Path) -> None:
    import matplotlib  # only for the plot: pip install matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(found), figsize=(3.2 * len(found), 2.8), sharey=True)
    for axis, (case, each) in zip(axes, found.items(), strict=True):
        start = each["quiet"][-1][0]
        axis.plot([at - start for at, _ in each["quiet"]], [gap * 1e3 for _, gap in each["quiet"]], ".", label="quiet")
        axis.plot([at for at, _ in each["busy"]], [gap * 1e3 for _, gap in each["busy"]], ".", label="prefill")
        axis.set(title=case, xlabel="seconds", yscale="log")
    axes[0].set_ylabel("ms between tokens")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=80)


@click.command()
@click.option("--part", nargs=5, default=None, help="used by the benchmark itself")
@click.option("--tokens", default=4000, show_default=True)
@click.option("--budgets", default="64,256,1024", show_default=True)
@click.option("--seconds", default=8.0, show_default=True, help="of each phase")
def main(part: tuple[str, ...] | None, tokens: int, budgets: str, seconds: float) -> None:
    """Measure, keep results/tbt.json and results/tbt.png."""
    start_file = f"/tmp/tanghulu-tbt-{os.getpid()}"
    if part is not None:
        kind, budget, prefill_tokens, duration, start = part
        if kind == "prefill":
            prefiller(int(prefill_tokens), start, float(duration))
        else:
            print(json.dumps(decoder(int(budget), int(prefill_tokens), float(duration), float(duration), start)))
        return
    found = {}
    neighbour = child(1, "prefill", "512", str(tokens), str(seconds), start_file)
    assert neighbour.stdout is not None
    neighbour.stdout.readline()
    found["two workers"] = measured(child(0, "decode", "512", "0", str(seconds), start_file))
    neighbour.wait(60)
    Path(start_file).unlink()
    for budget in budgets.split(","):
        found[f"one, {budget}"] = measured(child(0, "decode", budget, str(tokens), str(seconds), start_file))
    rows = [summary(case, 512 if case == "two workers" else int(case.split()[1]), each) for case, each in found.items()]
    table = Table("case", "quiet TBT", "median with prefill", "worst", "ratio")
    for row in rows:
        times = (row["quiet_median_s"], row["busy_median_s"], row["busy_worst_s"])
        table.add_row(row["case"], *(f"{each * 1e3:.0f} ms" for each in times), f"{row['ratio_of_medians']:.2f}")
    Console().print(table)
    keep("tbt", rows, seed=1, decodes=DECODES, prefill_tokens=tokens)
    plot(found, RESULTS / "tbt.png")


if __name__ == "__main__":
    main()
