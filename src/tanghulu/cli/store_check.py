"""``tanghulu store check``: are the bytes what was put, and do the directory and the nodes agree?

Every node compares its chunks with their checksums and names them; that is laid beside the master's listing. Chunks
come and go meanwhile, so what does not agree is looked at a second time before it is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import click
from rich.console import Console
from rich.progress import Progress

from tanghulu.cli.printing import counted, plain, print_json, print_table, store_options
from tanghulu.errors import ChecksumMismatch, DeadlineExceeded, NodeUnavailable, TanghuluError
from tanghulu.store.client import Client, connect
from tanghulu.store.client.model import KeyInfo, Verified
from tanghulu.types import Masters


class Kind(Enum):
    """What is wrong."""

    CORRUPT = "corrupt"  # the bytes are not what the checksums say
    MISSING = "missing"  # the directory says that the node holds it, the node does not
    UNLISTED = "unlisted"  # the node holds it, the directory does not know
    SILENT = "silent"  # the node did not answer, so its chunks were not looked at


@dataclass(frozen=True, slots=True)
class Finding:
    """One chunk on one node with which something is wrong; ``key`` "": the node as a whole."""

    kind: Kind
    node: str
    key: str


#: A node verifies at most 256 MiB in a call, in a fraction of a second.
_PAGE_DEADLINE_S = 10.0


class Disagreement(TanghuluError):
    """The directory and the nodes do not agree on who holds what."""

    code = "DISAGREEMENT"


def compare(listing: Iterable[KeyInfo], held: Mapping[str, Mapping[str, Verified]]) -> list[Finding]:
    """Where the master's listing and what the nodes hold (node -> key -> chunk) differ, and what is corrupt."""
    listed = {(node, info.key): info.version for info in listing for node in info.nodes if node in held}
    findings = [
        Finding(Kind.MISSING, node, key)
        for (node, key), version in listed.items()
        if key not in held[node] or held[node][key].version != version
    ]
    for node, chunks in held.items():
        for key, chunk in chunks.items():
            if chunk.corrupt:
                findings.append(Finding(Kind.CORRUPT, node, key))
            elif listed.get((node, key)) != chunk.version:
                findings.append(Finding(Kind.UNLISTED, node, key))
    return findings


def _held_by(store: Client, node: str, *, drop_corrupt: bool, report: bool) -> dict[str, Verified]:
    held: dict[str, Verified] = {}
    after, more = "", True
    while more:
        page = store.verify(
            node, after, drop_corrupt=drop_corrupt, report=report and not after, deadline_s=_PAGE_DEADLINE_S
        )
        held.update((chunk.key, chunk) for chunk in page.chunks)
        after = page.chunks[-1].key if page.chunks else after
        more = page.more and bool(page.chunks)
    return held


def _find(store: Client, *, show: bool, drop_corrupt: bool = False, report: bool = False) -> tuple[list[Finding], int]:
    nodes = [view.id for view in store.nodes()]
    console = Console(stderr=True)
    held: dict[str, dict[str, Verified]] = {}
    silent: list[Finding] = []
    with Progress(console=console, disable=not (show and console.is_terminal)) as progress:
        for node in progress.track(nodes, description="verifying"):
            try:
                held[node] = _held_by(store, node, drop_corrupt=drop_corrupt, report=report)
            except (NodeUnavailable, DeadlineExceeded):  # it stands still, or has just gone
                silent.append(Finding(Kind.SILENT, node, ""))
    return silent + compare(store.list_keys(), held), sum(map(len, held.values()))


def find(store: Client, *, show: bool = False) -> tuple[list[Finding], int]:
    """(what is wrong twice in a row, number of chunks looked at)."""
    first, num_chunks = _find(store, show=show)
    if not first:
        return [], num_chunks
    again, num_chunks = _find(store, show=show)
    stands = set(again)
    return [finding for finding in first if finding in stands], num_chunks


def repair(store: Client) -> list[Finding]:
    """Drop corrupt chunks and have the nodes tell the master again what they hold; what is wrong after that."""
    _find(store, show=False, drop_corrupt=True, report=True)
    return find(store)[0]


@click.command("check", short_help="Verify all bytes, compare directory and nodes.")
@click.option("--repair", "with_repair", is_flag=True, help="drop corrupt chunks; have the nodes report again")
@store_options
def COMMAND(with_repair: bool, master: Masters, as_json: bool) -> None:
    """Verify the bytes of all chunks in memory, and that the directory and the nodes agree.

    Exit code 0: all is well, or was repaired; 6: corrupt chunks; 4: a node that the master takes for alive did not
    answer, the others were looked at; 1: only the directory and the nodes differ.
    """
    with connect(master) as store:
        findings, num_chunks = find(store, show=not as_json)
        left = repair(store) if findings and with_repair else findings
    if as_json:
        rows = [plain(each) for each in findings]
        print_json({"num_chunks": num_chunks, "findings": rows, "left": [plain(each) for each in left]})
    elif findings:
        rows = [(each.kind.value, each.node, each.key, "" if each in left else "repaired") for each in findings]
        print_table(("what", "node", "key", ""), rows)
    else:
        click.echo(f"{num_chunks} chunks: all is well")
    _complain(Counter(each.kind for each in left))


def _complain(left: Counter[Kind]) -> None:
    """Raise the worst that is left."""
    if left[Kind.CORRUPT]:
        raise ChecksumMismatch(f"{counted(left[Kind.CORRUPT], 'corrupt chunk')}; see --repair")
    if left[Kind.SILENT]:
        raise NodeUnavailable(f"{counted(left[Kind.SILENT], 'node')} did not answer; the others were looked at")
    if left:
        raise Disagreement(f"the directory and the nodes differ in {counted(left.total(), 'chunk')}; see --repair")
