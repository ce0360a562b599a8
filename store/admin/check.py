"""Check of the store: compare stored bytes with their checksums, and the directory with the nodes.

Every node compares its chunks with their checksums and lists them; the lists are compared with the master's. Chunks
come and go meanwhile, so a difference is checked a second time before it is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from tanghulu.errors import DeadlineExceeded, NodeUnavailable
from tanghulu.store.admin.rows import Row, plain
from tanghulu.store.admin.steps import Order, asking
from tanghulu.store.client.model import KeyInfo, NodeView
from tanghulu.store.protocol.messages import Verified, VerifiedPage


class Kind(Enum):
    """The kinds of damage that a check finds."""

    CORRUPT = "corrupt"  # the bytes do not match the checksums
    MISSING = "missing"  # the directory lists the node as a holder, but the node lacks the chunk
    UNLISTED = "unlisted"  # the node holds it, the directory does not list it
    SILENT = "silent"  # the node did not answer, so its chunks were not checked


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """A fault of one chunk on one node; an empty ``key`` means a fault of the node as a whole."""

    kind: Kind
    node: str
    key: str


#: A node verifies at most 256 MiB in a call, in a fraction of a second.
_PAGE_DEADLINE_S = 10.0


#: A callback that gets the number of checked nodes, and of all nodes.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The findings of a check of ``num_chunks`` chunks, and the findings ``left`` after a repair."""

    num_chunks: int
    findings: tuple[CheckFinding, ...]
    left: tuple[CheckFinding, ...]

    def row(self) -> Row:
        """Return the report as an object for JSON."""
        return {"num_chunks": self.num_chunks, "findings": plain(self.findings), "left": plain(self.left)}


def compare(listing: Iterable[KeyInfo], held: Mapping[str, Mapping[str, Verified]]) -> list[CheckFinding]:
    """Return the differences between the master's listing and the nodes' (node -> key -> chunk), and corrupt chunks."""
    listed = {(node, info.key): info.version for info in listing for node in info.nodes if node in held}
    findings = [
        CheckFinding(Kind.MISSING, node, key)
        for (node, key), version in listed.items()
        if key not in held[node] or held[node][key].version != version
    ]
    for node, chunks in held.items():
        for key, chunk in chunks.items():
            if chunk.corrupt:
                findings.append(CheckFinding(Kind.CORRUPT, node, key))
            elif listed.get((node, key)) != chunk.version:
                findings.append(CheckFinding(Kind.UNLISTED, node, key))
    return findings


def check(*, with_repair: bool, progress: Progress | None = None) -> Order[CheckReport]:
    """Verify the bytes of all chunks in memory and compare directory and nodes; optionally repair the findings."""
    findings, num_chunks = yield from find(progress)
    left = (yield from _repair()) if findings and with_repair else findings
    return CheckReport(num_chunks, tuple(findings), tuple(left))


def find(progress: Progress | None = None) -> Order[tuple[list[CheckFinding], int]]:
    """Return the findings common to two consecutive checks, and the number of chunks checked."""
    first, num_chunks = yield from _look(progress)
    if not first:
        return [], num_chunks
    again, num_chunks = yield from _look(progress)
    stands = set(again)
    return [finding for finding in first if finding in stands], num_chunks


def _repair() -> Order[list[CheckFinding]]:
    """Drop corrupt chunks and have the nodes report to the master again; return the remaining findings."""
    yield from _look(None, drop_corrupt=True, report=True)
    left, _ = yield from find()
    return left


def _look(
    progress: Progress | None, *, drop_corrupt: bool = False, report: bool = False
) -> Order[tuple[list[CheckFinding], int]]:
    views: list[NodeView] = yield asking("nodes")
    held: dict[str, dict[str, Verified]] = {}
    silent: list[CheckFinding] = []
    for number, view in enumerate(views):
        if progress is not None:
            progress(number, len(views))
        try:
            held[view.id] = yield from _held_by(view.id, drop_corrupt=drop_corrupt, report=report)
        except (NodeUnavailable, DeadlineExceeded):  # it is stalled, or has just left
            silent.append(CheckFinding(Kind.SILENT, view.id, ""))
    listing: list[KeyInfo] = yield asking("list_keys")
    return silent + compare(listing, held), sum(map(len, held.values()))


def _held_by(node: str, *, drop_corrupt: bool, report: bool) -> Order[dict[str, Verified]]:
    held: dict[str, Verified] = {}
    after, more = "", True
    while more:
        page: VerifiedPage = yield asking(
            "verify",
            node,
            after,
            drop_corrupt=drop_corrupt,
            report=report and not after,
            deadline_s=_PAGE_DEADLINE_S,
        )
        held.update((chunk.key, chunk) for chunk in page.chunks)
        after = page.chunks[-1].key if page.chunks else after
        more = page.more and bool(page.chunks)
    return held
