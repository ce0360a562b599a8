"""The plots of the documentation, drawn from the kept results, as SVG that needs nothing else.

    python -m benchmarks.common.plots            # draw docs/pictures/bench-*.svg anew
    python -m benchmarks.common.plots --check    # fail if they differ from what is kept (part of ``make check``)

A bar's length is the logarithm of its figure, which stands beside it; a line's points are what was measured.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.common.doc_tables import Row, figure, kept, spaced
from benchmarks.common.report import ROOT

FOLDER = ROOT / "docs" / "pictures"
SIZES = ("4KiB", "64KiB", "1MiB", "16MiB", "256MiB")
_COLOURS = ("#c1121f", "#f0a6a6", "#33658a", "#8fb8d8", "#6a994e", "#999999", "#b07d2b")
_LEFT, _WIDE, _RIGHT = 130, 520, 90
_BAR, _GAP, _TOP = 15, 12, 44
_PANEL_WIDE, _PANEL_HIGH = 290, 190


@dataclass(frozen=True)
class Bars:
    """Groups of bars, each bar with a name; the same name has the same colour."""

    title: str
    unit: str
    groups: dict[str, dict[str, float]]


def bars(plot: Bars) -> str:
    """Horizontal bars on a logarithmic scale."""
    names = list(dict.fromkeys(name for group in plot.groups.values() for name in group))
    figures = [value for group in plot.groups.values() for value in group.values()]
    least = math.floor(math.log10(min(figures)))
    span = math.log10(max(figures)) - least
    parts, y = [], _TOP
    for label, group in plot.groups.items():
        parts.append(_text(_LEFT - 8, y + len(group) * _BAR / 2 + 4, label, "end", bold=True))
        for name, value in group.items():
            long = max(2.0, _WIDE * (math.log10(value) - least) / span)
            colour = _COLOURS[names.index(name) % len(_COLOURS)]
            parts.append(f'<rect x="{_LEFT}" y="{y}" width="{long:.1f}" height="{_BAR - 2}" fill="{colour}"/>')
            parts.append(_text(_LEFT + long + 5, y + 10, figure(value) if value >= 10 else f"{value:.2f}"))
            y += _BAR
        y += _GAP
    return _svg(_LEFT + _WIDE + _RIGHT, y, f"{plot.title}, {plot.unit}", names, parts)


def lines(title: str, panels: dict[str, dict[str, list[tuple[float, float]]]]) -> str:
    """Panels side by side, each with a line a name; x is logarithmic, y from 0 to 1."""
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    parts = []
    for number, (label, panel) in enumerate(panels.items()):
        x0, y0 = 50 + number % 2 * (_PANEL_WIDE + 60), _TOP + 16 + number // 2 * (_PANEL_HIGH + 56)
        parts.append(_text(x0, y0 - 6, label, bold=True))
        shape = f'x="{x0}" y="{y0}" width="{_PANEL_WIDE}" height="{_PANEL_HIGH}"'
        parts.append(f'<rect {shape} fill="none" stroke="#aaa"/>')
        at = sorted({x for points in panel.values() for x, _ in points})
        first, span = math.log(at[0]), math.log(at[-1]) - math.log(at[0])

        def place(x: float, y: float, x0: int = x0, y0: int = y0, first: float = first, span: float = span) -> str:
            return f"{x0 + _PANEL_WIDE * (math.log(x) - first) / span:.1f} {y0 + _PANEL_HIGH * (1 - y):.1f}"

        for share in (0.0, 0.5, 1.0):
            parts.append(_text(x0 - 6, y0 + _PANEL_HIGH * (1 - share) + 4, f"{share:g}", "end"))
        for x, anchor in ((x0, "start"), (x0 + _PANEL_WIDE, "end")):
            blocks = at[0] if anchor == "start" else at[-1]
            parts.append(_text(x, y0 + _PANEL_HIGH + 15, f"{blocks:,.0f} blocks", anchor))
        for name, points in panel.items():
            path = "L".join(place(x, y) for x, y in sorted(points))
            colour = _COLOURS[names.index(name) % len(_COLOURS)]
            parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    high = _TOP + 16 + (len(panels) + 1) // 2 * (_PANEL_HIGH + 56)
    return _svg(2 * (_PANEL_WIDE + 60) + 20, high, title, names, parts)


def _text(x: float, y: float, text: str, anchor: str = "start", *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(text, quote=False)}</text>'


def _svg(wide: float, high: float, title: str, names: Sequence[str], parts: Iterable[str]) -> str:
    legend, x = [], 10.0
    for number, name in enumerate(names):
        legend.append(f'<rect x="{x:.1f}" y="25" width="10" height="10" fill="{_COLOURS[number % len(_COLOURS)]}"/>')
        legend.append(_text(x + 14, 34, name))
        x += 32 + 7.2 * len(name)
    shape = f'viewBox="0 0 {wide:g} {high:g}" width="{wide:g}" height="{high:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {shape} font-family="sans-serif" font-size="12" role="img">'
    behind = '<rect width="100%" height="100%" rx="8" fill="#fff"/>'
    titles = [f"<title>{escape(title, quote=False)}</title>", behind, _text(10, 17, title, bold=True)]
    return "\n".join([head, *titles, *legend, *parts, "</svg>"]) + "\n"


def _rows(name: str) -> list[Row]:
    record = kept(name)
    rows: list[Row] = record["rows"] if record else []
    return rows


_STORES = {"tanghulu shm": "tanghulu shm", "tanghulu tcp": "tanghulu tcp", "mooncake": "Mooncake", "redis": "redis"}


def _store(op: str) -> str:
    """The medians of one call of each store, by size."""
    groups = {}
    for size in SIZES:
        found = {row["who"]: row["p50_us"] for row in _rows(f"store_compare-{size}") if row["op"] == op}
        if found:
            groups[spaced(size)] = {name: found[who] for who, name in _STORES.items() if who in found}
    return bars(Bars(f"{op}: median of a call", "us, logarithmic (shorter is better)", groups))


def _transfer() -> str:
    """What one caller reads in a second, by size."""
    order = ("memmove", "tanghulu shm", "NIXL shm", "one stream", "tanghulu tcp", "NIXL tcp", "Mooncake tcp")
    groups = {}
    for size in SIZES:
        rows = [row for row in _rows(f"transfer-{size}") if row["op"] == "READ" and row["callers"] == 1]
        found = {row["who"]: row["gb_s"] for row in rows}
        if found:
            groups[spaced(size)] = {who: found[who] for who in order if who in found}
    return bars(Bars("READ by one caller", "GB/s, logarithmic (longer is better)", groups))


def _eviction() -> str:
    """The hit ratio of each policy by the size of the cache, for each trace."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in _rows("eviction"):
        if not row["policy"].startswith("reference"):
            lines_of = panels.setdefault(row["trace"], {})
            lines_of.setdefault(row["policy"], []).append((row["capacity_blocks"], row["hit_ratio"]))
    return lines("Hit ratio by the size of the cache", dict(sorted(panels.items())))


PLOTS: dict[str, Callable[[], str]] = {
    "store-put": lambda: _store("put"),
    "store-get": lambda: _store("get"),
    "transfer-read": _transfer,
    "eviction": _eviction,
}


def main() -> int:
    """Draw all; with --check only compare."""
    drawn = {FOLDER / f"bench-{name}.svg": make() for name, make in PLOTS.items()}
    if "--check" in sys.argv[1:]:
        stale = [file for file, text in drawn.items() if not file.exists() or file.read_text() != text]
        for file in stale:
            print(f"{file} differs from benchmarks/results: `python -m benchmarks.common.plots`", file=sys.stderr)
        return 1 if stale else 0
    for file, text in drawn.items():
        file.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
