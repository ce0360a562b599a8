"""Figures of a replay (distributions of TTFT and TBT, shares, load balance) and of hit-rate curves.

A replay has a row of panels for each trace, a colour for each policy. matplotlib draws it (extra ``plot``), imported
only here and only when a plot is requested; the HTML output contains the drawing as SVG and the figures as a table, and
needs no network.
"""

from __future__ import annotations

import html
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tanghulu.conductor.replay.report import ReplayReport
from tanghulu.errors import ConfigError
from tanghulu.runtime.extras import install_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SUFFIXES = (".png", ".html")
_PANELS = 4
_SHARES = (
    ("hit_tokens", "hit, tokens"),
    ("good_requests", "good"),
    ("rejected_requests", "rejected"),
    ("failed_requests", "failed"),
)
_BALANCE = (("busy_mean", "mean"), ("busy_most", "busiest"))
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body {{ font-family: sans-serif; margin: 2em }} svg {{ max-width: 100%; height: auto }}
td, th {{ padding: 0.2em 0.8em; text-align: right }} td:first-child, td:nth-child(2) {{ text-align: left }}</style>
<h1>{title}</h1>
{drawing}
<table><tr>{head}</tr>
{rows}
</table></html>
"""


def check_plot(path: Path) -> None:
    """Raise ConfigError if no plot can be written to ``path``; called before a replay that may take an hour."""
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"--plot {path} must end in {' or '.join(_SUFFIXES)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib ({error}): {install_command('plot')}") from error


def write_plot(path: Path, reports: Sequence[ReplayReport]) -> None:
    """Draw ``reports`` (those of one trace are adjacent) into ``path``, PNG or HTML by its suffix."""
    check_plot(path)
    title = "Replay of " + ", ".join(dict.fromkeys(report.trace for report in reports))
    _save(path, _figure(reports), title, [report.as_dict() for report in reports])


def write_curves(path: Path, title: str, sizes: Sequence[float], shares: Mapping[str, Sequence[float]]) -> None:
    """Draw the share of cached prompt tokens over ``sizes`` of memory, a line for each name in ``shares``."""
    from matplotlib.figure import Figure

    check_plot(path)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, values in shares.items():
        axes.plot(sizes, [100 * value for value in values], marker="o", label=name)
    axes.set(title=title, ylabel="cached prompt tokens in %", xlabel="memory compared with now", xscale="log")
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    rows = [{"memory": size, **{name: shares[name][at] for name in shares}} for at, size in enumerate(sizes)]
    _save(path, figure, title, rows)


def _save(path: Path, figure: Figure, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    if path.suffix == ".png":
        figure.savefig(path, dpi=120)
    else:
        path.write_text(_page(figure, title, rows), encoding="utf-8")


def _figure(reports: Sequence[ReplayReport]) -> Figure:
    from matplotlib.figure import Figure

    groups = [(trace, list(rows)) for trace, rows in itertools.groupby(reports, key=lambda report: report.trace)]
    figure = Figure(figsize=(5 * _PANELS, 4 * len(groups)), layout="constrained")
    axes = figure.subplots(len(groups), _PANELS, squeeze=False)
    for row, (trace, rows) in zip(axes, groups, strict=True):
        _distribution(row[0], f"{trace}: TTFT in s", [(r.policy, r.ttft_s) for r in rows])
        _distribution(row[1], f"{trace}: TBT in s, mean of a request", [(r.policy, r.tbt_s) for r in rows])
        _bars(row[2], f"{trace}: shares in %", rows, _SHARES)
        _bars(row[3], f"{trace}: busy prefill workers in %", rows, _BALANCE)
    return figure


def _distribution(axes: Axes, title: str, samples: Sequence[tuple[str, Sequence[float]]]) -> None:
    """Plot the share of requests (y) up to each time (x, logarithmic, as times span orders of magnitude)."""
    for policy, ordered in samples:
        shares = [(rank + 1) / len(ordered) for rank in range(len(ordered))]
        axes.step(ordered, shares, where="post", label=policy)
    if any(value > 0 for _, ordered in samples for value in ordered):
        _logarithmic(axes)
    axes.set(title=title, ylabel="share of requests", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def _logarithmic(axes: Axes) -> None:
    """Label 1, 2 and 5 of each decade: times of one replay may lie within less than one decade."""
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="x", which="both", labelsize=7)


def _bars(axes: Axes, title: str, reports: Sequence[ReplayReport], figures: Sequence[tuple[str, str]]) -> None:
    axes.set(title=title)
    if all(math.isnan(getattr(report, name)) for report in reports for name, _ in figures):
        axes.set_axis_off()
        axes.text(0.5, 0.5, "not seen by a client", ha="center", transform=axes.transAxes)
        return
    width = 0.8 / len(reports)
    for number, report in enumerate(reports):
        percents = [100 * getattr(report, name) for name, _ in figures]
        known = [0.0 if math.isnan(percent) else percent for percent in percents]
        bars = axes.bar([x + number * width for x in range(len(figures))], known, width, label=report.policy)
        axes.bar_label(bars, ["?" if math.isnan(percent) else f"{percent:.1f}" for percent in percents], fontsize=7)
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(figures))], [label for _, label in figures])
    axes.set_ylim(bottom=0)
    axes.legend()


def _page(figure: Figure, title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    from matplotlib import rc_context

    drawing = io.StringIO()
    with rc_context({"svg.hashsalt": "replay"}):
        figure.savefig(drawing, format="svg", metadata={"Date": None})
    svg = drawing.getvalue()
    return _PAGE.format(
        title=html.escape(title),
        drawing=svg[svg.index("<svg") :],
        head="".join(f"<th>{html.escape(name)}</th>" for name in rows[0]),
        rows="\n".join("<tr>" + "".join(f"<td>{_cell(v)}</td>" for v in row.values()) + "</tr>" for row in rows),
    )


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else html.escape(str(value))
