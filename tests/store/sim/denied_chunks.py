"""Keeps, beside the production's own books, which chunks a master may deny, and looks at what it calls missing.

The rule: a key is called missing only if no node that is let in holds it, confirmed, but for chunks of which this very
version was told to be gone, or was refused, since the node was let in and the range came. So it is never missing while
such a node has yet to tell it, nor because of what was told of another version.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

from tanghulu.store.master.directory.ranges import RangeDirectories
from tanghulu.store.protocol.announcements import AnnounceReply, NodeAnnouncement
from tanghulu.store.protocol.key_slots import range_of
from tanghulu.store.protocol.types import ClientCommit, CommitResult

#: The node of what was removed on a client's order, wherever it is.
_EVERYWHERE = ""


class DeniedChunks:
    """What each directory may deny of which node, by key and version."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._denied: dict[tuple[RangeDirectories, str], set[tuple[str, int | None]]] = defaultdict(set)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Have all directories watched."""
        books, gone, forgotten = self, RangeDirectories.node_gone, RangeDirectories.forget_range
        announced, committed = RangeDirectories.announce, RangeDirectories.commit_by_client
        incomplete = RangeDirectories.is_incomplete

        def node_gone(self: RangeDirectories, node_id: str) -> None:
            gone(self, node_id)
            books._denied.pop((self, node_id), None)

        def forget_range(self: RangeDirectories, number: int) -> None:
            forgotten(self, number)
            for (directory, _), denied in books._denied.items():
                if directory is self:
                    denied.difference_update([each for each in denied if range_of(each[0]) == number])

        def announce(self: RangeDirectories, said: NodeAnnouncement, now_s: float) -> AnnounceReply:
            answer = announced(self, said, now_s)
            books._take(self, said, answer)
            return answer

        def commit_by_client(self: RangeDirectories, said: ClientCommit, now_s: float) -> CommitResult:
            result = committed(self, said, now_s)
            if result is CommitResult.ACCEPTED:
                books._denied[self, said.node_id].discard((said.key, said.version))
            return result

        def is_incomplete(self: RangeDirectories, keys: Iterable[str], held: Iterable[object]) -> bool:
            keys, held = list(keys), list(held)
            result = incomplete(self, keys, held)
            for key, found in zip(keys, held, strict=True):
                if not result and not found:
                    books._require_denied(self, key)
            return result

        with contextlib.ExitStack() as stack:
            for each in (node_gone, forget_range, announce, commit_by_client, is_incomplete):
                stack.enter_context(mock.patch.object(RangeDirectories, each.__name__, each))
            yield

    def _take(self, directory: RangeDirectories, said: NodeAnnouncement, answer: AnnounceReply) -> None:
        denied = self._denied[directory, said.node_id]
        denied.update((each.key, each.version) for each in (*said.removed, *said.deleted, *said.retracted))
        self._denied[directory, _EVERYWHERE].update((each.key, each.version) for each in said.deleted)
        undecided = set(answer.undecided)
        for index, (entry, stands) in enumerate(zip(said.added, answer.accepted, strict=True)):
            if stands:
                denied.discard((entry.key, entry.version))
            elif index not in undecided:
                denied.add((entry.key, entry.version))
        if said.piece is not None:
            denied.update((said.piece.entries[index][0], said.piece.entries[index][1]) for index in answer.refused)

    def _require_denied(self, directory: RangeDirectories, key: str) -> None:
        """``key`` is called missing there."""
        world = self._world
        for node in world.nodes.values() if world.answers_for(directory, range_of(key)) else ():
            known = directory.instance(node.id)
            if not node.alive or known is None or known.generation != node.generation:
                continue
            chunk = node.find(key)
            if chunk is None or node.state.reports.is_unconfirmed(chunk):
                continue
            one = (key, chunk.version)
            if one not in self._denied[directory, node.id] and one not in self._denied[directory, _EVERYWHERE]:
                world.fail(AssertionError(f"{key} was called missing, and {node.host} has it"))
