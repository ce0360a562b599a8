"""Blocks being computed by workers: the prompts sent that have not given their first token.

Pure. Hashes are chained, so two prompts that agree in block i agree in all blocks before it, and the length of their
common prefix is found by bisection. Example: prompts of 2000 blocks that share 700 take 11 comparisons. Only prompts
that begin with the same block are compared at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tanghulu.types import BlockHash, InstanceId


@dataclass(frozen=True, slots=True)
class _Sent:
    worker: InstanceId
    hashes: Sequence[BlockHash]


class InFlightBlocks:
    """The prompts being computed, by worker. One entry per submission in progress, which the dispatcher bounds."""

    def __init__(self) -> None:
        self._sent: dict[str, _Sent] = {}
        self._by_first: dict[BlockHash, dict[str, _Sent]] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def begin(self, wire_id: str, worker: InstanceId, hashes: Sequence[BlockHash]) -> None:
        """Record a prompt with these full blocks sent to ``worker``; ``hashes`` must not change afterwards."""
        assert wire_id not in self._sent
        if hashes:
            sent = self._sent[wire_id] = _Sent(worker, hashes)
            self._by_first.setdefault(hashes[0], {})[wire_id] = sent

    def end(self, wire_id: str) -> None:
        """Remove a submission after its first token or its end; no error if already removed."""
        sent = self._sent.pop(wire_id, None)
        if sent is None:
            return
        first = sent.hashes[0]
        alike = self._by_first[first]
        del alike[wire_id]
        if not alike:
            del self._by_first[first]

    def match(self, hashes: Sequence[BlockHash]) -> dict[InstanceId, int]:
        """Return the number of leading blocks of ``hashes`` that each worker is computing, if any."""
        found: dict[InstanceId, int] = {}
        if not hashes:
            return found
        for sent in self._by_first.get(hashes[0], {}).values():
            known, theirs = found.get(sent.worker, 0), sent.hashes
            # Most share exactly the prefix already found, as with a system prompt: one comparison is enough.
            if known < len(hashes) and known < len(theirs) and theirs[known] == hashes[known]:
                found[sent.worker] = _shared(hashes, theirs, known + 1)
        return found

    def check(self) -> None:
        listed = {wire_id: sent for alike in self._by_first.values() for wire_id, sent in alike.items()}
        assert listed == self._sent
        assert all(self._by_first.values())


def _shared(one: Sequence[BlockHash], other: Sequence[BlockHash], at_least: int) -> int:
    """Return the length of the common prefix, or ``at_least`` if that is longer. Bisection over the chain."""
    low, high = at_least, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
