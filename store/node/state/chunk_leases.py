"""Leases on chunks and reservations: the chunk of each lease, and the effects of its end."""

from __future__ import annotations

from collections.abc import Container, Iterable

from tanghulu.errors import LeaseExpired, Overloaded
from tanghulu.store.node.state.chunk import Chunk, ChunkState
from tanghulu.store.node.state.node_chunks import NodeChunks
from tanghulu.store.node.state.outcomes import Holder, Pinned
from tanghulu.transfer_engine.core.access import AccessTable, Freed, Lease
from tanghulu.transfer_engine.core.segment import SessionKey
from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.types import LeaseId


class ChunkLeases:
    """See the module. ``access`` grants leases on ranges of the segment, and determines when they end."""

    def __init__(self, access: AccessTable, chunks: NodeChunks) -> None:
        self.access = access
        self._chunks = chunks
        self._by_lease: dict[LeaseId, Chunk] = {}

    @property
    def lease_ms(self) -> int:
        """Duration in ms of a lease that is not renewed."""
        return self.access.lease_ms

    def __len__(self) -> int:
        """Current leases of all sessions."""
        return self.access.num_leases

    def lease(self, lease_id: int) -> Lease | None:
        """Return the lease itself, if it has not ended."""
        return self.access.lease(LeaseId(lease_id))

    def chunk(self, lease_id: int) -> Chunk | None:
        """Return the chunk or reservation of ``lease_id``."""
        return self._by_lease.get(LeaseId(lease_id))

    def leases(self) -> list[tuple[LeaseId, Chunk]]:
        """Return a list of all leases with their chunks."""
        return list(self._by_lease.items())

    # --- sessions

    def open_session(self, session_id: int, pid: int | None, *, may_write: bool) -> SessionKey:
        """Open a session for a client; ``pid`` of its process if the kernel reports it."""
        return self.access.open_session(session_id, pid, may_write=may_write)

    def has_session(self, session_id: int) -> bool:
        """Return whether the session is connected, or has current leases."""
        return self.access.has_session(session_id)

    def close_session(self, session_id: int) -> None:
        """Close the session: its leases end, mapped ones are kept until its process has exited."""
        self.freed(self.access.close_session(session_id))

    def session_exited(self, session_id: int) -> None:
        """End all leases of a client whose process has ended."""
        self.freed(self.access.session_exited(session_id))

    # --- the leases

    def pin(self, chunk: Chunk, holder: Holder) -> Pinned:
        """Grant a read lease on a LIVE chunk. Raises Overloaded if there are too many leases."""
        lease_id, copies_only = self.grant(chunk, holder, Opcode.READ)
        return Pinned(chunk, lease_id, copies_only)

    def grant(self, chunk: Chunk, holder: Holder, mode: Opcode) -> tuple[LeaseId, bool]:
        """Return (a lease on the chunk's range, whether it is for copies only), by the holder's mapping if allowed."""
        lease_id, copies_only = None, True
        if holder.maps:
            try:
                lease_id = self.access.grant(holder.session_id, chunk.offset, chunk.size_bytes, mode, shm=True)
                copies_only = False
            except Overloaded:
                pass  # it maps too much already: copies are served
        if lease_id is None:
            lease_id = self.access.grant(holder.session_id, chunk.offset, chunk.size_bytes, mode)
        self._by_lease[lease_id] = chunk
        chunk.num_leases += 1
        self._chunks.leases_changed(chunk)
        return lease_id, copies_only

    def end_writing(self, lease_id: LeaseId, session_id: int) -> Chunk:
        """End the writing of a reservation, now without a lease. Raises LeaseExpired if it is gone."""
        chunk = self._by_lease.get(lease_id)
        lease = self.access.lease(lease_id)
        if chunk is None or lease is None or lease.session_id != session_id or chunk.state is not ChunkState.RESERVED:
            raise LeaseExpired(f"reservation {lease_id} has ended; reserve again")
        active = self.access.is_active(lease_id)
        freed = self.access.release(lease_id)
        if not active or not freed:
            self._chunks.abort_reservation(chunk)
            self.freed(freed)
            raise LeaseExpired(
                f"reservation {lease_id} of {chunk.key!r} has ended, or is still being written; reserve again"
            )
        self._forget(lease_id)
        return chunk

    def release(self, lease_id: LeaseId) -> None:
        """End one lease."""
        self.freed(self.access.release(lease_id))

    def unpin(self, lease_ids: Iterable[int], session_ids: Container[int]) -> None:
        """End leases on ranges, pinned or reserved, that their holder will not touch any more.

        Ended leases, and those of other sessions, are ignored.
        """
        for lease_id in lease_ids:
            lease = self.access.lease(LeaseId(lease_id))
            if lease is not None and lease.session_id in session_ids:
                self.release(LeaseId(lease_id))

    def release_unheld(self, session_ids: Container[int], held: Container[int]) -> None:
        """End all leases of a client's lost sessions except those that it still claims."""
        self.unpin([lease_id for lease_id in list(self._by_lease) if lease_id not in held], session_ids)

    def expire(self, now_s: float) -> None:
        """End expired leases."""
        self.freed(self.access.expire(now_s))

    def freed(self, freed: Iterable[Freed]) -> None:
        """Record ended leases, as reported by the access table or the segment server."""
        for each in freed:
            chunk = self._forget(each.lease_id)
            if chunk is None:
                continue
            if chunk.state is ChunkState.RESERVED:
                self._chunks.abort_reservation(chunk)
            elif chunk.num_leases == 0:
                self._chunks.leases_changed(chunk)

    def _forget(self, lease_id: LeaseId) -> Chunk | None:
        chunk = self._by_lease.pop(lease_id, None)
        if chunk is not None:
            chunk.num_leases -= 1
        return chunk

    def check(self) -> None:
        """Assert that each chunk counts its leases, and that no lease is on a chunk that is gone."""
        self.access.check()
        leases: dict[Chunk, int] = {}
        for chunk in self._by_lease.values():
            leases[chunk] = leases.get(chunk, 0) + 1
        for chunk in self._chunks.table:
            assert chunk.num_leases == leases.pop(chunk, 0), f"{chunk!r} has another number of leases"
        assert not leases, f"{leases!r} are leased and not in the table"

    def __repr__(self) -> str:
        return f"ChunkLeases({len(self._by_lease)})"
