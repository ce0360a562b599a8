"""The prompts of recent requests, by the names of their blocks: how far a new one has been seen, and where it differs.

A radix tree with one root for each model and salt. A segment has the blocks that a request added to the prompts before
it, with their tokens and those of its partial last block; it hangs from the block of its parent that precedes it. So
tokens that prompts share are kept once. Names are chained: a known block has known predecessors, and the end of the
known part is found by bisection.

Example, blocks of 2: [1 2 3 4 5] makes the segment {12, 34, tail 5}. [1 2 3 9 9 9] shares one block and adds the
segment {39, 99} behind it; its break is at token 3: of what may follow the block 12, the 3 4 of the first is nearest.

Memory is bounded: the segment that was requested least recently is forgotten first, children before their parents.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from tanghulu.hashing import TOKEN_BYTES, Tokens, TokenSequence
from tanghulu.types import BlockHash, InstanceId

#: Memory of a segment, and of a block besides its tokens: its name, and a place in a dict and in a list.
SEGMENT_BYTES, BLOCK_BYTES = 1024, 200
#: Most tokens of a difference behind which prompts resume (a time of day), and least tokens that are alike again.
RESUME_TOKENS = 16
#: Other namespaces in which a new prompt is looked for: a client may have as many as it sends salts.
_MOST_NAMESPACES = 16


class Namespace(NamedTuple):
    """The things on which the names of a prompt's blocks depend besides its tokens."""

    model: str
    fingerprint: bytes
    salt: bytes


class Use(NamedTuple):
    """A request for a prompt, of ``client`` at ``at_s``, for ``worker`` to compute."""

    namespace: Namespace
    client: str
    worker: InstanceId
    at_s: float


class Segment:
    """Blocks that a request of ``client`` added behind block ``start - 1`` of ``parent``; ``worker`` computed them.

    ``uses`` counts the requests for them; ``outcome`` tells how the first of these ended, "" for well or not yet.
    """

    __slots__ = (
        "children",
        "client",
        "first_s",
        "key",
        "last_s",
        "names",
        "outcome",
        "parent",
        "start",
        "tokens",
        "uses",
        "worker",
    )

    def __init__(
        self, parent: Segment | None, start: int, names: Sequence[BlockHash], tokens: Tokens, size: int, client: str
    ) -> None:
        self.parent, self.start, self.names, self.tokens, self.client = parent, start, tuple(names), tokens, client
        #: Sorts siblings so that those with the longest common beginning are neighbours.
        self.key = _key_of(tokens, size)
        self.children: dict[int, list[Segment]] = {}
        self.first_s = self.last_s = 0.0
        self.uses = 0
        self.worker = InstanceId("")
        self.outcome = ""

    @property
    def path(self) -> Iterator[Segment]:
        """The segment and those before it, without the root."""
        segment = self
        while segment.parent is not None:
            yield segment
            segment = segment.parent

    @property
    def end(self) -> int:
        """Number of blocks of the prompt up to the end of the segment."""
        return self.start + len(self.names)

    @property
    def num_bytes(self) -> int:
        return SEGMENT_BYTES + BLOCK_BYTES * len(self.names) + TOKEN_BYTES * len(self.tokens)


class Break(NamedTuple):
    """A break: ``shared`` tokens of a prompt are those of ``other``, an earlier one.

    ``theirs`` are the tokens that followed there, as far as they are known.
    """

    shared: int
    other: Segment
    theirs: Tokens

    @property
    def continues(self) -> bool:
        """Whether the earlier prompt had ended there, so that this one continues it."""
        return not len(self.theirs)

    def resumes(self, prompt: Tokens) -> bool:
        """Whether both prompts are alike again soon behind the break, which something short has caused."""
        behind = self.shared + RESUME_TOKENS
        wanted = prompt[behind : behind + RESUME_TOKENS].tobytes()
        at_most = self.theirs[: 3 * RESUME_TOKENS].tobytes()
        return len(wanted) == RESUME_TOKENS * TOKEN_BYTES and wanted in at_most


def _key(segment: Segment) -> bytes:
    return segment.key


class PromptHistory:
    """See above. ``max_bytes`` bounds the estimated memory."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        #: Time of the latest request for something forgotten; 0 if nothing was.
        self.forgotten_s = 0.0
        self._segment_of: dict[BlockHash, Segment] = {}
        self._roots: dict[BlockHash, tuple[Namespace, Segment]] = {}
        #: The roots below which prompts begin with these tokens.
        self._starts: dict[bytes, list[BlockHash]] = {}
        #: By the time of the last request, parents behind their children.
        self._recent: OrderedDict[Segment, BlockHash] = OrderedDict()

    def num_known(self, names: Sequence[BlockHash]) -> int:
        """Return the number of leading blocks that earlier requests had."""
        return bisect_left(range(len(names)), True, key=lambda at: names[at] not in self._segment_of)

    def segment_of(self, name: BlockHash) -> Segment | None:
        return self._segment_of.get(name)

    def break_of(self, root: BlockHash, names: Sequence[BlockHash], prompt: Tokens, size: int) -> Break | None:
        """Return where ``prompt`` leaves the earlier ones with its ``root``; None if it shares no token with any.

        ``size`` is the number of tokens of a block, ``names`` are its known blocks.
        """
        if (found := self._behind(root, names)) is None:
            return None
        segment, at = found
        # The next block is unknown, so whatever is known differs in it.
        key = _key_of(prompt[at * size :], size)
        own = segment.tokens[(at - segment.start) * size :]
        near = [(_num_shared(_key_of(own, size), key), segment, own)] if len(own) else []
        siblings = segment.children.get(at, [])
        place = bisect_left(siblings, key, key=_key)
        for other in siblings[max(0, place - 1) : place + 1]:
            near.append((_num_shared(other.key, key), other, other.tokens))
        # Of a prompt and what was answered to it, another prompt leaves the answer.
        num_equal, other, theirs = max(
            near, key=lambda each: (each[0], len(each[2]) > each[0]), default=(0, segment, own)
        )
        shared = at * size + num_equal
        return Break(shared, other, theirs[num_equal:]) if shared else None

    def same_elsewhere(
        self, root: BlockHash, prompt: Tokens, size: int, client: str
    ) -> tuple[Namespace, Segment, int] | None:
        """Return another namespace with the longest beginning of ``prompt``, of whole blocks, and their number.

        One where ``client`` had it is preferred, so that other clients' prompts do not affect its explanation. Of
        namespaces that are the same up to the first block, the latest are examined.
        """

        def is_own(segment: Segment) -> bool:
            return segment.client == client

        best: tuple[Namespace, Segment, int] | None = None
        for other in self._starts.get(_key_of(prompt, size), ())[-_MOST_NAMESPACES:]:
            if other == root:
                continue
            namespace, segment = self._roots[other]
            found, num_blocks = _follow(segment, prompt, size)
            if num_blocks and (best is None or (is_own(found), num_blocks) > (is_own(best[1]), best[2])):
                best = namespace, found, num_blocks
        return best

    def add(self, sequence: TokenSequence, use: Use, *, is_answered: bool = False) -> Segment | None:
        """Add the prompt ``sequence``; return its segment if there is a new one.

        With its answer it counts as no further use.
        """
        names, tokens, size, root = sequence.block_hashes, sequence.tokens, sequence.block_tokens, sequence.root
        known = self.num_known(names)
        if root not in self._roots:
            self._roots[root] = use.namespace, Segment(None, 0, (), tokens[:0], size, use.client)
        found = self._behind(root, names[:known])
        assert found is not None
        parent, _ = found
        rest, added = tokens[known * size :], None
        if known < len(names) or (len(rest) and not self._has_tail(parent, known, rest, size)):
            added = Segment(parent, known, names[known:], rest.copy(), size, use.client)
            added.first_s = use.at_s
            insort(parent.children.setdefault(known, []), added, key=_key)
            if not known:
                self._starts.setdefault(added.key, []).append(root)
            self._segment_of.update(zip(added.names, repeat(added), strict=False))
            self.num_bytes += added.num_bytes
        for segment in (added or parent).path:
            segment.last_s, segment.worker = use.at_s, use.worker
            segment.uses += not is_answered
            self._recent[segment] = root
            self._recent.move_to_end(segment)
        self._trim()
        return added

    def extend(self, segment: Segment, sequence: TokenSequence) -> bool:
        """Add the answer to a prompt to its ``segment``; ``sequence`` has both. False if the segment cannot grow."""
        size = sequence.block_tokens
        # The key of less than a block would change.
        is_last = not segment.children and segment in self._recent
        if not is_last or len(segment.tokens) < size:
            return False
        names = sequence.block_hashes[segment.end :]
        if names and names[0] in self._segment_of:
            return False
        tokens = sequence.tokens[segment.start * size :]
        self.num_bytes -= segment.num_bytes
        segment.names, segment.tokens = (*segment.names, *names), tokens.copy()
        self._segment_of.update(zip(names, repeat(segment), strict=False))
        self.num_bytes += segment.num_bytes
        self._trim()
        return True

    def _has_tail(self, segment: Segment, at: int, rest: Tokens, size: int) -> bool:
        """Return whether something begins with ``rest``, less than a block, behind block ``at`` of the prompt."""
        siblings, key = segment.children.get(at, []), _key_of(rest, size)
        if _key_of(segment.tokens[(at - segment.start) * size :], size).startswith(key):
            return True
        place = bisect_left(siblings, key, key=_key)
        return place < len(siblings) and siblings[place].key.startswith(key)

    def _behind(self, root: BlockHash, names: Sequence[BlockHash]) -> tuple[Segment, int] | None:
        """Return the segment of the last of these known blocks, or the root's, and their number."""
        if names:
            return self._segment_of[names[-1]], len(names)
        entry = self._roots.get(root)
        return (entry[1], 0) if entry is not None else None

    def _trim(self) -> None:
        while self.num_bytes > self.max_bytes and self._recent:
            self._forget(*self._recent.popitem(last=False))

    def _forget(self, segment: Segment, root: BlockHash) -> None:
        assert not segment.children, "a child was requested before its parent"
        parent = segment.parent
        assert parent is not None
        siblings = parent.children[segment.start]
        siblings.remove(segment)
        if not siblings:
            del parent.children[segment.start]
        if parent.parent is None:
            self._starts[segment.key].remove(root)
            if not self._starts[segment.key]:
                del self._starts[segment.key]
            if not parent.children:
                del self._roots[root]
        for name in segment.names:
            del self._segment_of[name]
        self.num_bytes -= segment.num_bytes
        self.forgotten_s = max(self.forgotten_s, segment.last_s)

    def check(self) -> None:
        assert self.num_bytes == sum(each.num_bytes for each in self._recent)
        assert self.num_bytes <= self.max_bytes or not self._recent
        assert len(self._segment_of) == sum(len(each.names) for each in self._recent)
        seen: set[Segment] = set()
        for each in self._recent:
            assert all(child in seen for children in each.children.values() for child in children), each
            seen.add(each)


def _follow(segment: Segment, prompt: Tokens, size: int) -> tuple[Segment, int]:
    """Return the segment, below ``segment``, with the longest beginning of ``prompt``, and its number of blocks."""
    at = 0
    while siblings := segment.children.get(at, []):
        rest = prompt[at * size :]
        key = _key_of(rest, size)
        place = bisect_left(siblings, key, key=_key)
        if place == len(siblings) or siblings[place].key != key or len(key) < size * TOKEN_BYTES:
            break
        segment = siblings[place]
        at = min(segment.end, segment.start + _num_equal(segment.tokens, rest) // size)
    return segment, at


def _key_of(tokens: Tokens, size: int) -> bytes:
    """Return the first block, or what there is of it, as bytes that sort as its tokens do."""
    return tokens[:size].astype(">u4").tobytes()


def _num_shared(one: bytes, other: bytes) -> int:
    """Return the number of leading tokens that two keys share."""
    num = min(len(one), len(other))
    differing = int.from_bytes(one[:num], "big") ^ int.from_bytes(other[:num], "big")
    return (num - (differing.bit_length() + 7) // 8) // TOKEN_BYTES


def _num_equal(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> int:
    """Return the number of leading tokens that are equal."""
    num = min(len(one), len(other))
    if not num:
        return 0
    differs = one[:num] != other[:num]
    first = int(differs.argmax())
    return first if differs[first] else num
