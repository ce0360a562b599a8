"""KV held by prefills for other workers: exports, their readers, and the release of their blocks.

An export is held until it is released and its last reader has gone, whichever comes last. Once released it is no longer
shown; if only its readers have gone (one died), another may come, unless it was known to that one alone.

A growing export is ended only by its own worker, which completes or withdraws it. A complete one that is not read
within ``ttl_s`` is released. Pure: actions are returned as data.

Ids are random: they cannot be guessed, and at the same address an id of the previous run names nothing, and never
another prompt's KV.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tanghulu.errors import ChunkNotFound
from tanghulu.types import LeaseId, RequestId
from tanghulu.workers.engine.exports import ExportState, KvExport


@dataclass(slots=True, eq=False)
class Export:
    """KV of one prompt. ``leases`` are those of its readers; ``one_reader``: no other has its name."""

    export_id: int
    kv: KvExport
    expires_at_s: float
    one_reader: bool = False
    released: bool = False
    leases: set[LeaseId] = field(default_factory=set)

    @property
    def grows(self) -> bool:
        return self.kv.state is ExportState.GROWING


class ExportTable:
    """All exports of a worker. Calls that may free some return the names of those whose blocks to give back now."""

    def __init__(self, ttl_s: float, ids: Iterator[int]) -> None:
        self._ttl_s = ttl_s
        self._ids = ids
        self._exports: dict[int, Export] = {}
        self._growing: dict[RequestId, Export] = {}  # by their names
        self._by_lease: dict[LeaseId, Export] = {}

    def __len__(self) -> int:
        return len(self._exports)

    def add(self, kv: KvExport, now_s: float, *, one_reader: bool = False) -> Export:
        """Hold ``kv`` ready, for ``ttl_s`` once complete; for ``one_reader`` no longer than that one may read.

        A growing export is recognised by its name, and continues.
        """
        export = self._growing.pop(kv.name, None) or Export(next(self._ids), kv, 0.0, one_reader)
        export.kv, export.expires_at_s = kv, now_s + self._ttl_s
        self._exports[export.export_id] = export
        if export.grows:
            self._growing[kv.name] = export
        return export

    def withdraw(self, kv: KvExport) -> list[RequestId]:
        """Release an export that grew; if no reader could have its name yet, its blocks are given back at once."""
        export = self._growing.pop(kv.name, None)
        if export is None:
            return [kv.name]
        export.kv = kv
        return self.release(export.export_id)

    def watched(self, export: Export, now_s: float) -> None:
        """Note that a reader waits for more of the export."""
        export.expires_at_s = now_s + self._ttl_s

    def get(self, export_id: int) -> Export:
        """Return the export; raises ChunkNotFound when it was released or its time ran out."""
        export = self._exports.get(export_id)
        if export is None or export.released:
            raise ChunkNotFound(f"export {export_id} is not held here, or no longer; compute the prompt instead")
        return export

    def pinned(self, export: Export, leases: list[LeaseId], now_s: float) -> None:
        """Note that a reader was granted ``leases`` on the export's blocks."""
        export.leases.update(leases)
        export.expires_at_s = now_s + self._ttl_s
        self._by_lease.update(dict.fromkeys(leases, export))

    def leases_of(self, export_id: int) -> list[LeaseId]:
        """Return the leases of readers on the export; none if it is gone."""
        export = self._exports.get(export_id)
        return sorted(export.leases) if export is not None else []

    def release(self, export_id: int) -> list[RequestId]:
        """Release the export, which no worker needs any more; a growing or lost one is no error."""
        export = self._exports.get(export_id)
        if export is None or export.grows:
            return []
        export.released = True
        return self._drop_if_free(export)

    def lease_freed(self, lease_id: LeaseId) -> list[RequestId]:
        """Note that the lease has ended: its reader can read nothing more under it."""
        export = self._by_lease.pop(lease_id, None)
        if export is None:
            return []
        export.leases.discard(lease_id)
        export.released = export.released or (export.one_reader and not export.leases)
        return self._drop_if_free(export)

    def expire(self, now_s: float) -> list[RequestId]:
        """Release the exports that no worker read in time."""
        late = [e for e in self._exports.values() if e.expires_at_s <= now_s and not e.released]
        return [name for export in late for name in self.release(export.export_id)]

    def _drop_if_free(self, export: Export) -> list[RequestId]:
        if export.leases or not export.released:
            return []
        del self._exports[export.export_id]
        return [export.kv.name]

    def check(self) -> None:
        held = {lease for export in self._exports.values() for lease in export.leases}
        assert held == self._by_lease.keys()
        assert all(self._exports[export.export_id] is export and export.grows for export in self._growing.values())
        assert all(export.leases or not export.released for export in self._exports.values())
