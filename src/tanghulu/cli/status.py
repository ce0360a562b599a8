"""``tanghulu status``: overview of every process of a cluster, from discovery, the master and all metrics."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import click
from rich.table import Table
from rich.text import Text

from tanghulu.arguments import text
from tanghulu.cli.printing import print_json, show_live, store_options, table_of, wide_console
from tanghulu.discovery.base import Instance
from tanghulu.discovery.masters import MasterFinder
from tanghulu.discovery.open import HELP, instances_now
from tanghulu.errors import TanghuluError
from tanghulu.masters import Masters
from tanghulu.runtime.config import PREFIX, FiniteRange
from tanghulu.runtime.scraping import scrape, summed
from tanghulu.store.admin.rows import plain
from tanghulu.store.client import aio
from tanghulu.store.client.model import MasterView, NodeView
from tanghulu.types import Address, InstanceId, Role, format_size

_DEADLINE_S = 5.0

#: The figures of one process, summed over labels, by metric name; None if its metrics could not be read.
Figures = Mapping[str, float] | None


@dataclass(frozen=True, slots=True)
class Part:
    """One process of the cluster. ``hit_ratio``: of keys read from a node, of prompt tokens sent to a conductor."""

    role: str
    id: str
    address: str
    health: str
    load: str
    hit_ratio: float | None
    uptime_s: float | None
    metrics_address: str


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The cluster at one moment. ``problems`` are what needs attention, one sentence each."""

    master: str
    parts: tuple[Part, ...]
    problems: tuple[str, ...]


def part_of(instance: Instance, figures: Figures, view: NodeView | None, now_s: float) -> Part:
    """Return the line of one process; ``now_s`` is the time of day, as metrics state the start time."""
    started_s = (figures or {}).get("process_start_time_seconds")
    return Part(
        role=instance.role.value,
        id=instance.id,
        address=str(instance.address),
        health=_health(figures, view),
        load=_load(instance.role, figures or {}, view),
        hit_ratio=_hit_ratio(instance.role, figures or {}),
        uptime_s=max(now_s - started_s, 0.0) if started_s else None,
        metrics_address=instance.metrics_address,
    )


def part_of_master(view: MasterView, registered: Part | None, address: str) -> Part:
    """Return the line of the master at ``address``, merged with its ``registered`` line if there is one."""
    rebuilding = f", {view.num_rebuilding} of {len(view.ranges)} ranges rebuilding" if view.num_rebuilding else ""
    load = f"{view.num_keys} keys{', leads' if view.leads else ''}{rebuilding}" if view.answers else ""
    if registered is not None:
        return replace(registered, load=load)
    return Part(Role.MASTER.value, "master", address, "up" if view.answers else "silent", load, None, None, "")


def problems_of(parts: Sequence[Part]) -> list[str]:
    """Return what is missing for serving, and the processes that do not answer."""
    silent = (each for each in parts if each.health == "silent")
    found = [f"{each.id} does not answer at {each.metrics_address or each.address}" for each in silent]
    roles = {each.role for each in parts}
    if Role.NODE.value not in roles:
        found.append("no store node is registered: nothing can be stored")
    if Role.CONDUCTOR.value in roles:
        for wanted in (Role.PREFILL, Role.DECODE):
            if wanted.value not in roles and Role.BOTH.value not in roles:
                found.append(f"no {wanted.value} worker is registered: requests wait")
    return found


def _health(figures: Figures, view: NodeView | None) -> str:
    if figures is None:
        return "silent"
    if view is not None and view.drained:
        return "drained"
    return "draining" if view is not None and view.draining else "up"


def _load(role: Role, figures: Mapping[str, float], view: NodeView | None) -> str:
    if view is not None:
        ssd = f", SSD {format_size(view.ssd_used_bytes)} of {format_size(view.ssd_capacity_bytes)}"
        used = f"{format_size(view.used_bytes)} of {format_size(view.capacity_bytes)}"
        return f"{used}, {view.num_chunks} chunks" + (ssd if view.ssd_capacity_bytes else "")
    if role in (Role.PREFILL, Role.DECODE, Role.BOTH) and "tanghulu_worker_blocks_capacity" in figures:
        running, waiting = (figures.get(f"tanghulu_worker_requests_{name}", 0) for name in ("running", "waiting"))
        in_use = figures.get("tanghulu_worker_blocks_in_use", 0) / max(figures["tanghulu_worker_blocks_capacity"], 1)
        load = f"{running:.0f} running, {waiting:.0f} waiting, {in_use:.0%} of blocks in use"
        token_bytes = figures.get("tanghulu_worker_kv_token_bytes")
        return load if token_bytes is None else f"{load}, {format_size(round(token_bytes))} of KV a token"
    if role is Role.CONDUCTOR and figures:
        in_flight, queued = (figures.get(f"tanghulu_conductor_requests_{name}", 0) for name in ("in_flight", "queued"))
        return f"{in_flight:.0f} in flight, {queued:.0f} queued"
    return ""


def _hit_ratio(role: Role, figures: Mapping[str, float]) -> float | None:
    if role is Role.NODE:
        hits, misses = (figures.get(f"tanghulu_node_{name}_total", 0.0) for name in ("hits", "misses"))
    elif role is Role.CONDUCTOR:
        hits = figures.get("tanghulu_conductor_cached_tokens_total", 0.0)
        misses = figures.get("tanghulu_conductor_prompt_tokens_total", 0.0) - hits
    else:
        return None
    return hits / (hits + misses) if hits + misses > 0 else None


async def look(master: Masters, discovery: str, namespace: str) -> ClusterStatus:
    """Query discovery, the master and every process; raises MasterUnavailable if none can list the processes."""
    instances = await instances_now(discovery, master, namespace=text("namespace", namespace), deadline_s=_DEADLINE_S)
    views: dict[str, NodeView] = {}
    masters: list[MasterView] = []
    asked = str(master)
    problems: list[str] = []
    try:
        async with aio.connect(master) as store:
            views = {view.id: view for view in await store.nodes()}
            masters = await store.masters()
            asked = str(await MasterFinder(master).find())
    except TanghuluError as error:
        problems.append(f"the master: {error.message}")
    seen = {each.id for each in instances}
    instances += [_node_of(view) for view in views.values() if view.id not in seen]
    pages = await scrape((each.metrics_address for each in instances), master.credentials)
    now_s = time.time()
    order = [role.value for role in Role]
    parts = [
        part_of(each, None if page is None else summed(page), views.get(each.id), now_s)
        for each, page in zip(instances, pages, strict=True)
    ]
    registered = {part.address: part for part in parts if part.role == Role.MASTER.value}
    known = {view.address or asked: view for view in masters}
    lines = {address: part_of_master(view, registered.get(address), address) for address, view in known.items()}
    parts = [part for part in parts if part.address not in lines] + [*lines.values()]
    parts.sort(key=lambda part: (order.index(part.role), part.id))
    return ClusterStatus(str(master), tuple(parts), (*problems, *problems_of(parts)))


def _node_of(view: NodeView) -> Instance:
    """Return an instance for a node known only from the list of nodes: a client's token sees no instances."""
    address = Address.parse(view.address)
    return Instance(InstanceId(view.id), Role.NODE, address, metrics_address=view.metrics_address)


def _table(status: ClusterStatus) -> Table:
    rows = []
    for part in status.parts:
        hits = "-" if part.hit_ratio is None else f"{part.hit_ratio:.1%}"
        since = "-" if part.uptime_s is None else _span(part.uptime_s)
        rows.append(
            (part.role, part.id, part.address, part.health, part.load, hits, since, part.metrics_address or "-")
        )
    table = table_of(("role", "id", "address", "health", "load", "hits", "up for", "metrics"), rows)
    if status.problems:
        table.caption = Text("\n".join(status.problems))
        table.caption_justify = "left"
    return table


def _span(seconds: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.1f} {unit}"
    return f"{seconds:.0f} s"


@click.command("status", short_help="Show the whole cluster at a glance.")
@click.option("--discovery", default="master", show_default=True, envvar=PREFIX + "DISCOVERY", help=HELP)
@click.option(
    "--namespace", default="default", show_default=True, envvar=PREFIX + "NAMESPACE", help="namespace of the processes"
)
@click.option("--watch", is_flag=True, help="refresh until Ctrl-C")
@click.option(
    "--interval-s", type=FiniteRange(0.1, 86_400), default=2.0, show_default=True, help="seconds between refreshes"
)
@store_options
def COMMAND(discovery: str, namespace: str, watch: bool, interval_s: float, master: Masters, as_json: bool) -> None:
    """Show the health, load, hit ratio and metrics address of every process in the cluster.

    A token without the right to join or to see metrics sees masters and store nodes alone.

    Exits with 1 if something is wrong, for scripts. --json prints one object per refresh.
    """
    console = wide_console()

    def shown() -> ClusterStatus:
        return asyncio.run(look(master, discovery, namespace))

    if watch and console.is_terminal and not as_json:
        show_live(console, lambda: _table(shown()), interval_s)
        return
    for number in itertools.count():
        if number:
            time.sleep(interval_s)
        status = shown()
        if as_json:
            print_json(plain(status))
        else:
            console.print(_table(status))
        if not watch:
            break
    if status.problems:
        raise SystemExit(1)
