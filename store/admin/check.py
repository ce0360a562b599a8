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
from tanghulu.store.client.aio import AsyncClient
from tanghulu.store.client.model import KeyInfo
from tanghulu.store.protocol.messages import Verified


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


async def check(store: AsyncClient, *, with_repair: bool, progress: Progress | None = None) -> CheckReport:
    """Verify the bytes of all chunks in memory and compare directory and nodes; optionally repair the findings."""
    findings, num_chunks = await find(store, progress)
    left = await _repair(store) if findings and with_repair else findings
    return CheckReport(num_chunks, tuple(findings), tuple(left))


async def find(store: AsyncClient, progress: Progress | None = None) -> tuple[list[CheckFinding], int]:
    """Return the findings common to two consecutive checks, and the number of chunks checked."""
    first, num_chunks = await _look(store, progress)
    if not first:
        return [], num_chunks
    again, num_chunks = await _look(store, progress)
    stands = set(again)
    return [finding for finding in first if finding in stands], num_chunks


async def _repair(store: AsyncClient) -> list[CheckFinding]:
    """Drop corrupt chunks and have the nodes report to the master again; return the remaining findings."""
    await _look(store, None, drop_corrupt=True, report=True)
    left, _ = await find(store)
    return left


async def _look(
    store: AsyncClient, progress: Progress | None, *, drop_corrupt: bool = False, report: bool = False
) -> tuple[list[CheckFinding], int]:
    views = await store.nodes()
    held: dict[str, dict[str, Verified]] = {}
    silent: list[CheckFinding] = []
    for number, view in enumerate(views):
        if progress is not None:
            progress(number, len(views))
        try:
            held[view.id] = await _held_by(store, view.id, drop_corrupt=drop_corrupt, report=report)
        except (NodeUnavailable, DeadlineExceeded):  # it is stalled, or has just left
            silent.append(CheckFinding(Kind.SILENT, view.id, ""))
    return silent + compare(await store.list_keys(), held), sum(map(len, held.values()))


async def _held_by(store: AsyncClient, node: str, *, drop_corrupt: bool, report: bool) -> dict[str, Verified]:
    held: dict[str, Verified] = {}
    after, more = "", True
    while more:
        page = await store.verify(
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
