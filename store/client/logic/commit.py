"""The end of a put: the state of one item, and what the answers of the master and of nodes make of it. Pure.

The client may commit chunks that a node is about to hold: it calls the master while, or before, the bytes arrive. The
master takes what it accepts for held until the node confirms it, and takes it back after ``PROMISE_S`` (see
``store.master.directory.pending_commits``). So nobody relies on its answer for longer than ``RELIED_S``, neither the
node nor, where it does not ask the node, the client. What the master does not accept, and does not have as existing,
the node commits itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tanghulu.errors import NodeUnavailable, QuotaExceeded, TanghuluError
from tanghulu.store.client.logic import messages
from tanghulu.store.client.logic.context import Context
from tanghulu.store.client.logic.effects import MASTER, CallPeers, Deadline, Logic, PeerId
from tanghulu.store.client.model import Status
from tanghulu.store.protocol import checksums as sums
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.messages import CommitKeysRequest, PutReply
from tanghulu.store.protocol.terms import NO_TERM, Term
from tanghulu.store.protocol.types import RELIED_S, ClientCommit, CommitResult, NewChunk


@dataclass(slots=True)
class PutOp:
    """One item of a put on its way."""

    new: NewChunk
    value: memoryview
    pieces: tuple[memoryview, ...] = ()  # of a large value that lies in several; ``value`` is empty then
    candidates: list[PeerId] = field(default_factory=list)
    placed: list[PeerId] = field(default_factory=list)
    over_quota: list[PeerId] = field(default_factory=list)  # nodes that may take it a little later
    existed: bool = False
    error: TanghuluError | None = None
    done: bool = False
    running: sums.RunningChecksums | None = None  # that has seen the beginning of the value

    def take_result(self, node: PeerId, result: bool | TanghuluError) -> None:
        """What ``node`` answered: whether the key existed there, or why it did not take the value."""
        if isinstance(result, TanghuluError):
            self.error = result
            if isinstance(result, QuotaExceeded):
                self.over_quota.append(node)
        elif result:
            self.existed = True
        else:
            self.placed.append(node)

    def checksums(self, part_bytes: int) -> sums.Checksums:
        """The value's checksums: those that the caller gave, or computed now."""
        given = self.new.checksums
        if given.parts:
            return given
        return sums.compute_joined(self.pieces, part_bytes) if self.pieces else sums.compute(self.value, part_bytes)

    def status(self) -> Status:
        """The outcome."""
        if self.placed:
            return Status(self.new.key, False, len(self.placed))
        if self.existed:
            return Status(self.new.key, True, 1)
        return Status(self.new.key, error=self.error or NodeUnavailable("no store node took the value"))


class CommitCall:
    """The call by which a client commits new chunks that one run of a node is to hold, and how its answer reads.

    ``term`` is the newest that the client knows; the attribute is that in which the master has answered.
    """

    def __init__(self, node: PeerId, generation: int, items: Sequence[NewChunk], term: Term = NO_TERM) -> None:
        said: list[ClientCommit] = []
        for new in items:
            said.append(ClientCommit(node, generation, new.key, new.version, new.size_bytes, *term))
        self._num_items, self.term = len(said), NO_TERM
        self.call: messages.AnyCall
        if self._num_items == 1:
            self.call = methods.COMMIT_KEY.call(said[0])
        else:
            self.call = methods.COMMIT_KEYS.call(CommitKeysRequest(said))

    def results(self, answer: messages.AnyReply | TanghuluError | None) -> list[CommitResult]:
        """One for each item; ASK_NODE for all where there is no proper answer. None: the master was not called."""
        if answer is None or isinstance(answer, TanghuluError):
            return [CommitResult.ASK_NODE] * self._num_items
        self.term = Term(answer.message.term, answer.message.term_of)
        if self._num_items == 1:
            return [answer.message.commit_result]
        results: list[CommitResult] = answer.message.commit_results
        return results if len(results) == self._num_items else [CommitResult.ASK_NODE] * self._num_items


def commit_by_client(
    context: Context, deadline: Deadline, node: PeerId, generation: int, items: Sequence[NewChunk]
) -> Logic[list[CommitResult]]:
    """Commit chunks whose bytes are in the node's memory, one or several in one call; a result for each.

    An answer that took longer than ``RELIED_S`` counts for nothing. A master that is away is not waited for here: the
    node commits when it is back.
    """
    commit, called_s = CommitCall(node, generation, items, context.fence.newest), context.clock.now_s()
    (answer,) = yield CallPeers(((MASTER, commit.call),), deadline.remaining_s() / 2, waits=False)
    if context.clock.now_s() - called_s > RELIED_S:
        answer = None
    return commit.results(answer)


def take_results(
    context: Context, node: PeerId, ops: Sequence[PutOp], answer: messages.AnyReply | TanghuluError
) -> None:
    """The node's answer to PUT or COMMIT of ``ops``, or its error for RESERVE."""
    if isinstance(answer, TanghuluError):
        if isinstance(answer, NodeUnavailable):
            context.nodes.expire()
        for op in ops:
            op.error = answer
        return
    message: PutReply = answer.message
    context.fence.admits(message.term, message.term_of)
    for op, result in zip(ops, message.results, strict=True):
        op.take_result(node, result)
