"""``tanghulu plan``: forecasts what one more worker, twice the memory or an SSD would do, by replaying a trace.

The simulation and its costs are those of ``tanghulu replay``. Forecasts are kept in a file; once a cluster has the
layout of an earlier one, the next plan says how far that forecast was from what its trace has measured (recorded traces
have each request's times) or, without measurements, from its replay. Without a trace, the live hit-rate curve tells
hits and the time of prefills alone.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from tanghulu.cli.curve import live_curves
from tanghulu.cli.printing import print_json, print_table, write_private
from tanghulu.conductor.replay.main import ClusterOptions, replay_one, trace_name
from tanghulu.conductor.replay.model import Job
from tanghulu.conductor.replay.report import ReplayReport, make_report
from tanghulu.conductor.replay.trace import TraceRequest, read_trace
from tanghulu.errors import ConfigError
from tanghulu.runtime.config import command, option
from tanghulu.types import parse_url

NOW = "now"
#: Forecasts kept, the latest ones.
MAX_KEPT = 200
_LAYOUT = ("prefill", "decode", "workers", "speeds", "blocks", "ssd_blocks")
_FIGURES = ("ttft_mean_s", "ttft_p99_s", "tbt_mean_s", "hit_tokens")
_COLUMNS = ("", "TTFT", "P99", "TBT", "hits")
_LIMITS = (
    "queues, TTFT and TBT need a trace: start the conductor with --record and plan from its files; "
    "prefill times are those of the model's constants (--layers and so on)"
)
#: Beyond it the costs are those of another model or machine.
_FACTOR = 1.5
_WRONG_COSTS = (
    f"do not rely on these forecasts: for the current cluster, TTFT or TBT is more than {_FACTOR} times off what was "
    "measured; describe your model and workers with --layers, --dim, --gqa, --gflops, --mfu, --t0, --c, --d and --e"
)


@dataclass(frozen=True, kw_only=True)
class PlanConfig(ClusterOptions):
    """Options of ``tanghulu plan``; the cluster is the current one."""

    speedup: float = option(1.0, "speedup of the arrival of requests", above=0)
    url: str = option("", "without a trace: plan from the hit-rate curve of the conductor at this URL")
    ssd_factor: float = option(9.0, "size of the SSD to forecast, as a multiple of the memory", above=0, most=1000)
    state_dir: Path = option(Path(".tanghulu"), "directory of forecasts.json")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.traces) > 1 or bool(self.traces) == bool(self.url):
            raise ConfigError("give one trace, or --url of a conductor")
        if len(self.policies) > 1:
            raise ConfigError(f"--policy {self.policy}: a plan is made for one policy")
        if self.url:
            parse_url(self.url, path=True)

    @property
    def scenarios(self) -> dict[str, PlanConfig]:
        """The current cluster, and those to forecast."""
        changes: dict[str, dict[str, Any]] = {NOW: {}}
        if self.workers:
            changes["one more worker"] = {"workers": self.workers + 1}
        else:
            changes["one more decode worker"] = {"decode": self.decode + 1}
            changes["one more prefill worker"] = {"prefill": self.prefill + 1}
        changes["twice the memory"] = {"blocks": 2 * self.blocks}
        changes["an SSD"] = {"ssd_blocks": self.ssd_blocks + math.ceil(self.ssd_factor * self.blocks)}
        return {name: dataclasses.replace(self, **change) for name, change in changes.items()}

    @property
    def layout(self) -> dict[str, Any]:
        """The parts of the cluster that a forecast is about."""
        return {name: getattr(self, name) for name in _LAYOUT}


def plan(config: PlanConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Return the figures of every scenario and of earlier forecasts of this cluster; keeps the new forecasts.

    Raises InvalidRequest for an unreadable trace, ConfigError if the forecasts cannot be kept.
    """
    (path,), (policy,) = config.traces, config.policies
    requests = read_trace(path, config.speedup, config.warmup, config.limit)
    found: dict[str, dict[str, float]] = {}
    scenarios = config.scenarios
    task = progress.add_task(path.name, total=len(scenarios)) if progress else None
    for name, scenario in scenarios.items():
        (report,) = replay_one(scenario, path, policy, requests, lambda done: None)
        found[name] = _figures(report)
        if progress and task is not None:
            progress.advance(task)
    measured = _measured(path, requests, config)
    file = config.state_dir / "forecasts.json"
    kept = _read(file)
    about = {"trace": trace_name(path), "policy": policy}
    reality = measured or found[NOW]
    earlier = [
        {**each, "errors": {name: _error(each["figures"][name], reality[name]) for name in _FIGURES}}
        for each in kept
        if each["layout"] == config.layout and each["policy"] == policy and each["trace"] != about["trace"]
    ]
    new = [
        {**about, "at_s": round(time.time()), "scenario": name, "layout": scenarios[name].layout, "figures": figures}
        for name, figures in found.items()
    ]
    _write(file, [each for each in kept if not _is_same(each, new)] + new)
    return {**about, "scenarios": found, "measured": measured, "earlier_forecasts": earlier}


def _figures(report: ReplayReport) -> dict[str, float]:
    return {name: getattr(report, name) for name in _FIGURES}


def _measured(path: Path, requests: Sequence[TraceRequest], config: PlanConfig) -> dict[str, float] | None:
    """Return the recorded figures of the counted requests; None if the trace has none."""
    jobs = [
        Job(each, number, ttft_s=seen.ttft_s, tbt_s=seen.tbt_s, hit_tokens=seen.cached_tokens)
        for number, each in enumerate(requests)
        if (seen := each.measured) is not None and each.counted
    ]
    return _figures(make_report(trace_name(path), "", jobs, (), 0, config.slo_s)) if jobs else None


def _error(forecast: float, real: float) -> float | None:
    return forecast / real - 1 if real else None


def _is_same(one: dict[str, Any], others: Sequence[dict[str, Any]]) -> bool:
    return any(all(one[name] == other[name] for name in ("trace", "policy", "layout")) for other in others)


def _read(file: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(file.read_bytes()) if file.exists() else []
        assert all(
            each["figures"].keys() >= {*_FIGURES} and each.keys() >= {"layout", "policy", "trace"} for each in found
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        raise ConfigError(f"{file} has no forecasts that can be read ({error!r}); move it away to begin anew") from None
    return list(found)


def _write(file: Path, forecasts: Sequence[dict[str, Any]]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_private(file, json.dumps(forecasts[-MAX_KEPT:], indent=1).encode())
    except OSError as error:
        raise ConfigError(f"cannot keep forecasts in {file}: {error}; choose another --state-dir") from error


def plan_live(config: PlanConfig) -> list[dict[str, Any]]:
    """Return hits and prefill times for each model of a conductor with more memory. Raises as `live_curves`."""
    profile, found = config.cluster.model.profile, []
    for row in live_curves(config.url, config)["models"]:
        shares, prompt = row["tenants"]["*"]["shares"][row["eviction"]], row["mean"]["prompt_tokens"]
        scenarios = {}
        for name, size in {NOW: 1.0, "twice the memory": 2.0, "an SSD": 1 + config.ssd_factor}.items():
            hits = _between(row["sizes"], shares, size)
            scenarios[name] = {"hit_tokens": hits, "prefill_s": profile.seconds(round(prompt), round(hits * prompt))}
        found.append({"model": row["model"], "measured": row["mean"], "scenarios": scenarios, "unknown": _LIMITS})
    return found


def _between(sizes: Sequence[float], shares: Sequence[float], size: float) -> float:
    """Return the share at ``size``, on a line between its neighbours over the logarithm; flat beyond the ends."""
    for at in range(1, len(sizes)):
        if size <= sizes[at]:
            part = math.log(max(size, sizes[at - 1]) / sizes[at - 1]) / math.log(sizes[at] / sizes[at - 1])
            return shares[at - 1] + part * (shares[at] - shares[at - 1])
    return shares[-1]


def _run(config: PlanConfig) -> None:
    if config.url:
        models = plan_live(config)
        if config.json:
            print_json({"models": models})
        elif not models:
            click.echo("no request has ended yet; there is nothing to plan from")
        for row in () if config.json else models:
            rows = [
                (name, f"{100 * s['hit_tokens']:.1f} %", f"{s['prefill_s']:.3f}")
                for name, s in row["scenarios"].items()
            ]
            print_table((row["model"], "hits", "prefill, s"), rows)
            click.echo(f"unknown: {_LIMITS}")
        return
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=config.json or not console.is_terminal) as progress:
        found = plan(config, progress)
    if config.json:
        print_json(found)
        return
    shown = {**found["scenarios"], **({"measured": found["measured"]} if found["measured"] else {})}
    print_table(
        (f"{found['trace']}, {found['policy']}", *_COLUMNS[1:]), [(name, *_cells(row)) for name, row in shown.items()]
    )
    if found["measured"] and not _describes(found["scenarios"][NOW], found["measured"]):
        click.echo(_WRONG_COSTS, err=True)
    reality = "measurements" if found["measured"] else "the replay"
    for each in found["earlier_forecasts"]:
        errors = zip(_COLUMNS[1:], each["errors"].values(), strict=True)
        off = ", ".join(f"{name} {'-' if error is None else format(error, '+.1%')}" for name, error in errors)
        click.echo(f"forecast from {each['trace']} ({each['scenario']}) compared with {reality} now: {off}")


def _describes(forecast: dict[str, float], measured: dict[str, float]) -> bool:
    """Return whether mean TTFT and TBT, as far as they were measured, are forecast within a factor of `_FACTOR`."""
    pairs = [(forecast[name], measured[name]) for name in ("ttft_mean_s", "tbt_mean_s")]
    return all(real / _FACTOR <= expected <= real * _FACTOR for expected, real in pairs if real)


def _cells(row: dict[str, float]) -> tuple[str, ...]:
    return (
        f"{row['ttft_mean_s']:.3f} s",
        f"{row['ttft_p99_s']:.3f} s",
        f"{1000 * row['tbt_mean_s']:.1f} ms",
        f"{100 * row['hit_tokens']:.1f} %",
    )


COMMAND = command("plan", PlanConfig, _run, "Forecast what another worker, more memory or an SSD would do.")
COMMAND.params.insert(
    0, click.Argument(["traces"], nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
)
