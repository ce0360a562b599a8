"""What the commands of ``tanghulu store`` share: their common options, tables for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from tanghulu.config import PREFIX
from tanghulu.discovery.open import MASTER_HELP

F = TypeVar("F", bound=Callable[..., Any])
_PIPED_WIDTH = 200


def store_options(function: F) -> F:
    """The options that every command of the group has."""
    master = click.option(
        "--master", default="127.0.0.1:7400", show_default=True, envvar=PREFIX + "MASTER", help=MASTER_HELP
    )
    as_json = click.option("--json", "as_json", is_flag=True, help="print JSON for programs")
    return as_json(master(function))


def plain(value: Any) -> Any:
    """Dataclasses, enums and tuples as what JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def print_json(value: Any) -> None:
    """JSON that people can read too."""
    click.echo(json.dumps(value, indent=2))


def print_table(columns: tuple[str, ...], rows: Iterable[Iterable[Any]]) -> None:
    """Rows under ``columns``; without columns, as they come."""
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
