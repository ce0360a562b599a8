"""A lease on a chunk's range for whoever asks: by its own mapping if it has one and may, else for copies."""

from __future__ import annotations

from tanghulu.errors import Overloaded
from tanghulu.store.node.state.waiters import Holder
from tanghulu.transfer_engine.core.access import AccessTable
from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.types import LeaseId


def grant(access: AccessTable, offset: int, length: int, holder: Holder, mode: Opcode) -> tuple[LeaseId, bool]:
    """(the lease, whether it is for copies only). Raises Overloaded and InvalidRequest as ``AccessTable.grant``."""
    if holder.maps:
        try:
            return access.grant(holder.session_id, offset, length, mode, shm=True), False
        except Overloaded:
            pass  # it maps too much already: copies are served
    return access.grant(holder.session_id, offset, length, mode), True
