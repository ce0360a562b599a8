"""The prefix index, block -> holders: the mirror of workers' caches and of the store's directory.

Owns the mapping block hash -> holders. Independent of the transport of events, the kind of holder (the id of a worker
or store node, or a computing request), and the value of a hit.

Hashes are chained, so a block is only useful together with all preceding blocks: a holder's hit is its *leading run*.
The index keeps blocks in nodes (nodes.py): stretches that were reported together, or that a prompt has shown to be
consecutive. One dict maps each hash to its node; a node has a bitmap for each holder. So a look-up visits nodes, not
blocks: with 512 blocks in one node it looks up the first, compares the last, and counts the trailing ones of one bitmap
for each holder that lacks some block.

Events only state *which holder has which blocks*: an event may mix chains or come in the order of eviction. The order
within a node is proven by prompts. Where a prompt and an unproven order differ, the node is cut; nodes that a prompt
visits in succession are joined. Both take time proportional to the smaller part, once. An answer never relies on an
unproven order. docs/prefix_index.md has the worked example, docs/design/0009-prefix-index.md the figures.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import TypeVar

from msgspec import Struct

from tanghulu.conductor.index.nodes import HolderSlots, IndexNode, num_equal, slots
from tanghulu.types import BlockHash, InstanceId

#: Blocks kept by the index, about 1 GB; beyond it, those not recently matched by a prompt are dropped.
DEFAULT_MAX_BLOCKS = 8_000_000
#: Blocks of one event that go into one node, and the size limit of joined nodes.
MAX_EVENT_BLOCKS = 512
MAX_NODE_BLOCKS = 4096
#: Most new blocks of an event appended to the holder's last one, so that small events make no small nodes.
SMALL_EVENT_BLOCKS = 32
#: Nodes are not joined where more holders than this would have only a part: a system prompt held by a thousand workers
#: stays separate from the conversations after it, so that each look-up takes the thousand at once.
MAX_PARTIAL_HOLDERS = 32
#: The dict is rebuilt when it is this many times larger than its contents.
SHRINK_FACTOR = 4
SHRINK_MIN_BLOCKS = 1024


class Stored(Struct, frozen=True):
    """``holder`` can serve ``blocks``, in addition to its current ones."""

    holder: InstanceId
    blocks: Sequence[BlockHash]


class Removed(Struct, frozen=True):
    """``holder`` can no longer serve ``blocks``; unknown ones are no error."""

    holder: InstanceId
    blocks: Sequence[BlockHash]


class Cleared(Struct, frozen=True):
    """``holder`` no longer holds anything."""

    holder: InstanceId


PrefixEvent = Stored | Removed | Cleared
NodeT = TypeVar("NodeT", IndexNode, IndexNode | None)


class PrefixIndex:
    """Mapping block hash -> holders, fed by events. Not thread-safe: a look-up also reorganises nodes.

    ``max_blocks`` bounds the distinct blocks. Dropping a block is safe: it costs a hit, and a later event that removes
    it is no error.
    """

    def __init__(self, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        self.max_blocks = max_blocks
        self._node_of: dict[BlockHash, IndexNode] = {}
        self._nodes: OrderedDict[IndexNode, None] = OrderedDict()
        self._open: dict[int, IndexNode] = {}
        self._slots = HolderSlots()
        self._most_blocks = 0

    def __repr__(self) -> str:
        return f"<PrefixIndex {self.num_blocks} blocks in {len(self._nodes)} nodes, {len(self.holders)} holders>"

    @property
    def num_blocks(self) -> int:
        return len(self._node_of)

    @property
    def holders(self) -> list[InstanceId]:
        """All holders of at least one block."""
        return self._slots.holders

    def num_blocks_of(self, holder: InstanceId) -> int:
        return self._slots.num_blocks(holder)

    def apply(self, event: PrefixEvent) -> None:
        """Apply one event, in time proportional to its blocks. Events of one holder must come in order."""
        match event:
            case Stored(holder, blocks):
                for start in range(0, len(blocks), MAX_EVENT_BLOCKS):
                    self._store(holder, list(blocks[start : start + MAX_EVENT_BLOCKS]))
            case Removed(holder, blocks):
                slot = self._slots.find(holder)
                if slot is not None and blocks:
                    self._remove(slot, blocks if isinstance(blocks, list) else list(blocks))
                    self._shrink()
            case Cleared(holder):
                self.remove_holder(holder)

    def match(self, block_hashes: Sequence[BlockHash]) -> dict[InstanceId, int]:
        """Return each holder's hit blocks: the length of the leading run of ``block_hashes`` it holds.

        ``block_hashes`` are a prompt's, so that each implies all preceding ones. Holders without the first block are
        omitted.
        """
        node = self._node_of.get(block_hashes[0]) if block_hashes else None
        if node is None:
            return {}
        chain = block_hashes if isinstance(block_hashes, list) else list(block_hashes)
        num = len(node.blocks)
        if node.leads(chain) and (len(chain) == num or chain[num] not in self._node_of):
            node.touched = True
            return self._answer(node).copy()
        return self._match_over_nodes(chain)

    def leading_blocks(self, block_hashes: Sequence[BlockHash]) -> int:
        """Return the length of the leading run with *some* holder for each block: the part that can be fetched."""
        if not block_hashes or block_hashes[0] not in self._node_of:
            return 0
        chain = block_hashes if isinstance(block_hashes, list) else list(block_hashes)
        return sum(num for _, num in self._walk(chain))

    def remove_holder(self, holder: InstanceId) -> None:
        """Remove all blocks of ``holder``. Takes time proportional to its blocks and to the nodes of the index."""
        slot = self._slots.find(holder)
        if slot is None:
            return
        bit = 1 << slot
        for node in [n for n in self._nodes if n.full & bit or slot in n.partial]:
            self._release(node, slot, node.all_bits)
        self._shrink()

    def dump(self) -> Iterator[Stored]:
        """Yield events that make an empty index equal to this one; their blocks may be in any order."""
        for node in self._nodes:
            for slot in slots(node.holders):
                bits = node.bits(slot)
                held = [block for place, block in enumerate(node.blocks) if bits >> place & 1]
                yield Stored(self._slots.at(slot), held)

    def blocks_of(self, holder: InstanceId) -> set[BlockHash]:
        """Return all blocks of ``holder``. Takes time proportional to its blocks and to the nodes of the index."""
        slot = self._slots.find(holder)
        if slot is None:
            return set()
        held = ((n.blocks, n.bits(slot)) for n in self._nodes)
        return {block for blocks, bits in held if bits for place, block in enumerate(blocks) if bits >> place & 1}

    def check(self) -> None:
        held: dict[int, int] = {}
        for node in self._nodes:
            node.check()
            assert all(self._node_of[block] is node for block in node.blocks)
            for slot in slots(node.holders):
                held[slot] = held.get(slot, 0) + node.bits(slot).bit_count()
        assert sum(map(len, self._nodes)) == len(self._node_of) <= self.max_blocks
        self._slots.check(held)

    def _match_over_nodes(self, chain: list[BlockHash]) -> dict[InstanceId, int]:
        hits: dict[InstanceId, int] = {}
        alive, depth = 0, 0
        for node, num in self._walk(chain):
            if not depth:
                hits, alive = self._first(node, num)
            elif alive & ~node.full:
                alive = self._staying(alive, node, num, depth, hits)
            if not alive:
                return hits
            depth += num
        if alive:
            hits.update(dict.fromkeys(self._slots.names(alive), depth))
        return hits

    def _first(self, node: IndexNode, num: int) -> tuple[dict[InstanceId, int], int]:
        """Return the hits of holders whose run ends in the first node (``num`` blocks match), and the other slots."""
        if num < len(node):
            hits: dict[InstanceId, int] = {}
            return hits, self._staying(node.holders, node, num, 0, hits)
        return self._answer(node).copy(), node.full

    def _answer(self, node: IndexNode) -> dict[InstanceId, int]:
        """Return the hits of a prompt consisting of exactly ``node``; cached there."""
        if node.answer is None:
            node.answer = {self._slots.at(slot): run for slot, _, run in node.runs if run}
            node.answer.update(dict.fromkeys(self._slots.names(node.full), len(node)))
        return node.answer

    def _staying(self, alive: int, node: IndexNode, num: int, depth: int, hits: dict[InstanceId, int]) -> int:
        """Return the slots of ``alive`` with the first ``num`` blocks of ``node``; add other runs to ``hits``."""
        staying, leaving = alive & node.full, alive & ~node.full
        at = self._slots.at
        for slot, bit, run in node.runs:
            if alive & bit:
                leaving ^= bit
                if run >= num:
                    staying |= bit
                elif depth + run:
                    hits[at(slot)] = depth + run
        if leaving:
            hits.update(dict.fromkeys(self._slots.names(leaving), depth))
        return staying

    def _walk(self, chain: list[BlockHash]) -> Iterator[tuple[IndexNode, int]]:
        """Yield the nodes along a prompt, with the number of leading blocks matched in each; reorganises them."""
        depth, front = 0, None
        while depth < len(chain):
            node = self._node_of.get(chain[depth])
            if node is None:
                return
            if node.blocks[0] != chain[depth]:
                node = self._cut_at_wrong_block(node, chain, depth)
            num = node.common(chain, depth)
            depth += num
            if num == node.chained < len(node) and depth < len(chain):
                node = self._cut(node, 0, num)
            node.touched = True
            covered = num == len(node)
            yield node, num
            if front is not None and self._may_join(front, node):
                node = self._join(front, node)
            front = node if covered else None

    def _cut_at_wrong_block(self, node: IndexNode, chain: list[BlockHash], depth: int) -> IndexNode:
        """Split ``node`` where a prompt entered it in the middle: the blocks shared from there become a node."""
        start = node.blocks.index(chain[depth])
        span = min(len(node) - start, len(chain) - depth)
        num = num_equal(node.blocks[start : start + span], chain[depth : depth + span])
        return self._cut(node, start, len(node) if depth + num == len(chain) else start + num)

    def _cut(self, node: IndexNode, start: int, stop: int) -> IndexNode:
        """Return a node with only ``node``'s blocks from ``start`` to ``stop``."""
        taken = node.take(start, stop)
        if len(taken) <= len(node):
            self._adopt(taken)
            return taken
        node.trade(taken)
        self._adopt(taken)
        return node

    def _may_join(self, front: IndexNode, behind: IndexNode) -> bool:
        num_blocks = len(front) + len(behind)
        return num_blocks <= MAX_NODE_BLOCKS and front.num_partial_if(behind) <= MAX_PARTIAL_HOLDERS

    def _join(self, front: IndexNode, behind: IndexNode) -> IndexNode:
        """Return one node of both; ``behind`` follows ``front``, all of which is proven."""
        num_front, num_behind = len(front), len(behind)
        moved = behind.blocks
        front.join(behind)
        if num_front < num_behind:
            moved = front.blocks[:num_front]
            front.trade(behind)
            front, behind = behind, front
        del self._nodes[behind]
        self._node_of.update(dict.fromkeys(moved, front))
        return front

    def _adopt(self, node: IndexNode) -> None:
        self._nodes[node] = None
        self._node_of.update(dict.fromkeys(node.blocks, node))

    def _store(self, holder: InstanceId, blocks: list[BlockHash]) -> None:
        """Store ``blocks``: at least one, at most MAX_EVENT_BLOCKS; the list is kept."""
        slot, front = self._slots.take(holder), self._node_of.get(blocks[0])
        if front is not None:
            first, num = front.ahead(blocks)
            self._count(slot, front.hold(slot, ((1 << num) - 1) << first))
            blocks = blocks[num:]
            if first + num < len(front):
                front = None
        if blocks:
            self._store_one_by_one(slot, blocks, front)
            self._most_blocks = max(self._most_blocks, len(self._node_of))
            self._forget_beyond_cap()

    def _store_one_by_one(self, slot: int, blocks: list[BlockHash], front: IndexNode | None) -> None:
        """Store blocks one by one. ``front``: the node, if any, after whose end ``blocks`` were reported."""
        fresh, num_before = IndexNode(blocks, 1 << slot), len(self._node_of)
        found = list(map(self._node_of.setdefault, blocks, repeat(fresh)))
        num_new = len(self._node_of) - num_before
        self._count(slot, num_new)
        if num_new < len(blocks):
            fresh.blocks = list(dict.fromkeys(b for b, n in zip(blocks, found, strict=True) if n is fresh))
            for node, known in _by_node(found, blocks):
                if node is not fresh:
                    self._count(slot, node.hold(slot, node.stretch(known) or node.positions(known)))
            before, front = found[-num_new - 1], None
            if num_new and fresh.blocks == blocks[-num_new:] and before.blocks[-1] == blocks[-num_new - 1]:
                front = before
        if num_new:
            self._admit(slot, fresh, front)

    def _admit(self, slot: int, fresh: IndexNode, front: IndexNode | None) -> None:
        """Add a node to the index, or append its blocks to ``front``, or, if few, to the holder's previous report."""
        last = self._open.get(slot) if front is None and len(fresh) <= SMALL_EVENT_BLOCKS else front
        alone = last is front or (last is not None and last.full == fresh.full and not last.partial)
        if last is not None and last in self._nodes and alone and self._may_join(last, fresh):
            last.extend(slot, fresh.blocks)
            self._node_of.update(dict.fromkeys(fresh.blocks, last))
        else:
            self._nodes[fresh] = None
            self._open[slot] = fresh

    def _remove(self, slot: int, blocks: list[BlockHash]) -> None:
        """Remove ``blocks``, at least one."""
        first = self._node_of.get(blocks[0])
        if first is not None and first.full == 1 << slot and first.ends_backwards(blocks):
            self._release_tail(first, slot, len(blocks))
            return
        bits = 0 if first is None else first.stretch(blocks, first.bits(slot))
        if first is not None and bits:
            self._release(first, slot, bits)
            return
        for node, known in _by_node(list(map(self._node_of.get, blocks)), blocks):
            if node is not None:
                self._release(node, slot, node.stretch(known) or node.positions(known))

    def _release(self, node: IndexNode, slot: int, bits: int) -> None:
        num, orphans = node.release(slot, bits)
        self._count(slot, -num)
        if orphans == node.all_bits:
            self._drop(node)
        elif orphans:
            for block in node.delete(orphans):
                del self._node_of[block]

    def _release_tail(self, node: IndexNode, slot: int, num_blocks: int) -> None:
        """Remove the last ``num_blocks`` of a node held by ``slot`` alone, as most evictions do."""
        self._count(slot, -num_blocks)
        if num_blocks == len(node):
            self._drop(node)
            return
        node_of = self._node_of
        for block in node.shorten(num_blocks):
            del node_of[block]

    def _drop(self, node: IndexNode) -> None:
        del self._nodes[node]
        for block in node.blocks:
            del self._node_of[block]

    def _count(self, slot: int, num_blocks: int) -> None:
        if num_blocks and not self._slots.count(slot, num_blocks):
            self._open.pop(slot, None)

    def _forget_beyond_cap(self) -> None:
        """Drop the oldest nodes; one matched by a prompt since then gets a second chance (as in CLOCK)."""
        while len(self._node_of) > self.max_blocks:
            node = next(iter(self._nodes))
            if node.touched:
                node.touched = False
                self._nodes.move_to_end(node)
                continue
            for slot in slots(node.holders):
                self._count(slot, -node.bits(slot).bit_count())
            self._drop(node)

    def _shrink(self) -> None:
        """Release memory: a dict does not shrink by itself when entries are removed."""
        if SHRINK_FACTOR * len(self._node_of) < self._most_blocks and self._most_blocks > SHRINK_MIN_BLOCKS:
            self._node_of = dict(self._node_of)
            self._nodes = OrderedDict.fromkeys(self._nodes)
            self._most_blocks = len(self._node_of)


def _by_node(found: list[NodeT], blocks: list[BlockHash]) -> Iterable[tuple[NodeT, list[BlockHash]]]:
    """Group ``blocks`` by the node each was found in; usually that is one node."""
    if found.count(found[0]) == len(found):
        return [(found[0], blocks)]
    named: dict[NodeT, list[BlockHash]] = {}
    for node, block in zip(found, blocks, strict=True):
        named.setdefault(node, []).append(block)
    return named.items()
