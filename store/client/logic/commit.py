"""The end of a put: the state of one item, updated by the answers of the master and of nodes. Pure.

The client may commit chunks that a node is about to hold: it calls the master while, or before, the bytes arrive. The
master treats accepted chunks as held until the node confirms them, and revokes them after ``PROMISE_S`` (see
``store.master.directory.pending_commits``). So neither the node, nor the client where it does not ask the node, relies
on the master's answer for longer than ``RELIED_S``. Chunks that the master neither accepts nor reports as existing are
committed by the node itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tanghulu.errors import KeysMoved, NodeUnavailable, QuotaExceeded, TanghuluError
from tanghulu.store.client.logic import messages
from tanghulu.store.client.logic.context import Context
from tanghulu.store.client.logic.directory_client import refresh_owners
from tanghulu.store.client.logic.effects import MASTER, CallPeers, Deadline, Logic, PeerId
from tanghulu.store.client.logic.key_owners import counts
from tanghulu.store.client.model import Status
from tanghulu.store.protocol import checksums as sums
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.messages import CommitKeysRequest, PutReply
from tanghulu.store.protocol.terms import NO_TERM, Term
from tanghulu.store.protocol.types import RELIED_S, ClientCommit, CommitResult, NewChunk


@dataclass(slots=True)
class PutOp:
    """One item of a put in progress."""

    new: NewChunk
    value: memoryview
    pieces: tuple[memoryview, ...] = ()  # of a large value in several pieces; ``value`` is empty then
    candidates: list[PeerId] = field(default_factory=list)
    placed: list[PeerId] = field(default_factory=list)
    over_quota: list[PeerId] = field(default_factory=list)  # nodes that may accept it a little later
    existed: bool = False
    error: TanghuluError | None = None
    done: bool = False
    running: sums.RunningChecksums | None = None  # that covers the beginning of the value

    def take_result(self, node: PeerId, result: bool | TanghuluError) -> None:
        """Take the answer of ``node``: whether the key existed there, or why it did not accept the value."""
        if isinstance(result, TanghuluError):
            self.error = result
            if isinstance(result, QuotaExceeded):
                self.over_quota.append(node)
        elif result:
            self.existed = True
        else:
            self.placed.append(node)

    def checksums(self, part_bytes: int) -> sums.Checksums:
        """Return the value's checksums: given by the caller, or computed now."""
        given = self.new.checksums
        if given.parts:
            return given
        return sums.compute_joined(self.pieces, part_bytes) if self.pieces else sums.compute(self.value, part_bytes)

    def status(self) -> Status:
        """Return the outcome."""
        if self.placed:
            return Status(self.new.key, False, len(self.placed))
        if self.existed:
            return Status(self.new.key, True, 1)
        return Status(
            self.new.key,
            error=self.error
            or NodeUnavailable("no store node accepted the value; check that nodes run and are not draining"),
        )


class CommitCall:
    """The calls by which a client commits new chunks of one run of a node, and the decoding of their answers.

    There is one of ``calls`` for each master that owns some of the keys; keys without an owner are committed by the
    node. ``term`` is the earliest term among the masters' answers. ``moved``: a master has refused its keys, or is
    away.
    """

    def __init__(self, context: Context, node: PeerId, generation: int, items: Sequence[NewChunk]) -> None:
        self.term, self.moved = NO_TERM, False
        self._masters, self._news, owners = context.masters, items, context.masters.owners
        self._parts: dict[PeerId, Sequence[int]] = {}  # positions, by call
        if owners is None:
            self._parts[MASTER] = range(len(items))
        else:
            self._parts.update(owners.split((at, owners.range_of(new.key)) for at, new in enumerate(items)))
        self.calls: list[tuple[PeerId, messages.AnyCall]] = []
        for peer, positions in self._parts.items():
            commits = []
            for new in map(items.__getitem__, positions):
                term = context.masters.fence.newest if owners is None else owners.term_of(new.key)
                commits.append(ClientCommit(node, generation, new.key, new.version, new.size_bytes, term))
            self.calls.append((peer, methods.COMMIT_KEYS.call(CommitKeysRequest(commits))))

    def results(self, answers: Sequence[messages.AnyReply | TanghuluError | None]) -> list[CommitResult]:
        """Return one result per item, from an answer for each of ``calls``; ASK_NODE replaces an invalid answer."""
        results, terms = [CommitResult.ASK_NODE] * len(self._news), []
        for (peer, positions), answer in zip(self._parts.items(), answers, strict=True):
            if answer is None or isinstance(answer, TanghuluError):
                is_away = answer is not None and peer != MASTER
                self.moved = self.moved or is_away or isinstance(answer, KeysMoved)
            elif len(answer.message.results) == len(positions) and self._counts(peer, positions, answer):
                terms.append(answer.message.signature.term)
                for position, result in zip(positions, answer.message.results, strict=True):
                    results[position] = result
        self.term = min(terms, default=NO_TERM)
        return results

    def _counts(self, peer: PeerId, positions: Sequence[int], answer: messages.AnyReply) -> bool:
        owners = self._masters.owners
        numbers = [] if owners is None else [owners.range_of(self._news[position].key) for position in positions]
        return counts(owners, peer, numbers, answer.message.signature)


def commit_by_client(
    context: Context, deadline: Deadline, node: PeerId, generation: int, items: Sequence[NewChunk]
) -> Logic[list[CommitResult]]:
    """Commit chunks whose bytes are in the node's memory, one or several in one call; return a result for each.

    An answer that took longer than ``RELIED_S`` is ignored. This does not wait for an absent master: the node commits
    when it is back.
    """
    commit, called_s = CommitCall(context, node, generation, items), context.clock.now_s()
    answers = yield CallPeers(commit.calls, deadline.remaining_s() / 2, waits=False)
    if context.clock.now_s() - called_s > RELIED_S:
        answers = [each if isinstance(each, TanghuluError) else None for each in answers]
    results = commit.results(answers)
    if _knows_later_owners(context, node, commit.term):
        results = [CommitResult.ASK_NODE if each is CommitResult.ACCEPTED else each for each in results]
    if commit.moved:
        yield from refresh_owners(context, MASTER)
    return results


def _knows_later_owners(context: Context, node: PeerId, term: Term) -> bool:
    """Return whether the node has seen a range change hands after masters answered with no later term than ``term``.

    It may have reported to the new owner already, without these chunks; so the node has to commit them.
    """
    mapped = context.mapped.get(node)
    if mapped is None or context.masters.owners is None:
        return False
    known = mapped.index.term
    return known.cluster == term.cluster and known.number > term.number


def take_results(
    context: Context, node: PeerId, ops: Sequence[PutOp], answer: messages.AnyReply | TanghuluError
) -> None:
    """Take the node's answer to PUT or COMMIT of ``ops``, or its error for RESERVE."""
    if isinstance(answer, TanghuluError):
        if isinstance(answer, NodeUnavailable):
            context.nodes.expire()
        for op in ops:
            op.error = answer
        return
    message: PutReply = answer.message
    context.masters.fence.admits(message.term)
    for op, result in zip(ops, message.results, strict=True):
        op.take_result(node, result)
