"""Keeps what nodes have told each master's directory, beside the production's own books, and looks at its answers.

The rule: a key is never called missing while a node that is let in there holds it, confirmed, and has yet to tell it.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

from tanghulu.store.master.directory.announcement import Announced, NodeAnnouncement
from tanghulu.store.master.directory.ranges import RangeDirectories
from tanghulu.store.protocol.key_slots import range_of
from tanghulu.store.protocol.types import ClientCommit, CommitResult
from tanghulu.types import ChunkKey


class ToldChunks:
    """What each node has told each directory since it was let in, by key and version."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._told: dict[tuple[RangeDirectories, str], set[tuple[str, int]]] = defaultdict(set)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Have all directories watched."""
        books, gone, forgotten = self, RangeDirectories.node_gone, RangeDirectories.forget_range
        announced, committed = RangeDirectories.announce, RangeDirectories.commit_by_client
        incomplete = RangeDirectories.is_incomplete

        def node_gone(self: RangeDirectories, node_id: str) -> None:
            gone(self, node_id)
            books._told.pop((self, node_id), None)

        def forget_range(self: RangeDirectories, number: int) -> None:
            forgotten(self, number)
            for (directory, _), told in books._told.items():
                if directory is self:
                    told.difference_update([each for each in told if range_of(each[0]) == number])

        def announce(self: RangeDirectories, said: NodeAnnouncement, now_s: float) -> Announced:
            answer = announced(self, said, now_s)
            told = books._told[self, said.node_id]
            told.update((entry.key, entry.version) for entry in said.added)
            if said.piece is not None and self._nodes[said.node_id].report_number == said.piece.number:  # it was taken
                told.update((entry[0], entry[1]) for entry in said.piece.entries)
            return answer

        def commit_by_client(self: RangeDirectories, said: ClientCommit, now_s: float) -> CommitResult:
            result = committed(self, said, now_s)
            if result is CommitResult.ACCEPTED:
                books._told[self, said.node_id].add((said.key, said.version))
            return result

        def is_incomplete(self: RangeDirectories, keys: Iterable[str], held: Iterable[object]) -> bool:
            keys, held = list(keys), list(held)
            result = incomplete(self, keys, held)
            for key, found in zip(keys, held, strict=True):
                if not result and not found:
                    books._require_told(self, key)
            return result

        with contextlib.ExitStack() as stack:
            for each in (node_gone, forget_range, announce, commit_by_client, is_incomplete):
                stack.enter_context(mock.patch.object(RangeDirectories, each.__name__, each))
            yield

    def _require_told(self, directory: RangeDirectories, key: str) -> None:
        """``key`` is called missing there."""
        world = self._world
        for node in world.nodes.values() if world.answers_for(directory, range_of(key)) else ():
            known = directory.instance(node.id)
            if not node.alive or known is None or known.generation != node.generation:
                continue
            chunks = node.state.chunks
            chunk = chunks.find(ChunkKey(key)) or chunks.find_below(ChunkKey(key))
            if chunk is None or node.state.reports.is_unconfirmed(chunk):
                continue
            if (key, chunk.version) not in self._told[directory, node.id]:
                world.fail(AssertionError(f"{key} was called missing, and {node.host} has it and has yet to tell it"))
