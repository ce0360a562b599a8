"""``tanghulu store check``: the findings of ``store.admin.check`` as a table, and the exit codes."""

from __future__ import annotations

from collections import Counter

import click
from rich.console import Console
from rich.progress import Progress

from tanghulu.cli.printing import counted, print_json, print_table, store_options
from tanghulu.errors import ChecksumMismatch, NodeUnavailable, TanghuluError
from tanghulu.masters import Masters
from tanghulu.store.admin.check import CheckReport, Kind, check
from tanghulu.store.admin.steps import perform
from tanghulu.store.client import connect


class Disagreement(TanghuluError):
    """The directory and the nodes do not agree on who holds what."""

    code = "DISAGREEMENT"


@click.command("check", short_help="Verify all bytes, compare directory and nodes.")
@click.option("--repair", "with_repair", is_flag=True, help="drop corrupt chunks and let the nodes report again")
@store_options
def COMMAND(with_repair: bool, master: Masters, as_json: bool) -> None:
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

        def told(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        return perform(store, check(with_repair=with_repair, progress=told))


def _complain(left: Counter[Kind]) -> None:
    """Raise an error for the worst finding that is left."""
    if left[Kind.CORRUPT]:
        raise ChecksumMismatch(f"{counted(left[Kind.CORRUPT], 'corrupt chunk')}; see --repair")
    if left[Kind.SILENT]:
        raise NodeUnavailable(f"{counted(left[Kind.SILENT], 'node')} did not answer; the others were looked at")
    if left:
        raise Disagreement(f"the directory and the nodes differ in {counted(left.total(), 'chunk')}; see --repair")
