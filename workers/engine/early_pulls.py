"""Blocks that come from another worker's prefill while that goes on, before the request itself is here. Pure.

The conductor names the prompt and the export that grows (`exports`). What of it is not cached here gets blocks at
once, a transfer fills them in order, and each that has come is committed under its hash, so that anybody may match it.
The request comes behind its first token, finds them as it would any cached prefix, and fetches what is missing by the
usual way, from whoever has it: nothing of it depends on how far the pull came.

    (nothing) --begin--> PULLING --done--> HELD --drop--> (nothing)
                            '--drop--> DRAINING --done--> (nothing)

A pull takes blocks that nothing else needs, and gives them back to requests that wait for room (`give_way`); its own
request then fetches all of its KV when its turn has come.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from tanghulu.session.outputs import KvSource
from tanghulu.types import BlockHash, RequestId
from tanghulu.workers.engine.block_pool import BlockPool
from tanghulu.workers.engine.step_plan import FetchWanted

#: Pulls at a time, each of which has a thread of the connector's that mostly waits.
MAX_PULLS = 16


class EarlyPullState(Enum):
    """Where a pull stands."""

    PULLING = "a transfer fills its blocks; those that have come can be matched"
    HELD = "the transfer has ended; what came is kept for the request"
    DRAINING = "nobody wants it any more; the transfer may still write the blocks that have not come"
    GONE = "it holds nothing"


class EarlyPullEvent(Enum):
    """What happens to a pull."""

    DONE = "the transfer has ended"
    DROP = "the request has its own references, or is not coming, or somebody else needs the room"


_S, _E = EarlyPullState, EarlyPullEvent
TRANSITIONS: dict[tuple[EarlyPullState, EarlyPullEvent], EarlyPullState] = {
    (_S.PULLING, _E.DONE): _S.HELD,
    (_S.PULLING, _E.DROP): _S.DRAINING,
    (_S.HELD, _E.DROP): _S.GONE,
    (_S.DRAINING, _E.DROP): _S.DRAINING,
    (_S.DRAINING, _E.DONE): _S.GONE,
}


@dataclass(slots=True, eq=False)
class EarlyPull:
    """One prompt's leading full blocks: ``there`` have come (or were cached), ``coming`` belong to the transfer."""

    name: RequestId
    there: list[int]
    coming: list[int]
    hashes: list[BlockHash]
    state: EarlyPullState = EarlyPullState.PULLING

    def on(self, event: EarlyPullEvent) -> EarlyPullState:
        """Move along the table; an unknown pair is a programmer's error."""
        following = TRANSITIONS.get((self.state, event))
        assert following is not None, f"pull {self.name}: {event.name} in {self.state.name}"
        self.state = following
        return following


class EarlyPulls:
    """All pulls of a worker, in the order in which they began. ``pool`` is the scheduler's."""

    def __init__(self, pool: BlockPool, block_tokens: int) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._pulls: dict[RequestId, EarlyPull] = {}
        self._left: list[RequestId] = []

    def __len__(self) -> int:
        return len(self._pulls)

    def begin(self, name: RequestId, hashes: list[BlockHash], peer: KvSource, spare: int) -> FetchWanted | None:
        """Reserve blocks for the prompt's full blocks ``hashes`` and return what the transfer is to write into them.

        None, and nothing is held, if fewer than ``spare`` blocks would be left, or there are too many pulls.
        """
        if name in self._pulls or len(self._pulls) >= MAX_PULLS:
            return None
        there = self._pool.match(hashes)
        missing = len(hashes) - len(there)
        coming = self._pool.allocate(missing) if 0 < missing <= self._pool.num_available - spare else None
        if coming is None:
            self._pool.release(there, used=False)
            return None
        self._pool.begin_transfer(coming)
        self._pulls[name] = EarlyPull(name, there, coming, hashes)
        num_tokens = len(hashes) * self._block_tokens
        return FetchWanted(name, len(there), tuple(coming), tuple(hashes[len(there) :]), num_tokens, peer)

    def is_transferring(self, name: RequestId | None) -> bool:
        """Whether the pull reads its export: another read of it under the same session would take its leases."""
        pull = self._pulls.get(name) if name is not None else None
        return pull is not None and pull.state is not EarlyPullState.HELD

    def arrived(self, name: RequestId, num_blocks: int) -> None:
        """Commit the next ``num_blocks`` blocks of the pull, which the transfer has written whole."""
        pull = self._pulls[name]
        came, pull.coming = pull.coming[:num_blocks], pull.coming[num_blocks:]
        assert len(came) == num_blocks
        self._pool.end_transfer(came)
        first = len(pull.hashes) - len(pull.coming) - num_blocks
        for block, block_hash in zip(came, pull.hashes[first : first + num_blocks], strict=True):
            self._pool.commit(block, block_hash)
        if pull.state is EarlyPullState.DRAINING:
            self._pool.release(came, used=False)
        else:
            pull.there += came

    def done(self, name: RequestId) -> None:
        """Give back what has not come: the transfer has ended, as far as it came."""
        pull = self._pulls[name]
        self._pool.end_transfer(pull.coming)
        self._pool.release(pull.coming)
        pull.coming = []
        if pull.on(EarlyPullEvent.DONE) is EarlyPullState.GONE:
            del self._pulls[name]

    def drop(self, name: RequestId) -> bool:
        """Keep nothing for the pull's request any more; False if there is no such pull. What came stays cached."""
        pull = self._pulls.get(name)
        if pull is None:
            return False
        if pull.on(EarlyPullEvent.DROP) is EarlyPullState.GONE:
            del self._pulls[name]
        else:
            self._left.append(name)
        self._pool.release(pull.there, used=False)
        pull.there = []
        return True

    def leave(self, name: RequestId | None) -> None:
        """Have the transfer end soon: the request is here and fetches the rest itself."""
        if name is not None and self.is_transferring(name):
            self._left.append(name)

    def give_way(self) -> bool:
        """Drop the youngest pull that holds blocks; False if there is none."""
        for pull in reversed(self._pulls.values()):
            if pull.state is not EarlyPullState.DRAINING:
                return self.drop(pull.name)
        return False

    def take_left(self) -> list[RequestId]:
        """Return the pulls whose transfers are to end, since the last call."""
        left, self._left = self._left, []
        return left

    def references(self) -> Counter[int]:
        """Count the references of pulls on each block."""
        return Counter(block for pull in self._pulls.values() for block in (*pull.there, *pull.coming))

    @property
    def num_blocks(self) -> int:
        """At most so many blocks come back when all pulls have given way."""
        return sum(len(pull.there) + len(pull.coming) for pull in self._pulls.values())

    @property
    def num_coming(self) -> int:
        """Blocks that transfers of pulls may write."""
        return sum(len(pull.coming) for pull in self._pulls.values())

    def check(self) -> None:
        assert len(self._pulls) <= MAX_PULLS
        for name, pull in self._pulls.items():
            assert pull.name == name
            assert pull.state is not EarlyPullState.GONE
            assert not pull.coming or pull.state is not EarlyPullState.HELD, "nobody writes them"
            assert not pull.there or pull.state is not EarlyPullState.DRAINING
            assert pull.state is EarlyPullState.DRAINING or len(pull.there) + len(pull.coming) <= len(pull.hashes)
