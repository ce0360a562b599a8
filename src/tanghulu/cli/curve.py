"""``tanghulu curve``: the share of prompt tokens that would be cached with less or more memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx

from tanghulu.cli.printing import print_json, wide_console
from tanghulu.conductor.curves.curve import SIZES, Bounds, ModelCurve, spread
from tanghulu.conductor.curves.live import curves_as_json
from tanghulu.conductor.replay.plot import check_plot, write_curves
from tanghulu.conductor.replay.trace import read_trace
from tanghulu.errors import ConfigError, NodeUnavailable
from tanghulu.eviction import POLICIES
from tanghulu.runtime.config import check_bounds, command, option
from tanghulu.runtime.master_options import HttpClientOptions
from tanghulu.types import parse_url, printable

_TIMEOUT_S = 60.0
_BAR = 40


@dataclass(frozen=True, kw_only=True)
class CurveConfig(HttpClientOptions):
    """The options of ``tanghulu curve``."""

    url: str = option("http://127.0.0.1:8000", "the conductor's HTTP address")
    trace: Path | None = option(None, "draw the curve of this trace instead of asking a conductor")
    blocks: int = option(5859, "trace: the current memory, in the trace's blocks", least=1, most=1 << 40)
    eviction: str = option("reuse", "trace: eviction policy in use", choices=tuple(POLICIES))
    memory: int = option(1 << 30, "trace: memory for the computation; less makes it sample", size=True, least=1 << 20)
    tenant: str = option("*", "show the curve of this tenant; * is all of them")
    plot: str = option("", "draw the curve to this file, .png or .html (extra 'plot')")
    json: bool = option(False, "print JSON")

    def __post_init__(self) -> None:
        check_bounds(self)
        parse_url(self.url, path=True)


def curve_of(trace: Path, blocks: int, eviction: str, memory_bytes: int) -> dict[str, Any]:
    """Return the curve of a trace in the form of /debug/curve. Raises InvalidRequest for an unreadable trace."""
    requests = read_trace(trace, 1.0, "0")
    curve = ModelCurve(eviction, blocks, Bounds.of_bytes(memory_bytes))
    for each in requests:
        names = spread(each.blocks + each.answer_blocks)
        curve.add("", names, round(each.num_tokens), len(each.blocks), each.block_tokens)
    return {
        "model": trace.name.split(".")[0],
        "eviction": eviction,
        "sampling_rate": curve.rate,
        "block_tokens": requests[0].block_tokens,
        "memory_blocks": blocks,
        "sizes": list(SIZES),
        "tenants": {"*": curves_as_json(curve)["*"]},
        "requests": len(requests),
    }


def live_curves(url: str, client: HttpClientOptions) -> dict[str, Any]:
    """Return the answer of a conductor's /debug/curve. Raises NodeUnavailable, or ConfigError if it has no curves."""
    base = parse_url(url, path=True).removesuffix("/v1").rstrip("/")
    try:
        with httpx.Client(headers=client.shown, verify=client.verified_by, trust_env=False) as http:
            answer = http.get(f"{base}/debug/curve", timeout=_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise NodeUnavailable(f"no conductor answers at {url}: {error!r}; is `tanghulu up` running?") from error
    if answer.status_code != 200:
        raise ConfigError(f"{base}/debug/curve answered {answer.status_code}: {printable(answer.text[:300])}")
    try:
        found: dict[str, Any] = answer.json()
        return {"models": list(found["models"]), **found}
    except (ValueError, LookupError, TypeError) as error:
        raise NodeUnavailable(f"{base}/debug/curve is not a conductor's answer: {error!r}") from error


def _run(config: CurveConfig) -> None:
    if config.plot:
        check_plot(Path(config.plot))
    if config.trace is not None:
        models = [curve_of(config.trace, config.blocks, config.eviction, config.memory)]
    else:
        models = live_curves(config.url, config)["models"]
    if config.json:
        print_json({"models": models})
    elif not models:
        click.echo("no request has ended yet; there is nothing to draw")
    for row in models:
        if config.tenant not in row["tenants"]:
            there = ", ".join(row["tenants"])
            raise ConfigError(f"{row['model']} has no tenant {config.tenant!r}; known: {printable(there)}")
        if not config.json:
            _show(row, config.tenant)
    for number, row in enumerate(models) if config.plot else ():
        path = Path(config.plot)
        path = path if len(models) == 1 else path.with_stem(f"{path.stem}-{number}")
        write_curves(path, _title(row, config.tenant), row["sizes"], row["tenants"][config.tenant]["shares"])


def _title(row: dict[str, Any], tenant: str) -> str:
    return f"{row['model']}, eviction {row['eviction']}" + ("" if tenant == "*" else f", tenant {tenant or '(none)'}")


def _show(row: dict[str, Any], tenant: str) -> None:
    """Print a line for each size: its blocks, the share of each policy, and a bar for the policy in use."""
    shares, console = row["tenants"][tenant]["shares"], wide_console()
    console.print(f"{_title(row, tenant)}: {row['requests']} requests, {row['memory_blocks']} blocks of memory now",
                  markup=False, highlight=False)  # fmt: skip
    names = list(shares)
    click.echo(f"{'memory':>8} {'blocks':>12}" + "".join(f"{name:>10}" for name in names))
    for at, size in enumerate(row["sizes"]):
        values = "".join(f"{100 * shares[name][at]:>8.1f} %" for name in names)
        bar = "█" * round(_BAR * shares[row["eviction"]][at])
        click.echo(f"{size:>7g}x {round(size * row['memory_blocks']):>12}{values}  {bar}")


COMMAND = command("curve", CurveConfig, _run, "Show the share of prompt tokens cached with less or more memory.")
