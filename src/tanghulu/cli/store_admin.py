"""``tanghulu store masters | drain | undrain | evict | replicate | watch | tenants | token | check``."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tanghulu.arguments import text
from tanghulu.auth.derived_tokens import hash_of
from tanghulu.auth.tenants import OF_OPERATORS, Right, new_token, validate_tenant
from tanghulu.cli.keys import validate_name
from tanghulu.cli.printing import counted, print_json, print_outcome, print_rows, print_table, store_options
from tanghulu.errors import ChecksumMismatch, InvalidRequest, NodeUnavailable, TanghuluError
from tanghulu.masters import Masters
from tanghulu.runtime.config import MOST, FiniteRange
from tanghulu.store.admin import orders, rows
from tanghulu.store.admin.check import CheckReport, Kind, check
from tanghulu.store.admin.orders import perform
from tanghulu.store.admin.rows import Beginning, Row, plain
from tanghulu.store.client import Client, connect
from tanghulu.store.client.model import MAX_REPLICAS, MAX_TTL_S, MasterView, NodeView, TenantView
from tanghulu.store.directory_feed import follow_directory
from tanghulu.types import format_size, parse_size, printable


@click.command(short_help="Move a node's chunks away, to stop it.")
@click.argument("node")
@click.option("--wait/--no-wait", default=True, help="wait until the node can be stopped")
@click.option("--timeout-s", type=FiniteRange(0, MOST), help="seconds to wait; the drain continues after that")
@store_options
def drain(node: str, wait: bool, timeout_s: float | None, master: Masters, as_json: bool) -> None:
    """Move the chunks of NODE to other nodes, so that it can be stopped without loss.

    The node accepts no new chunks. Exits when it is safe to stop; undrain reverses it.
    """
    with connect(master) as store:
        outcome = _drain(store, node, wait, timeout_s, show=not as_json)
    text = f"{node} is drained: safe to stop" if wait else f"{node} is draining; see `tanghulu store nodes`"
    print_outcome(as_json, outcome, text)


def _drain(store: Client, node: str, wait: bool, timeout_s: float | None, *, show: bool) -> Row:
    """Drain the node, with a progress bar."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    most = 0
    with Progress(*columns, console=console, disable=not (show and wait and console.is_terminal)) as progress:
        task = progress.add_task(f"draining {node}", total=None)

        def on_view(view: NodeView) -> None:
            nonlocal most
            most = max(most, view.num_unsafe)
            progress.update(task, total=most or None, completed=most - view.num_unsafe)

        return perform(orders.drain, store, node, wait=wait, timeout_s=timeout_s, on_view=on_view)


@click.command(short_help="Have a node take chunks again.")
@click.argument("node")
@store_options
def undrain(node: str, master: Masters, as_json: bool) -> None:
    """Let NODE accept new chunks again; copies made by drain stay on the other nodes."""
    with connect(master) as store:
        outcome = perform(orders.undrain, store, node)
    print_outcome(as_json, outcome, f"{node} takes chunks again")


def _size(context: click.Context, parameter: click.Parameter, value: str) -> int:
    try:
        return parse_size(value)
    except InvalidRequest as error:
        raise click.BadParameter(error.message) from None


@click.command(short_help="Let chunks go by key or by the policy.")
@click.argument("keys", nargs=-1)
@click.option("--bytes", "num_bytes", default="0", callback=_size, help="bytes to evict on each node, by its policy")
@click.option("--node", "node_id", default="", help="id of the only node to act on; default: all")
@store_options
def evict(keys: tuple[str, ...], num_bytes: int, node_id: str, master: Masters, as_json: bool) -> None:
    """Evict KEYS, or the chunks next in line; unlike after rm, any client may put them again at once.

    Chunks being read or pinned hard stay. With an SSD tier, evicted chunks move to it. Exits with 3 if a key is not
    in the store.
    """
    if bool(keys) == bool(num_bytes):
        raise click.UsageError("name KEYS or give --bytes SIZE")
    with connect(master) as store:
        missing = perform(orders.missing, store, keys)
        evicted = perform(orders.evict, store, node_id, keys, num_bytes)
    if as_json:
        print_json(evicted)
    elif num_bytes or len(missing) < len(keys):
        _show_evicted(evicted)
    orders.raise_missing(missing)


def _show_evicted(evicted: Row) -> None:
    for each, outcome in evicted.items():
        click.echo(f"{each}: evicted {counted(outcome['num_chunks'], 'chunk')}, {format_size(outcome['num_bytes'])}")
    if not any(outcome["num_chunks"] for outcome in evicted.values()):
        click.echo("nothing was evicted: the chunks are not in memory, are being read, or are hard-pinned", err=True)


@click.command(short_help="Have keys copied ahead of demand.")
@click.argument("keys", nargs=-1, required=True)
@click.option(
    "--holders", type=click.IntRange(1, MAX_REPLICAS), default=2, show_default=True, help="number of nodes per key"
)
@click.option(
    "--for-s",
    type=FiniteRange(0, MAX_TTL_S, min_open=True),
    default=60.0,
    show_default=True,
    help="seconds to keep the copies; unread ones go afterwards",
)
@store_options
def replicate(keys: tuple[str, ...], holders: int, for_s: float, master: Masters, as_json: bool) -> None:
    """Copy KEYS to more nodes ahead of demand; the master does it in the background.

    Exits with 3 if a key is not in the store; the others are copied.
    """
    with connect(master) as store:
        missing = perform(orders.missing, store, keys)
        outcome = perform(orders.replicate, store, keys, holders, for_s)
    text = f"{outcome['taken']} of {len(keys)} keys shall have {holders} holders for {for_s:g} s"
    print_outcome(as_json, outcome, text)
    orders.raise_missing(missing)


@click.command(short_help="Follow what is stored and removed.")
@click.argument("prefix", default="")
@click.option("--snapshot/--no-snapshot", default=True, help="start with the existing keys")
@click.option("--count", type=click.IntRange(1, 10**9), help="exit after this many lines")
@store_options
def watch(prefix: str, snapshot: bool, count: int | None, master: Masters, as_json: bool) -> None:
    """Follow stored and removed keys and lost nodes, one line each (--json: one object each), until Ctrl-C.

    Continues after the loss of a master; if it has to start over, it prints a "reset" and then all existing keys.
    """
    text("prefix", prefix)
    connect(master).close()  # report an absent master now instead of waiting for it
    asyncio.run(_watch(master, prefix, snapshot, count, as_json))


async def _watch(masters: Masters, prefix: str, snapshot: bool, count: int | None, as_json: bool) -> None:
    beginning = Beginning(snapshot=snapshot)
    num_lines = 0
    events = follow_directory(masters, prefix)
    try:
        async for batch in events:
            for event in batch:
                for row in rows.events(event) if beginning.shows(event) else ():
                    click.echo(_line(row, as_json))
                    num_lines += 1
                    if count is not None and num_lines >= count:
                        return
    finally:
        await events.aclose()  # type: ignore[attr-defined]  # an async generator, which AsyncIterator does not express


def _line(row: Row, as_json: bool) -> str:
    return json.dumps(row) if as_json else printable(" ".join(filter(None, (row["event"], row["node"], row["key"]))))


@click.command("masters", short_help="List the masters and the keys that each has.")
@store_options
def masters_command(master: Masters, as_json: bool) -> None:
    """List the masters that own ranges of keys: number of ranges, term, keys, and the leader.

    A rebuilding master does not have the holders of all its keys yet. --json lists the ranges' numbers.
    """
    with connect(master) as store:
        found = store.masters()
    value = [{**plain(each), "state": _state(each)} for each in found]
    lines = (
        (
            each.address or str(master),
            len(each.ranges),
            each.term or "-",
            "leader" if each.leads else "",
            each.num_keys if each.answers else "-",
            _state(each),
        )
        for each in found
    )
    print_rows(as_json, value, ("master", "ranges", "term", "", "keys", "state"), lines)


def _state(master: MasterView) -> str:
    if not master.answers:
        return "silent"
    return f"rebuilding {counted(master.num_rebuilding, 'range')}" if master.num_rebuilding else "ready"


@click.command(short_help="What each tenant holds and may hold.")
@store_options
def tenants(master: Masters, as_json: bool) -> None:
    """List each tenant's use of all nodes' memory, and its hits, misses and evictions since their start.

    "share" refers to the memory of all nodes; a quota applies to each node, to all of them together, or both. A
    tenant's own token shows that tenant only.
    """
    with connect(master) as store:
        found = store.tenants()
    lines = (
        (
            each.tenant or "(none)",
            format_size(each.used_bytes),
            f"{each.share:.1%}",
            _quota(each),
            each.num_chunks,
            each.hits,
            each.misses,
            each.evictions,
        )
        for each in found
    )
    columns = ("tenant", "used", "share", "quota", "chunks", "hits", "misses", "evictions")
    print_rows(as_json, [plain(each) for each in found], columns, lines)


def _quota(tenant: TenantView) -> str:
    limits = []
    if tenant.quota_bytes:
        limits.append(f"{format_size(tenant.quota_bytes)} a node")
    if tenant.cluster_quota_bytes:
        filled = tenant.used_bytes / tenant.cluster_quota_bytes
        limits.append(f"{format_size(tenant.cluster_quota_bytes)} in all ({filled:.0%} used)")
    return ", ".join(limits) or "-"


@click.command(short_help="Make a token for the tokens file.")
@click.argument("name")
@click.option("--tenant", default="", help="tenant of the token; default: an operator's")
@click.option(
    "--right",
    "rights",
    multiple=True,
    type=click.Choice([right.value for right in Right]),
    help="right of the token; repeatable [default: read and write; an operator's: admin]",
)
@click.option("--json", "as_json", is_flag=True, help="print JSON for programs")
def token(name: str, tenant: str, rights: tuple[str, ...], as_json: bool) -> None:
    """Make a token, and the lines for the tokens file, which contain only its hash. Nothing is stored.

    NAME appears in logs and messages. Give the token to its user now: it cannot be shown again.
    """
    validate_name("token", name)
    if tenant:
        validate_tenant(tenant)
        for right, why in OF_OPERATORS.items():
            if right.value in rights:
                raise click.UsageError(f"{right.value} is a right of operators, because {why}; omit --tenant")
    chosen = rights or ((Right.READ.value, Right.WRITE.value) if tenant else (Right.ADMIN.value,))
    made = new_token()
    if as_json:
        row = {"name": name, "tenant": tenant, "rights": list(chosen), "sha256": hash_of(made)}
        print_json({"token": made, "entry": {key: value for key, value in row.items() if value}})
        return
    click.echo(made)
    lines = ["[[tokens]]", f'name = "{name}"', f'tenant = "{tenant}"' if tenant else ""]
    lines += ["rights = [" + ", ".join(f'"{right}"' for right in chosen) + "]", f'sha256 = "{hash_of(made)}"']
    click.echo("\n" + "\n".join(filter(None, lines)), err=True)


class Disagreement(TanghuluError):
    """The directory and the nodes disagree about the holders of chunks."""

    code = "DISAGREEMENT"


@click.command("check", short_help="Verify all bytes, compare directory and nodes.")
@click.option("--repair", "with_repair", is_flag=True, help="drop corrupt chunks and let the nodes report again")
@store_options
def check_command(with_repair: bool, master: Masters, as_json: bool) -> None:
    """Verify the bytes of all chunks in memory, and that directory and nodes agree.

    Exits with 0 if all is well or was repaired, 6 for corrupt chunks, 4 if a node presumed alive did not answer (the
    others were checked), 1 if only directory and nodes differ.
    """
    report = _checked(master, with_repair, show=not as_json)
    if as_json:
        print_json(report.row())
    elif report.findings:
        rows = [
            (each.kind.value, each.node, each.key, "" if each in report.left else "repaired")
            for each in report.findings
        ]
        print_table(("what", "node", "key", ""), rows)
    else:
        click.echo(f"{report.num_chunks} chunks: all is well")
    _complain(Counter(each.kind for each in report.left))


def _checked(master: Masters, with_repair: bool, *, show: bool) -> CheckReport:
    console = Console(stderr=True)
    with connect(master) as store, Progress(console=console, disable=not (show and console.is_terminal)) as progress:
        task = progress.add_task("verifying", total=None)

        def on_progress(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        return perform(check, store, with_repair=with_repair, progress=on_progress)


def _complain(left: Counter[Kind]) -> None:
    """Raise an error for the worst remaining finding."""
    if left[Kind.CORRUPT]:
        raise ChecksumMismatch(f"{counted(left[Kind.CORRUPT], 'corrupt chunk')}; see --repair")
    if left[Kind.SILENT]:
        raise NodeUnavailable(f"{counted(left[Kind.SILENT], 'node')} did not answer; the others were checked")
    if left:
        raise Disagreement(f"the directory and the nodes differ in {counted(left.total(), 'chunk')}; see --repair")


COMMANDS = (masters_command, drain, undrain, evict, replicate, watch, tenants, token, check_command)
