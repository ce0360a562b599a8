"""``tanghulu store top``: a live view of the nodes. Rates are differences of the nodes' own metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

import click
from rich.table import Table

from tanghulu.auth.credentials import Credentials
from tanghulu.cli.printing import print_json, show_live, store_options, table_of, wide_console
from tanghulu.masters import Masters
from tanghulu.runtime.config import FiniteRange
from tanghulu.runtime.scraping import Samples, scrape, summed
from tanghulu.store.admin.rows import plain
from tanghulu.store.client import Client, connect
from tanghulu.store.client.model import NodeView
from tanghulu.types import format_size

_COUNTERS = {
    "puts": "tanghulu_node_puts_total",
    "hits": "tanghulu_node_hits_total",
    "misses": "tanghulu_node_misses_total",
    "evictions": "tanghulu_node_evictions_total",
    "read_bytes": "tanghulu_node_read_bytes_total",
    "written_bytes": "tanghulu_node_written_bytes_total",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One node at one moment; ``counters`` is None if its metrics could not be read."""

    at_s: float
    view: NodeView
    counters: Mapping[str, float] | None


@dataclass(frozen=True, slots=True)
class Row:
    """One node between two samples; rates are per second, None if unknown."""

    node: str
    used_bytes: int
    capacity_bytes: int
    num_chunks: int
    state: str
    puts: float | None
    hits: float | None
    misses: float | None
    evictions: float | None
    read_bytes: float | None
    written_bytes: float | None


def counters_in(samples: Samples) -> dict[str, float]:
    """Return the counters above from a page of metrics, summed over their labels."""
    totals = summed(samples)
    return {name: totals.get(metric, 0.0) for name, metric in _COUNTERS.items()}


def row(before: Sample | None, now: Sample) -> Row:
    """Return the row of one node between two samples."""
    view = now.view
    rates: dict[str, float | None] = dict.fromkeys(_COUNTERS)
    if before is not None and before.counters is not None and now.counters is not None and now.at_s > before.at_s:
        seconds = now.at_s - before.at_s
        rates = {name: max(now.counters[name] - before.counters[name], 0.0) / seconds for name in _COUNTERS}
    state = "drained" if view.drained else "draining" if view.draining else "up"
    return Row(view.id, view.used_bytes, view.capacity_bytes, view.num_chunks, state, **rates)


def _samples(views: list[NodeView], credentials: Credentials) -> dict[str, Sample]:
    """Sample all nodes; a lost node, or one that denies access to its metrics, has only the master's figures."""
    pages = asyncio.run(scrape([view.metrics_address for view in views], credentials))
    at_s = time.monotonic()
    return {
        view.id: Sample(at_s, view, counters_in(page) if page else None)
        for view, page in zip(views, pages, strict=True)
    }


def _table(rows: list[Row]) -> Table:
    columns = ("node", "used", "chunks", "state", "puts/s", "hits/s", "misses/s", "evictions/s", "read/s", "written/s")
    lines = []
    for each in rows:
        used = f"{format_size(each.used_bytes)} of {format_size(each.capacity_bytes)}"
        counts = ("-" if v is None else f"{v:.0f}" for v in (each.puts, each.hits, each.misses, each.evictions))
        sizes = ("-" if v is None else format_size(v) for v in (each.read_bytes, each.written_bytes))
        lines.append((each.node, used, each.num_chunks, each.state, *counts, *sizes))
    return table_of(columns, lines)


class _View:
    """The samples of the previous call."""

    def __init__(self, store: Client, credentials: Credentials) -> None:
        self._store, self._credentials = store, credentials
        self._before: dict[str, Sample] = {}

    def rows(self) -> list[Row]:
        """Return all nodes, with rates since the previous call."""
        samples = _samples(self._store.nodes(), self._credentials)
        rows = [row(self._before.get(node), sample) for node, sample in samples.items()]
        self._before = samples
        return rows


@click.command("top", short_help="Show live what the nodes hold and do.")
@click.option(
    "--interval-s", type=FiniteRange(0.1, 86_400), default=2.0, show_default=True, help="seconds between refreshes"
)
@click.option(
    "--count",
    type=click.IntRange(1, 10**9),
    help="exit after this many refreshes; default: at Ctrl-C on a terminal, else 1",
)
@store_options
def COMMAND(interval_s: float, count: int | None, master: Masters, as_json: bool) -> None:
    """Show the nodes' contents and activity live. --json prints one list of nodes per refresh."""
    console = wide_console()
    with connect(master) as store:
        view = _View(store, master.credentials)
        if console.is_terminal and not as_json:
            show_live(console, lambda: _table(view.rows()), interval_s, count)
            return
        view.rows()
        for _ in range(1 if count is None else count):
            time.sleep(interval_s)
            rows = view.rows()
            if as_json:
                print_json([plain(each) for each in rows])
            else:
                console.print(_table(rows))
