"""``tanghulu store drain | undrain | evict | replicate | watch``: what operators do to a running store."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tanghulu.cli.printing import counted, plain, print_json, store_options
from tanghulu.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable
from tanghulu.store.client import Client, connect
from tanghulu.store.client.model import NodeView
from tanghulu.store.directory_events import DirectoryEvent, DirectoryEventKind, follow_directory
from tanghulu.types import Masters, format_size, parse_size

_POLL_S = 0.25


@click.command(short_help="Move a node's chunks away, to stop it.")
@click.argument("node")
@click.option("--wait/--no-wait", default=True, help="wait until the node may be stopped")
@click.option("--timeout-s", type=click.FloatRange(min=0), help="give up waiting after so long; the drain goes on")
@store_options
def drain(node: str, wait: bool, timeout_s: float | None, master: Masters, as_json: bool) -> None:
    """Move the chunks of NODE to other nodes, so that it can be stopped and nothing is lost.

    From now on it takes no new chunks. Ends when it is safe to stop; undrain takes it back.
    """
    began_s = time.monotonic()
    with connect(master) as store:
        if all(view.draining for view in store.nodes() if view.id != node):
            raise InvalidRequest(f"no other node takes chunks: start one before {node} is drained")
        store.drain(node)
        num_chunks = _wait(store, node, timeout_s, show=not as_json) if wait else 0
    if as_json:
        seconds = round(time.monotonic() - began_s, 3)
        print_json({"node": node, "drained": wait, "num_chunks": num_chunks, "seconds": seconds})
    else:
        click.echo(f"{node} is drained: safe to stop" if wait else f"{node} is draining; see `tanghulu store nodes`")


def _wait(store: Client, node: str, timeout_s: float | None, *, show: bool) -> int:
    """Until ``node`` is drained; returns how many chunks it holds, all of which others hold too."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    most = 0
    with Progress(*columns, console=console, disable=not (show and console.is_terminal)) as progress:
        task = progress.add_task(f"draining {node}", total=None)
        for view in _views(store, node, timeout_s):
            most = max(most, view.num_unsafe)
            progress.update(task, total=most or None, completed=most - view.num_unsafe)
            if view.drained:
                return view.num_chunks
    raise AssertionError("unreachable: the views end with an error")


def _views(store: Client, node: str, timeout_s: float | None) -> Iterator[NodeView]:
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    was_draining = False
    while True:
        view = next((view for view in store.nodes() if view.id == node), None)
        if view is None:
            raise NodeUnavailable(f"{node} is gone; what only it held is lost")
        if was_draining and not view.draining:
            raise InvalidRequest(f"somebody undrained {node}")
        was_draining = view.draining
        yield view
        if until_s is not None and time.monotonic() >= until_s:
            raise DeadlineExceeded(f"{node} is not drained after {timeout_s:g} s; {view.num_unsafe} chunks are left")
        time.sleep(_POLL_S)


@click.command(short_help="Have a node take chunks again.")
@click.argument("node")
@store_options
def undrain(node: str, master: Masters, as_json: bool) -> None:
    """Have NODE take new chunks again; what was copied away stays where it is, too."""
    with connect(master) as store:
        store.drain(node, draining=False)
    if as_json:
        print_json({"node": node, "draining": False})
    else:
        click.echo(f"{node} takes chunks again")


def _size(context: click.Context, parameter: click.Parameter, value: str) -> int:
    try:
        return parse_size(value)
    except InvalidRequest as error:
        raise click.BadParameter(error.message) from None


@click.command(short_help="Let chunks go by key or by the policy.")
@click.argument("keys", nargs=-1)
@click.option("--bytes", "num_bytes", default="0", callback=_size, help="evict so much on each node, by its policy")
@click.option("--node", "node_id", default="", help="on this node only (its id); default: on all")
@store_options
def evict(keys: tuple[str, ...], num_bytes: int, node_id: str, master: Masters, as_json: bool) -> None:
    """Evict KEYS, or the chunks that would go next; unlike rm, they may be put again at once by whoever has them.

    What is being read or pinned hard stays. With an SSD tier evicted chunks go down to it.
    """
    if bool(keys) == bool(num_bytes):
        raise click.UsageError("name KEYS or give --bytes SIZE")
    with connect(master) as store:
        chosen = [node_id] if node_id else [view.id for view in store.nodes()]
        evicted = {each: store.evict(each, keys, num_bytes=num_bytes) for each in chosen}
    if as_json:
        print_json({each: plain(outcome) for each, outcome in evicted.items()})
        return
    for each, outcome in evicted.items():
        click.echo(f"{each}: evicted {counted(outcome.num_chunks, 'chunk')}, {format_size(outcome.num_bytes)}")
    if not any(outcome.num_chunks for outcome in evicted.values()):
        click.echo("nothing went: it is not in memory, is being read, or is pinned hard", err=True)


@click.command(short_help="Have keys copied ahead of demand.")
@click.argument("keys", nargs=-1, required=True)
@click.option("--holders", type=click.IntRange(min=1), default=2, show_default=True, help="nodes that shall hold each")
@click.option(
    "--for-s",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="for so many seconds; copies that nobody reads go afterwards",
)
@store_options
def replicate(keys: tuple[str, ...], holders: int, for_s: float, master: Masters, as_json: bool) -> None:
    """Have KEYS copied to more nodes ahead of demand; the master does it in the background."""
    with connect(master) as store:
        num_taken = store.replicate(keys, holders=holders, for_s=for_s)
    if as_json:
        print_json({"taken": num_taken, "keys": len(keys), "holders": holders, "for_s": for_s})
    else:
        click.echo(f"{num_taken} of {len(keys)} keys shall have {holders} holders for {for_s:g} s")


@click.command(short_help="Follow what is stored and removed.")
@click.argument("prefix", default="")
@click.option("--snapshot/--no-snapshot", default=True, help="begin with what there is already")
@click.option("--count", type=click.IntRange(min=1), help="end after so many lines")
@store_options
def watch(prefix: str, snapshot: bool, count: int | None, master: Masters, as_json: bool) -> None:
    """Follow what is stored and removed, and nodes that go, one line each (--json: an object each), until Ctrl-C.

    After an interruption of the master it goes on, with a "reset" and all that there is if it has to begin again.
    """
    connect(master).close()  # a master that is not there is said now and not waited for
    asyncio.run(_watch(master, prefix, snapshot, count, as_json))


async def _watch(masters: Masters, prefix: str, snapshot: bool, count: int | None, as_json: bool) -> None:
    synced = False
    num_lines = 0
    events = follow_directory(masters, prefix)
    try:
        async for batch in events:
            for event in batch:
                shown = synced or snapshot
                synced = event.kind is not DirectoryEventKind.RESET and (
                    synced or event.kind is DirectoryEventKind.SYNCED
                )
                for line in _lines(event, as_json) if shown else ():
                    click.echo(line)
                    num_lines += 1
                    if count is not None and num_lines >= count:
                        return
    finally:
        await events.aclose()  # type: ignore[attr-defined]  # an async generator, which AsyncIterator does not say


def _lines(event: DirectoryEvent, as_json: bool) -> Iterator[str]:
    name = event.kind.name.lower()
    for key in event.keys or ("",):
        if as_json:
            yield json.dumps({"event": name, "node": event.node_id, "key": key, "sequence": event.sequence})
        else:
            yield " ".join(filter(None, (name, event.node_id, key)))


COMMANDS = (drain, undrain, evict, replicate, watch)
