"""Chunks that the master has accepted before the node heard of them: from desks, streamed ones, large ones.

And what becomes of the master's word when their puts fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tanghulu.store.node.state.chunk import Chunk
from tanghulu.store.node.state.holdings import Holding
from tanghulu.store.node.state.outcomes import Existed, Reserved
from tanghulu.store.protocol.checksums import Checksums
from tanghulu.store.protocol.types import RELIED_S

if TYPE_CHECKING:
    from tanghulu.store.node.state.node_state import NodeState


def forsake(state: NodeState, chunk: Chunk) -> None:
    """Condemn a reservation that comes to nothing, and make void what its client may have told the master of it."""
    state.table.condemn(chunk)
    standing = state.table.find(chunk.key) or state.tier.find(chunk.key)
    if standing is None or standing.version != chunk.version:
        state.announcements.withdraw(chunk.key, chunk.version)


def is_relied_on(state: NodeState, chunk: Chunk) -> bool:
    """Whether the master's word on this reservation's put, which its client brings, still stands.

    Not when it may have been given too long ago, nor when an earlier try of the put was withdrawn: that may reach the
    master behind the word.
    """
    return state.age_s(chunk) <= RELIED_S and not state.announcements.has_withdrawn(chunk.key, chunk.version)


def commit_proclaimed(
    state: NodeState, chunk: Chunk, checksums: Checksums, on_displaced: Callable[[Holding], None]
) -> Reserved | Existed:
    """The bytes of ``chunk``, a reservation without lease, are in place; ``on_displaced`` hears of what gives way.

    It displaces a chunk of its key and another version that the master has not confirmed; any other standing chunk
    means that the master has changed its mind, and the value is dropped.
    """
    standing = state.standing_anywhere(chunk.key)
    if standing is not None and standing.version != chunk.version and state.announcements.is_pending(standing):
        state.announcements.forget(standing)
        state.drop_both(chunk.key)
        on_displaced(standing)
    outcome = state.commit_written(chunk, checksums, visible=False, patient=True)
    state.room.end_batch()  # each put is a call of its own
    return outcome
