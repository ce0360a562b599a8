"""The master's word on chunks that a node is about to hold, asked by the client that writes them. Pure.

The master takes what it accepts for held until the node confirms it, and takes it back after ``PROMISE_S`` (see
``store.master.directory.pending_commits``). So nobody relies on the word for longer than ``RELIED_S``, neither the
node nor, where it does not ask the node, the client.
"""

from __future__ import annotations

from collections.abc import Sequence

from tanghulu.errors import TanghuluError
from tanghulu.store.client.logic import messages
from tanghulu.store.protocol.types import NewChunk, Proclamation, Verdict


class Question:
    """The master's verdicts on some new chunks of one life of a node."""

    def __init__(self, node: str, generation: int, items: Sequence[NewChunk]) -> None:
        self._num_items = len(items)
        said = [Proclamation(node, generation, new.key, new.version, new.size_bytes) for new in items]
        self.call = messages.proclaim(said[0]) if len(said) == 1 else messages.proclaim_many(said)

    def verdicts(self, outcome: messages.AnyReply | TanghuluError | None) -> list[Verdict]:
        """One for each item, of the answer; None: it could not be asked."""
        verdicts: list[Verdict] = []
        if outcome is not None and not isinstance(outcome, TanghuluError):
            verdicts = [messages.verdict(outcome)] if self._num_items == 1 else messages.verdicts(outcome)
        return verdicts if len(verdicts) == self._num_items else [Verdict.ASK_NODE] * self._num_items
