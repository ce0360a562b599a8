"""Calls to masters: which one leads, when to repeat a call, and whether to accept an answer. Pure.

The logic names MASTER, the leading one, or an owner of key ranges. A call to MASTER goes to the last known leader, and
if that no longer leads or is away, to the next, until the deadline (see ``discovery.masters.Seeking``); one to an owner
is tried once. An answer counts if no later term is known, and once its master has proven that its lease is valid (see
``LeaseProofs``): by earlier answers, or by the answer to PROVE, which costs a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tanghulu.discovery.masters import ATTEMPT_S, MasterFinder, Seeking
from tanghulu.errors import DeadlineExceeded, MasterUnavailable, NodeUnavailable, NotLeader, TanghuluError
from tanghulu.masters import Masters
from tanghulu.rpc.fast_client import Call, Reply
from tanghulu.store.client.logic.context import Context
from tanghulu.store.client.logic.effects import MASTER, CallPeers, Logic, PeerId, Sleep, is_owner, owner_address
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.messages import ProveReply, ProveRequest
from tanghulu.store.protocol.terms import Signature
from tanghulu.types import Address

#: A shorter wait for the master is not logged.
_WORTH_MENTIONING_S = 0.1


class MasterCalls:
    """The calls of one client. ``answer_s``: seconds per answer; ``waits``: whether to wait for a lone master."""

    def __init__(self, context: Context, finder: MasterFinder, answer_s: float, *, waits: bool) -> None:
        self.finder = finder
        self.has_met_master = False  # set by the driver: only a master seen before is waited for
        self._context, self._now_s = context, context.clock.now_s
        self._answer_s, self._waits = answer_s, waits

    def is_current(self, address: str) -> bool:
        """Return whether MASTER is the master at ``address``, to this client's knowledge."""
        return not self.finder.several or address == str(self.finder.current)

    def limit_s(self, peer: PeerId, left_s: float) -> float:
        """Return the seconds for one answer of ``peer``; a stalled owner gets no longer than one of several masters."""
        left_s = min(left_s, self._answer_s)
        return min(left_s, ATTEMPT_S) if is_owner(peer) else left_s

    def call(self, calls: Sequence[tuple[PeerId, Call[Any]]], left_s: float, *, waits: bool) -> Logic[list[Any]]:
        """Return the outcome of each call, to MASTER or to several owners; ``waits``: see CallPeers."""
        left_s = self.limit_s(calls[0][0], left_s)
        if calls[0][0] == MASTER:
            return [(yield from self._call_leader(calls, left_s, waits=waits))]
        outcomes = yield from self._exchange(calls, left_s)
        return [
            master_failure(owner_address(peer), outcome) if isinstance(outcome, TanghuluError) else outcome
            for (peer, _), outcome in zip(calls, outcomes, strict=True)
        ]

    def _call_leader(
        self, calls: Sequence[tuple[PeerId, Call[Any]]], left_s: float, *, waits: bool
    ) -> Logic[Reply[Any] | TanghuluError]:
        """Return the leader's answer; while no master answers, repeat until the deadline if waiting is allowed."""
        finder, began_s, seeking = self.finder, self._now_s(), None
        waits = waits and self.has_met_master and self._waits
        may_be_stale = waits and not finder.several  # a master that restarted has closed its old connections
        attempt_s = min(left_s, ATTEMPT_S) if finder.several else left_s
        while True:
            tried = finder.current
            (outcome,) = yield from self._exchange(calls, attempt_s)
            if not isinstance(outcome, MasterUnavailable | NodeUnavailable | DeadlineExceeded):
                return outcome
            now_s = self._now_s()
            if may_be_stale and isinstance(outcome, NodeUnavailable):
                may_be_stale, attempt_s = False, max(began_s + left_s - now_s, 0.0)
                continue
            failure = master_failure(finder.masters, outcome, now_s - began_s)
            seeking = seeking or Seeking(finder, began_s, left_s, waits=waits)
            pause_s = seeking.pause_s(tried, failure, now_s)
            if pause_s is None:
                return failure
            yield Sleep(pause_s)
            attempt_s = seeking.attempt_s(self._now_s())

    def _exchange(
        self, calls: Sequence[tuple[PeerId, Call[Any]]], left_s: float
    ) -> Logic[list[Reply[Any] | TanghuluError]]:
        sent_s = self._now_s()
        outcomes = yield CallPeers(calls, left_s)
        return (yield from self.accepted(calls, outcomes, sent_s, sent_s + left_s))

    def accepted(
        self,
        calls: Sequence[tuple[PeerId, Call[Any]]],
        outcomes: list[Reply[Any] | TanghuluError],
        sent_s: float,
        until_s: float,
    ) -> Logic[list[Reply[Any] | TanghuluError]]:
        """Return the acceptable ``outcomes`` of ``calls`` sent at ``sent_s``; NotLeader replaces the others."""
        for place, (peer, _) in enumerate(calls):
            outcome = outcomes[place] = admitted(self._context, outcomes[place], sent_s, peer)
            if isinstance(outcome, TanghuluError):
                continue
            signature: Signature = outcome.message.signature
            if not self._context.masters.proofs_of(peer).accepts(signature, self._now_s()):
                outcomes[place] = (yield from self._prove(peer, signature, until_s)) or outcome
        return outcomes

    def _prove(self, peer: PeerId, signature: Signature, until_s: float) -> Logic[TanghuluError | None]:
        """Have ``peer`` prove the lease of its answer with ``signature``; return the error if it did not."""
        proofs, sent_s = self._context.masters.proofs_of(peer), self._now_s()
        (proof,) = yield CallPeers([(peer, methods.PROVE.call(ProveRequest()))], max(until_s - sent_s, 0.0))
        if isinstance(proof, TanghuluError):
            return proof
        reply: ProveReply = proof.message
        proofs.record(reply.signature.term, sent_s, reply.renewals, reply.ttl_ms / 1000)
        if proofs.accepts(signature, self._now_s()):
            return None
        return NotLeader("the master could not prove that its lease is valid; retry to find the one that leads")


def master_failure(master: Masters | Address, error: TanghuluError, waited_s: float = 0.0) -> TanghuluError:
    """Return the caller's error for a failed connection to ``master``, or for its silence; its own errors stay."""
    if isinstance(error, NodeUnavailable | DeadlineExceeded):
        how_long = f" for {waited_s:.1f} s" if waited_s >= _WORTH_MENTIONING_S else ""
        return MasterUnavailable(f"no master answered at {master}{how_long}: {error.message}")
    return error


def admitted(
    context: Context, outcome: Reply[Any] | TanghuluError, sent_s: float = float("-inf"), peer: PeerId = MASTER
) -> Reply[Any] | TanghuluError:
    """Return a master's answer, or NotLeader if a leader of a later term is known here or to a mapped node.

    ``sent_s``: time of the call, for ``LeaseProofs``. Only the caller can decide whether an owner still owns the keys
    of its answer (see ``KeyOwners.accepts``).
    """
    if isinstance(outcome, TanghuluError) or not outcome.message.signature.term.number:
        return outcome  # one that was not elected: there is no other
    signature, fence = outcome.message.signature, context.masters.fence
    if peer == MASTER:
        for mapped in tuple(context.mapped.values()):
            fence.admits(mapped.index.term)
        if not fence.admits(signature.term):
            term, newest = signature.term.number, fence.newest.number
            return NotLeader(f"a master of term {term} answered, and one of term {newest} has led since")
    context.masters.proofs_of(peer).answered(signature, sent_s)
    return outcome
