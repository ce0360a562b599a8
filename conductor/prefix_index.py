"""Who holds which block: the mirror of workers' caches and of the store's directory.

Owns the mapping block hash -> holders and its inverse. Does not know how events travel, what a holder is (a worker's or
a store node's id), or what a hit is worth.

Most blocks share a few sets of holders, so equal sets are one object. Walking a prompt's blocks then mostly compares
identities: with holders A and B of blocks 0-9 and A alone of 10-19, `match` intersects twice for 20 blocks. Hashes are
chained, so a block can only be of use where all blocks in front of it are: a holder's hit is its *leading run*.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tanghulu.types import BlockHash, InstanceId

#: Distinct sets of holders that are kept to be shared; beyond it sharing starts anew.
MAX_SHARED_SETS = 4096

Holders = frozenset[InstanceId]


@dataclass(frozen=True, slots=True)
class Stored:
    """``holder`` can serve ``blocks``, besides what it holds already."""

    holder: InstanceId
    blocks: Sequence[BlockHash]


@dataclass(frozen=True, slots=True)
class Removed:
    """``holder`` cannot serve ``blocks`` any more; unknown ones are no error."""

    holder: InstanceId
    blocks: Sequence[BlockHash]


@dataclass(frozen=True, slots=True)
class Cleared:
    """``holder`` holds nothing any more."""

    holder: InstanceId


PrefixEvent = Stored | Removed | Cleared


class PrefixIndex:
    """block hash -> holders, fed by events. All methods take time in the blocks they name alone."""

    def __init__(self) -> None:
        self._holders: dict[BlockHash, Holders] = {}
        self._blocks: dict[InstanceId, set[BlockHash]] = {}
        self._shared: dict[Holders, Holders] = {}

    def __repr__(self) -> str:
        return f"<PrefixIndex {self.num_blocks} blocks, {len(self._blocks)} holders>"

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that somebody holds."""
        return len(self._holders)

    @property
    def holders(self) -> list[InstanceId]:
        """All who hold at least one block."""
        return list(self._blocks)

    def num_blocks_of(self, holder: InstanceId) -> int:
        """Blocks that ``holder`` holds."""
        return len(self._blocks.get(holder, ()))

    def apply(self, event: PrefixEvent) -> None:
        """Take one event; events of one holder must come in order."""
        match event:
            case Stored(holder, blocks):
                self._store(holder, blocks)
            case Removed(holder, blocks):
                self._remove(holder, blocks)
            case Cleared(holder):
                self.remove_holder(holder)

    def match(self, block_hashes: Sequence[BlockHash]) -> dict[InstanceId, int]:
        """Hit blocks of each holder: the length of the leading run of ``block_hashes`` that it holds.

        Holders without the first block are left out. Stops at the first block that no holder's run reaches.
        """
        hits: dict[InstanceId, int] = {}
        running: Holders | None = None
        previous: Holders | None = None
        num_blocks = 0
        for block_hash in block_hashes:
            holders = self._holders.get(block_hash)
            if holders is None:
                break
            if holders is not previous:
                still = holders if running is None else running & holders
                if running is not None and len(still) < len(running):
                    hits.update(dict.fromkeys(running - still, num_blocks))
                running, previous = still, holders
                if not still:
                    return hits
            num_blocks += 1
        if running:
            hits.update(dict.fromkeys(running, num_blocks))
        return hits

    def leading_blocks(self, block_hashes: Sequence[BlockHash]) -> int:
        """Length of the leading run of which *somebody* holds each block: what can be fetched from all together."""
        for index, block_hash in enumerate(block_hashes):
            if block_hash not in self._holders:
                return index
        return len(block_hashes)

    def remove_holder(self, holder: InstanceId) -> None:
        """Forget all that ``holder`` held."""
        blocks = self._blocks.pop(holder, None)
        if blocks is not None:
            for block_hash in blocks:
                self._drop(holder, block_hash)
            self._shared.clear()

    def check(self) -> None:
        """The two directions say the same; nothing is empty; equal sets that are shared are one object."""
        for block_hash, holders in self._holders.items():
            assert holders, f"{block_hash.hex()} has no holder"
            assert all(block_hash in self._blocks[h] for h in holders)
        for holder, blocks in self._blocks.items():
            assert blocks, f"{holder} holds nothing and is listed"
            assert all(holder in self._holders[b] for b in blocks)
        assert len(self._shared) <= MAX_SHARED_SETS
        assert all(key is value for key, value in self._shared.items())

    def _store(self, holder: InstanceId, blocks: Iterable[BlockHash]) -> None:
        own = self._blocks.setdefault(holder, set())
        alone = self._share(frozenset((holder,)))
        for block_hash in blocks:
            if block_hash in own:
                continue
            own.add(block_hash)
            others = self._holders.get(block_hash)
            self._holders[block_hash] = alone if others is None else self._share(others | alone)
        if not own:
            del self._blocks[holder]

    def _remove(self, holder: InstanceId, blocks: Iterable[BlockHash]) -> None:
        own = self._blocks.get(holder)
        if own is None:
            return
        for block_hash in blocks:
            if block_hash in own:
                own.discard(block_hash)
                self._drop(holder, block_hash)
        if not own:
            del self._blocks[holder]

    def _drop(self, holder: InstanceId, block_hash: BlockHash) -> None:
        holders = self._holders[block_hash]
        if len(holders) == 1:
            del self._holders[block_hash]
        else:
            self._holders[block_hash] = self._share(holders - {holder})

    def _share(self, holders: Holders) -> Holders:
        known = self._shared.get(holders)
        if known is not None:
            return known
        if len(self._shared) >= MAX_SHARED_SETS:
            self._shared.clear()
        self._shared[holders] = holders
        return holders
