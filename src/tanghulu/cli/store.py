"""``tanghulu store``: look into and administer the store. Tables for people, ``--json`` for programs."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from tanghulu.config import PREFIX
from tanghulu.errors import ChunkNotFound
from tanghulu.store.client import Client, connect
from tanghulu.types import format_size

F = TypeVar("F", bound=Callable[..., Any])
_DEFAULT_LIMIT = 1000
_PIPED_WIDTH = 200


@click.group("store", help="Look into and administer the store.")
def COMMAND() -> None:
    """The group; its commands follow."""


def _common(function: F) -> F:
    """The options that every command of the group has."""
    master = click.option(
        "--master", default="127.0.0.1:7400", show_default=True, envvar=PREFIX + "MASTER", help="the master's address"
    )
    as_json = click.option("--json", "as_json", is_flag=True, help="print JSON for programs")
    return as_json(master(function))


def _store(master: str) -> AbstractContextManager[Client]:
    return connect(master)


@COMMAND.command()
@click.argument("prefix", default="")
@click.option("--limit", default=_DEFAULT_LIMIT, show_default=True, help="at most this many keys; 0: all")
@_common
def ls(prefix: str, limit: int, master: str, as_json: bool) -> None:
    """List the keys that begin with PREFIX, their sizes and the nodes that hold them."""
    with _store(master) as store:
        keys = store.list_keys(prefix, limit=limit or None)
    if as_json:
        _print_json([_plain(k) for k in keys])
        return
    _print_table(("key", "size", "nodes"), ((k.key, format_size(k.size_bytes), " ".join(k.nodes)) for k in keys))
    if limit and len(keys) == limit:
        click.echo(f"(the first {limit}; --limit 0 lists all)", err=True)


@COMMAND.command()
@click.argument("keys", nargs=-1)
@_common
def stat(keys: tuple[str, ...], master: str, as_json: bool) -> None:
    """Show everything about the chunks of KEYS; without keys, the store as a whole."""
    with _store(master) as store:
        if not keys:
            _totals(store, as_json)
            return
        infos = [store.stat(key) for key in keys]
    if as_json:
        rows = [_plain(info) for info in infos]
        _print_json(rows[0] if len(rows) == 1 else rows)
        return
    for info in infos:
        row = _plain(info)
        row["size_bytes"] = f"{info.size_bytes} ({format_size(info.size_bytes)})"
        row["checksums"] = f"{len(info.checksums.parts)} of {format_size(info.checksums.part_bytes or info.size_bytes)}"
        _print_table((), row.items())


def _totals(store: Client, as_json: bool) -> None:
    nodes = store.nodes()
    totals = {
        "num_nodes": len(nodes),
        "num_chunks": sum(n.num_chunks for n in nodes),
        "used_bytes": sum(n.used_bytes for n in nodes),
        "capacity_bytes": sum(n.capacity_bytes for n in nodes),
        "ssd_used_bytes": sum(n.ssd_used_bytes for n in nodes),
        "ssd_capacity_bytes": sum(n.ssd_capacity_bytes for n in nodes),
    }
    if as_json:
        _print_json(totals)
        return
    shown = {k: format_size(v) if k.endswith("bytes") else v for k, v in totals.items()}
    _print_table((), shown.items())


@COMMAND.command()
@_common
def nodes(master: str, as_json: bool) -> None:
    """List the store nodes: where they are, what they hold, when they were last seen."""
    with _store(master) as store:
        found = store.nodes()
    if as_json:
        _print_json([_plain(node) for node in found])
        return
    rows = (
        (
            node.id,
            node.address,
            node.place,
            f"{format_size(node.used_bytes)} of {format_size(node.capacity_bytes)}",
            f"{format_size(node.ssd_used_bytes)} of {format_size(node.ssd_capacity_bytes)}"
            if node.ssd_capacity_bytes
            else "-",
            node.num_chunks,
            "draining" if node.draining else f"{node.last_seen_s:.1f} s ago",
        )
        for node in found
    )
    _print_table(("node", "address", "place", "used", "ssd", "chunks", "seen"), rows)


@COMMAND.command()
@click.argument("key")
@click.argument("file", type=click.File("rb"))
@click.option("--replicas", default=1, show_default=True, help="nodes that shall hold it")
@click.option("--pin", type=click.Choice(["none", "soft", "hard"]), default="none", help="how it stands to eviction")
@click.option("--ttl-s", type=float, help="seconds after which it may go")
@_common
def put(key: str, file: Any, replicas: int, pin: str, ttl_s: float | None, master: str, as_json: bool) -> None:
    """Put the contents of FILE (- for standard input) under KEY."""
    with _store(master) as store:
        status = store.put(key, file.read(), replicas=replicas, pin=pin, ttl_s=ttl_s)
    row = {"key": key, "existed": status.existed, "num_replicas": status.num_replicas}
    if as_json:
        _print_json(row)
    else:
        click.echo(f"{key} was there already" if status.existed else f"{key} is on {status.num_replicas} node(s)")


@COMMAND.command()
@click.argument("key")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="write to this file, not to standard output")
@_common
def get(key: str, output: Path | None, master: str, as_json: bool) -> None:
    """Write the value of KEY to standard output or a file; with --json only its size is printed."""
    with _store(master) as store, store.get(key) as chunk:
        value = chunk.bytes()
    if output is not None:
        output.write_bytes(value)
    elif not as_json:
        sys.stdout.buffer.write(value)
        sys.stdout.buffer.flush()
    if as_json:
        _print_json({"key": key, "size_bytes": len(value), "output": str(output) if output is not None else None})


@COMMAND.command()
@click.argument("keys", nargs=-1)
@click.option("--matching", metavar="REGEX", help="remove every key that this pattern matches")
@_common
def rm(keys: tuple[str, ...], matching: str | None, master: str, as_json: bool) -> None:
    """Remove the chunks of KEYS, or all that match a pattern."""
    if bool(keys) == bool(matching):
        raise click.UsageError("name KEYS or give --matching REGEX")
    with _store(master) as store:
        if matching:
            num_removed, missing = store.remove_matching(matching), []
        else:
            outcomes = dict(zip(keys, store.remove_many(keys), strict=True))
            missing = [key for key, outcome in outcomes.items() if outcome is not True]
            num_removed = len(keys) - len(missing)
    if as_json:
        _print_json({"num_removed": num_removed, "missing": missing})
    else:
        click.echo(f"removed {num_removed}")
    if missing:
        raise ChunkNotFound(f"not in the store: {' '.join(missing)}")


@COMMAND.command()
@click.argument("name", required=False)
@click.option("--node", "node_id", default="", help="this node only (its id); default: all")
@_common
def policy(name: str | None, node_id: str, master: str, as_json: bool) -> None:
    """Show the nodes' eviction policy, or switch it to NAME while they run; chunks and their order are kept."""
    with _store(master) as store:
        chosen = [node_id] if node_id else [node.id for node in store.nodes()]
        policies = {each: store.eviction_policy(each, name) for each in chosen}
    if as_json:
        _print_json(policies)
        return
    _print_table(("node", "policy"), policies.items())


# --- printing


def _plain(value: Any) -> Any:
    """Dataclasses, enums and tuples as what JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def _print_table(columns: tuple[str, ...], rows: Iterable[Iterable[Any]]) -> None:
    table = Table(*columns, show_header=bool(columns), box=None, pad_edge=False)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPED_WIDTH)
    for row in rows:
        cells = [str(cell) for cell in row]
        for _ in range(0 if columns else len(cells) - len(table.columns)):
            table.add_column(overflow="fold")
        table.add_row(*cells)
    for column in table.columns:
        column.overflow = "fold"
    console.print(table)
