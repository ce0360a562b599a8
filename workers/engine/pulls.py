"""Blocks pulled from another worker's running prefill, before the request itself is here. Pure.

The conductor names the prompt and the growing export (`exports`). Its blocks not cached here are allocated at once, a
transfer fills them in order, and each is committed under its hash on arrival, so that any request may match it. The
request arrives after its first token, finds them like any cached prefix, and fetches the missing ones in the usual way,
from any source: it does not depend on the progress of the pull.

A pull has two ends, in any order: its transfer has ended (`done`), and it is no longer needed (`drop`): the request has
references of its own, or is not coming, or others need the room. Blocks that arrived are kept for the request until it
is dropped, and remain cached then; blocks not yet arrived belong to the transfer until it has ended.

A pull takes blocks that nothing else needs, and gives them back to requests waiting for room (`give_way`); its own
request then fetches all of its KV when its turn has come.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from tanghulu.hashing import TokenSequence
from tanghulu.session.outputs import KvSource
from tanghulu.types import BlockHash, RequestId
from tanghulu.workers.engine.block_pool import BlockPool
from tanghulu.workers.engine.step import FetchWanted

#: Most pulls at a time; each has a thread of the connector's that mostly waits.
MAX_PULLS = 16


@dataclass(slots=True, eq=False)
class Pull:
    """One prompt's leading full blocks: ``there`` have arrived (or were cached), ``coming`` belong to the transfer.

    ``ending`` is set when the transfer should end.
    """

    there: list[int]
    coming: list[int]
    sequence: TokenSequence
    hashes: list[BlockHash]
    ending: threading.Event = field(default_factory=threading.Event)
    is_wanted: bool = True
    is_transferring: bool = True


class Pulls:
    """All pulls of a worker, in the order in which they began. ``pool`` is the scheduler's."""

    def __init__(self, pool: BlockPool, block_tokens: int) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._pulls: dict[RequestId, Pull] = {}

    def __len__(self) -> int:
        return len(self._pulls)

    def begin(self, name: RequestId, sequence: TokenSequence, peer: KvSource, spare: int) -> FetchWanted | None:
        """Reserve blocks for the full blocks of the prompt ``sequence`` and return the part for the transfer to write.

        Returns None, holding nothing, if fewer than ``spare`` blocks would be left, or there are too many pulls.
        """
        if name in self._pulls or len(self._pulls) >= MAX_PULLS:
            return None
        hashes = list(sequence.block_hashes)
        there = self._pool.match(hashes)
        missing = len(hashes) - len(there)
        coming = self._pool.allocate(missing) if 0 < missing <= self._pool.num_available - spare else None
        if coming is None:
            self._pool.release(there, used=False, copied=True)
            return None
        self._pool.begin_transfer(coming)
        pull = self._pulls[name] = Pull(there, coming, sequence, hashes)
        first, num_tokens = len(there), len(hashes) * self._block_tokens
        return FetchWanted(name, first, tuple(coming), tuple(hashes[first:]), num_tokens, peer, ending=pull.ending)

    def is_transferring(self, name: RequestId | None) -> bool:
        """Return whether the pull reads its export: another read under the same session would take its leases."""
        pull = self._pulls.get(name) if name is not None else None
        return pull is not None and pull.is_transferring

    def arrived(self, name: RequestId, num_blocks: int) -> None:
        """Commit the next ``num_blocks`` blocks of the pull, which the transfer has written whole."""
        pull = self._pulls[name]
        came, pull.coming = pull.coming[:num_blocks], pull.coming[num_blocks:]
        assert len(came) == num_blocks
        self._pool.end_transfer(came)
        first = len(pull.hashes) - len(pull.coming) - num_blocks
        for index, block in enumerate(came, first):
            self._pool.commit(block, pull.hashes[index], pull.sequence, index)
        if pull.is_wanted:
            pull.there += came
        else:
            self._pool.release(came, used=False, copied=True)

    def done(self, name: RequestId) -> None:
        """Give back blocks that have not arrived: the transfer has ended, complete or not."""
        pull = self._pulls[name]
        self._pool.end_transfer(pull.coming)
        self._pool.release(pull.coming)
        pull.coming, pull.is_transferring = [], False
        if not pull.is_wanted:
            del self._pulls[name]

    def drop(self, name: RequestId) -> bool:
        """Keep nothing more for the pull's request; False if there is no such pull. Arrived blocks remain cached."""
        pull = self._pulls.get(name)
        if pull is None:
            return False
        pull.ending.set()
        if not pull.is_transferring:
            del self._pulls[name]
        self._pool.release(pull.there, used=False, copied=True)
        pull.there, pull.is_wanted = [], False
        return True

    def end_soon(self, name: RequestId | None) -> None:
        """Have the transfer end soon: the request is here and fetches the rest itself."""
        if name is not None and name in self._pulls:
            self._pulls[name].ending.set()

    def give_way(self) -> bool:
        """Drop the youngest pull that holds blocks; False if there is none."""
        youngest = next((name for name in reversed(self._pulls) if self._pulls[name].is_wanted), None)
        return youngest is not None and self.drop(youngest)

    def references(self) -> Counter[int]:
        """Count the references of pulls on each block."""
        return Counter(block for pull in self._pulls.values() for block in (*pull.there, *pull.coming))

    @property
    def num_blocks(self) -> int:
        """Most blocks that would come back if all pulls gave way."""
        return sum(len(pull.there) + len(pull.coming) for pull in self._pulls.values())

    @property
    def num_coming(self) -> int:
        """Blocks that transfers of pulls may write."""
        return sum(len(pull.coming) for pull in self._pulls.values())

    def check(self) -> None:
        assert len(self._pulls) <= MAX_PULLS
        for pull in self._pulls.values():
            assert pull.is_wanted or pull.is_transferring
            assert pull.is_transferring or not pull.coming, "nobody writes them"
            assert pull.is_wanted or not pull.there
            assert not pull.is_wanted or len(pull.there) + len(pull.coming) <= len(pull.hashes)
