"""Shared parts of the commands: options, tables for people, JSON for programs, private files."""

from __future__ import annotations

import functools
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tanghulu.auth.credentials import Credentials, TlsFiles, read_token
from tanghulu.masters import Masters
from tanghulu.runtime.config import PREFIX
from tanghulu.runtime.master_options import (
    MASTER_HELP,
    TENANT_HELP,
    TLS_CA_HELP,
    TLS_CERT_HELP,
    TLS_KEY_HELP,
    TOKEN_HELP,
)
from tanghulu.types import printable

_PIPED_WIDTH = 200
_MASTER = click.option(
    "--master", default="127.0.0.1:7400", show_default=True, envvar=PREFIX + "MASTER", help=MASTER_HELP
)
_TENANT = click.option("--tenant", default="", envvar=PREFIX + "TENANT", help=TENANT_HELP)
_TOKEN = click.option("--token", default="", envvar=PREFIX + "TOKEN", help=TOKEN_HELP)
_TLS = tuple(
    click.option(f"--tls-{name}", default="", envvar=f"{PREFIX}TLS_{name.upper()}", metavar="FILE", help=text)
    for name, text in (("key", TLS_KEY_HELP), ("cert", TLS_CERT_HELP), ("ca", TLS_CA_HELP))
)
_JSON = click.option("--json", "as_json", is_flag=True, help="print JSON for programs")


def store_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options common to all commands of the group; ``master`` is passed as Masters with credentials."""

    @functools.wraps(function)
    def command(
        *args: Any, master: str, tenant: str, token: str, tls_cert: str, tls_key: str, tls_ca: str, **options: Any
    ) -> None:
        credentials = Credentials(tenant, read_token(token), TlsFiles(tls_cert, tls_key, tls_ca))
        function(*args, master=Masters.parse(master).showing(credentials), **options)

    for add in (_JSON, *_TLS, _TOKEN, _TENANT, _MASTER):
        command = add(command)
    return command


def counted(number: int, what: str) -> str:
    """Return "1 node", "3 nodes"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def wide_console() -> Console:
    """Return the console for tables: as wide as the terminal, or unbounded without one."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPED_WIDTH)


def print_json(value: Any) -> None:
    """Print ``value`` as indented JSON."""
    click.echo(json.dumps(value, indent=2))


def print_outcome(as_json: bool, value: Any, text: str) -> None:
    """Print ``value`` as JSON for programs, or ``text`` for people."""
    if as_json:
        print_json(value)
    else:
        click.echo(text)


def print_table(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """Print rows under ``columns``; without columns, the rows alone."""
    wide_console().print(table_of(columns, rows))


def print_rows(as_json: bool, value: Any, columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """Print ``value`` as JSON for programs, or a table for people."""
    if as_json:
        print_json(value)
    else:
        print_table(columns, rows)


def table_of(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> Table:
    """Return a table for ``wide_console``."""
    table = Table(*columns, show_header=bool(columns), box=None, pad_edge=False)
    for row in rows:
        cells = [Text(printable(str(cell))) for cell in row]  # not str: rich would parse "[x]" in a key as markup
        for _ in range(0 if columns else len(cells) - len(table.columns)):
            table.add_column(overflow="fold")
        table.add_row(*cells)
    for column in table.columns:
        column.overflow = "fold"
    return table


def show_live(console: Console, shown: Callable[[], Table], interval_s: float, count: int | None = None) -> None:
    """Refresh a table on the terminal every ``interval_s``, ``count`` times; without one until Ctrl-C, on all of it."""
    with Live(shown(), console=console, auto_refresh=False, screen=count is None) as display:
        for _ in itertools.count() if count is None else range(count):
            time.sleep(interval_s)
            display.update(shown(), refresh=True)


def write_private(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace the file ``path``, at once and with this mode from the start."""
    scratch = path.with_name(f"{path.name}.new")
    scratch.unlink(missing_ok=True)
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
    scratch.replace(path)
