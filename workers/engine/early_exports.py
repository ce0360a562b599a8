"""Which blocks of prefills under way other workers may read already. Pure.

A prefill that will be handed over is shown while it runs: each block that it has filled is held for readers from the
step on that filled it, beside the request's own reference, so that it stays whatever becomes of the request. Example:
a prompt of 1,300 tokens in chunks of 512 and blocks of 64. After the first step 8 blocks are shown, after the second
16; the third samples, and what is handed over is the export of all 21. A prompt of one chunk is never shown early.

    (nothing) --filled--> SHOWN --filled--> SHOWN --over--> (nothing)

It is over when its request stops running here: handed over, ended, aborted or preempted. What was preempted is not
shown again, so that blocks which somebody reads never keep the older requests from the room that they were given.
"""

from __future__ import annotations

from dataclasses import dataclass

from tanghulu.types import RequestId
from tanghulu.workers.engine.held_blocks import HeldBlocks
from tanghulu.workers.engine.requests import EngineRequest


@dataclass(frozen=True, slots=True)
class EarlyBlocks:
    """A change of what may be read of ``request_id``: its full blocks from number ``first`` on, or that it is ``over``.

    The blocks are held under ``name``, until `HeldBlocks.release_export`.
    """

    request_id: RequestId
    name: RequestId
    first: int = 0
    block_ids: tuple[int, ...] = ()
    over: bool = False


class EarlyExports:
    """The running requests that are shown, and what changed since `take`."""

    def __init__(self, held: HeldBlocks) -> None:
        self._held = held
        self._num_shown: dict[RequestId, int] = {}
        self._changes: list[EarlyBlocks] = []

    def filled(self, request: EngineRequest) -> None:
        """Show the full blocks of a running ``request`` that were not shown yet, if it will be handed over."""
        if not request.hold_kv or request.num_preemptions:
            return
        shown = self._num_shown.get(request.request_id, 0)
        fresh = tuple(request.block_ids[shown : request.num_committed_blocks])
        name = early_name(request.request_id)
        if not fresh or not self._held.grow(name, fresh, new=shown == 0):
            return
        self._num_shown[request.request_id] = request.num_committed_blocks
        self._changes.append(EarlyBlocks(request.request_id, name, shown, fresh))

    def over(self, request_id: RequestId) -> None:
        """Show the request no longer; who holds its blocks for readers is told to give them back."""
        if self._num_shown.pop(request_id, 0):
            self._changes.append(EarlyBlocks(request_id, early_name(request_id), over=True))

    def take(self) -> tuple[EarlyBlocks, ...]:
        """Return the changes since the last call, in order."""
        changes, self._changes = tuple(self._changes), []
        return changes


def early_name(request_id: RequestId) -> RequestId:
    """Name the blocks that are shown of ``request_id``, apart from those that it hands over."""
    return RequestId(f"{request_id}/early")
