"""``tanghulu store``: inspect and administer the store. Tables for people, ``--json`` for programs."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from tanghulu.cli import store_admin, store_top
from tanghulu.cli.printing import counted, print_json, print_outcome, print_rows, print_table, store_options
from tanghulu.errors import InvalidRequest
from tanghulu.masters import Masters
from tanghulu.runtime.config import FiniteRange, command
from tanghulu.runtime.process import run
from tanghulu.store.admin import orders, rows
from tanghulu.store.admin.orders import RemovalOutcome, perform
from tanghulu.store.admin.rows import plain
from tanghulu.store.client import Client, connect
from tanghulu.store.client.model import MAX_REPLICAS, MAX_TTL_S, NodeView
from tanghulu.store.gateway.config import GatewayConfig
from tanghulu.store.protocol.messages import ChunkInfo
from tanghulu.store.protocol.types import Tier
from tanghulu.types import Role, format_size, printable

_DEFAULT_LIMIT = 1000


@click.group("store", help="Inspect and administer the store.")
def COMMAND() -> None:
    """The command group; its commands follow."""


@COMMAND.command(short_help="List keys, their sizes and who holds them.")
@click.argument("prefix", default="")
@click.option(
    "--limit",
    type=click.IntRange(0, 10**9),
    default=_DEFAULT_LIMIT,
    show_default=True,
    help="limit on keys; 0 means all",
)
@click.option("--after", default="", metavar="KEY", help="only keys after KEY in alphabetical order")
@store_options
def ls(prefix: str, limit: int, after: str, master: Masters, as_json: bool) -> None:
    """List the keys that begin with PREFIX, with their sizes and the nodes that hold them."""
    with connect(master) as store:
        keys = store.list_keys(prefix, limit=limit or None, after=after)
    lines = ((k.key, format_size(k.size_bytes), " ".join(k.nodes)) for k in keys)
    print_rows(as_json, plain(keys), ("key", "size", "nodes"), lines)
    if not as_json and limit and len(keys) == limit:
        click.echo(f"(the first {limit}; --limit 0 lists all, --after {_quoted(keys[-1].key)} the next)", err=True)


def _quoted(key: str) -> str:
    """Quote ``key`` for a shell."""
    return (
        shlex.quote(key) if key.isprintable() else "$'" + printable(key.replace("\\", r"\\")).replace("'", r"\'") + "'"
    )


@COMMAND.command(short_help="All about some chunks, or the store as a whole.")
@click.argument("keys", nargs=-1)
@store_options
def stat(keys: tuple[str, ...], master: Masters, as_json: bool) -> None:
    """Show everything about the chunks of KEYS; without keys, the store as a whole."""
    with connect(master) as store:
        if not keys:
            _totals(store, as_json)
            return
        infos = [store.stat(key) for key in keys]
    if as_json:
        described = plain(infos)
        print_json(described[0] if len(described) == 1 else described)
        return
    for number, info in enumerate(infos):
        if number:
            click.echo()
        print_table((), _described(info))


def _described(info: ChunkInfo) -> list[tuple[str, str]]:
    covered = format_size(info.checksums.part_bytes or info.size_bytes)
    return [
        ("key", info.key),
        ("size", f"{format_size(info.size_bytes)} ({info.size_bytes} bytes)"),
        ("version", str(info.version)),
        ("nodes", " ".join(info.nodes)),
        ("tier", info.tier.value),
        ("replicas wanted", str(info.replicas)),
        ("pin", info.pin.value),
        ("may go after", "-" if info.ttl_s is None else f"{info.ttl_s:g} s"),
        ("age", f"{info.age_s:.1f} s" if info.tier is Tier.MEMORY else "-"),  # lower tiers do not record it
        ("hits", str(info.num_hits)),
        ("leases", str(info.num_leases)),
        ("checksums", f"{len(info.checksums.parts)} of {covered}"),
    ]


def _totals(store: Client, as_json: bool) -> None:
    nodes = store.nodes()
    totals = rows.totals(nodes)
    shown = [
        ("nodes", totals["num_nodes"]),
        ("chunks", f"{totals['num_chunks']}, each copy counted"),
        ("memory", f"{format_size(totals['used_bytes'])} of {format_size(totals['capacity_bytes'])}"),
        ("ssd", f"{format_size(totals['ssd_used_bytes'])} of {format_size(totals['ssd_capacity_bytes'])}"),
    ]
    print_rows(as_json, totals, (), shown)


@COMMAND.command(short_help="List the store nodes.")
@store_options
def nodes(master: Masters, as_json: bool) -> None:
    """List the store nodes: addresses, contents, time since last contact."""
    with connect(master) as store:
        found = store.nodes()
    lines = (
        (
            node.id,
            node.address,
            node.place,
            f"{format_size(node.used_bytes)} of {format_size(node.capacity_bytes)}",
            f"{format_size(node.ssd_used_bytes)} of {format_size(node.ssd_capacity_bytes)}"
            if node.ssd_capacity_bytes
            else "-",
            node.num_chunks,
            _state(node),
        )
        for node in found
    )
    print_rows(as_json, plain(found), ("node", "address", "place", "used", "ssd", "chunks", "seen"), lines)


def _state(node: NodeView) -> str:
    if node.drained:
        return "drained: safe to stop"
    return f"draining, {node.num_unsafe} chunks left" if node.draining else f"{node.last_seen_s:.1f} s ago"


@COMMAND.command(short_help="Put a file under a key.")
@click.argument("key")
@click.argument("file", type=click.File("rb"))
@click.option(
    "--replicas", type=click.IntRange(1, MAX_REPLICAS), default=1, show_default=True, help="number of nodes to hold it"
)
@click.option("--pin", type=click.Choice(["none", "soft", "hard"]), default="none", help="protection from eviction")
@click.option("--ttl-s", type=FiniteRange(0, MAX_TTL_S, min_open=True), help="seconds after which it may be evicted")
@store_options
def put(key: str, file: Any, replicas: int, pin: str, ttl_s: float | None, master: Masters, as_json: bool) -> None:
    """Put the contents of FILE (- for standard input) under KEY."""
    try:
        value = file.read()
    except OSError as error:
        raise InvalidRequest(f"cannot read {file.name}: {error.strerror}") from error
    with connect(master) as store:
        status = store.put(key, value, replicas=replicas, pin=pin, ttl_s=ttl_s)
    done = "was there already" if status.existed else f"is on {counted(status.num_replicas, 'node')}"
    print_outcome(as_json, rows.put(status), f"{printable(key)} {done}")


@COMMAND.command(short_help="Write a value to standard output or a file.")
@click.argument("key")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="write to this file; - is standard output")
@store_options
def get(key: str, output: Path | None, master: Masters, as_json: bool) -> None:
    """Write the value of KEY to standard output or a file; --json prints only its size."""
    to_file = output is not None and str(output) != "-"
    with connect(master) as store, store.get(key) as chunk:
        value = chunk.bytes()
    if output is not None and to_file:
        _write(output, value)
    elif not as_json:
        sys.stdout.buffer.write(value)
        sys.stdout.buffer.flush()
    if as_json:
        print_json({"key": key, "size_bytes": len(value), "output": str(output) if to_file else None})


def _write(output: Path, value: bytes) -> None:
    try:
        output.write_bytes(value)
    except OSError as error:
        raise InvalidRequest(f"cannot write {output}: {error.strerror}") from error


@COMMAND.command(short_help="Remove chunks by key or pattern.")
@click.argument("keys", nargs=-1)
@click.option(
    "--matching",
    metavar="REGEX",
    help="remove every key that contains a match of this pattern; ^ anchors it at the beginning",
)
@click.option("--dry-run", is_flag=True, help="only print the keys that --matching would remove")
@store_options
def rm(keys: tuple[str, ...], matching: str | None, dry_run: bool, master: Masters, as_json: bool) -> None:
    """Remove the chunks of KEYS, or all that match a pattern. Try --dry-run first: kv/ holds the workers' own chunks.

    Exits with 3 if a key did not exist; if removals fail, the first reason is printed.
    """
    if bool(keys) == bool(matching):
        raise click.UsageError("name KEYS or give --matching REGEX")
    if dry_run:
        _would_remove(matching, master, as_json)
        return
    with connect(master) as store:
        outcome = RemovalOutcome(store.remove_matching(matching)) if matching else perform(orders.remove, store, keys)
    print_outcome(as_json, outcome.row(), f"removed {outcome.num_removed}")
    outcome.raise_failure()


def _would_remove(pattern: str | None, master: Masters, as_json: bool) -> None:
    if pattern is None:
        raise click.UsageError("--dry-run requires --matching")
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise InvalidRequest(f"{pattern!r} is not a regular expression: {error}") from None
    with connect(master) as store:
        found = [info.key for info in store.list_keys() if wanted.search(info.key)]
    if as_json:
        print_json({"would_remove": found})
        return
    for key in found:
        click.echo(printable(key))
    click.echo(f"{counted(len(found), 'key')} would be removed", err=True)


@COMMAND.command(short_help="Show or switch the eviction policy.")
@click.argument("name", required=False)
@click.option("--node", "node_id", default="", help="this node only (its id); default: all")
@store_options
def policy(name: str | None, node_id: str, master: Masters, as_json: bool) -> None:
    """Show the nodes' eviction policy, or switch it to NAME at run time; chunks and their order are kept."""
    with connect(master) as store:
        policies = perform(orders.policy, store, node_id, name)
    print_rows(as_json, policies, ("node", "policy"), policies.items())


def _serve(config: GatewayConfig) -> None:
    from tanghulu.store.gateway.main import serve  # here, so that other commands do not load FastAPI

    run(Role.GATEWAY, config, serve)


SERVE = command(
    "serve",
    GatewayConfig,
    _serve,
    "Serve the store over HTTP (and gRPC): values, listings, administration, events. Requests act "
    "with their own token.",
)
SERVE.short_help = "Serve the store over HTTP."

for _each in (*store_admin.COMMANDS, SERVE, store_top.COMMAND):
    COMMAND.add_command(_each)
