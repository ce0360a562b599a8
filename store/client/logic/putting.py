"""One item of a put on its way, and what a node's answer makes of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tanghulu.errors import NodeUnavailable, QuotaExceeded, TanghuluError
from tanghulu.store.client.logic import messages
from tanghulu.store.client.logic.context import Context
from tanghulu.store.client.logic.effects import PeerId
from tanghulu.store.client.model import PutOptions, Status
from tanghulu.store.protocol import checksums as sums
from tanghulu.store.protocol.types import NewChunk


@dataclass(slots=True)
class Putting:
    """One item on its way."""

    new: NewChunk
    value: memoryview
    replicas: int
    pieces: tuple[memoryview, ...] = ()  # of a large value that lies in several; ``value`` is empty then
    candidates: list[PeerId] = field(default_factory=list)
    placed: list[PeerId] = field(default_factory=list)
    over_quota: list[PeerId] = field(default_factory=list)  # nodes that may take it a little later
    existed: bool = False
    error: TanghuluError | None = None
    done: bool = False
    running: sums.RunningChecksums | None = None  # that has seen the beginning of the value

    def failed(self, node: PeerId, error: TanghuluError) -> None:
        """``node`` did not take it."""
        self.error = error
        if isinstance(error, QuotaExceeded):
            self.over_quota.append(node)

    def status(self) -> Status:
        """The outcome."""
        if self.placed:
            return Status(self.new.key, False, len(self.placed))
        if self.existed:
            return Status(self.new.key, True, 1)
        return Status(self.new.key, error=self.error or NodeUnavailable("no store node took the value"))


def take_results(
    context: Context, node: PeerId, items: Sequence[Putting], outcome: messages.AnyReply | TanghuluError
) -> None:
    """The node's answer to PUT or COMMIT of ``items``."""
    if isinstance(outcome, TanghuluError):
        if isinstance(outcome, NodeUnavailable):
            context.nodes.expire()
        for item in items:
            item.error = outcome
        return
    for item, result in zip(items, messages.put_results(outcome), strict=True):
        if isinstance(result, TanghuluError):
            item.failed(node, result)
        elif result:
            item.existed = True
        else:
            item.placed.append(node)


def checksums_of(item: Putting, options: PutOptions) -> sums.Checksums:
    """Those that were given, or computed now."""
    given = item.new.checksums
    if given.parts:
        return given
    return (
        sums.compute_joined(item.pieces, options.part_bytes)
        if item.pieces
        else sums.compute(item.value, options.part_bytes)
    )
