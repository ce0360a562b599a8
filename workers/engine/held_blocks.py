"""Blocks kept for readers outside any request: exports for other workers, and writes to the store. Pure.

Owns the references that these readers hold in the pool; the scheduler counts them in its own check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tanghulu.types import BlockHash, RequestId
from tanghulu.workers.engine.block_pool import BlockPool
from tanghulu.workers.engine.step_plan import KvExport


class HeldBlocks:
    """References on blocks of ``pool``, by export or by count."""

    def __init__(self, pool: BlockPool, block_tokens: int) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._exports: dict[RequestId, KvExport] = {}
        self._held: Counter[int] = Counter()

    @property
    def num_exports(self) -> int:
        return len(self._exports)

    def add(self, export: KvExport) -> None:
        """Keep the blocks of ``export``, whose references become its own, until `release_export`."""
        assert export.request_id not in self._exports
        self._exports[export.request_id] = export

    def export_prefix(self, name: RequestId, hashes: Sequence[BlockHash]) -> KvExport | None:
        """Keep the cached blocks of the longest leading run of ``hashes``; None if none is cached."""
        if not (blocks := self._pool.match(hashes)):
            return None
        export = KvExport(name, tuple(blocks), len(blocks) * self._block_tokens)
        self.add(export)
        return export

    def grow(self, name: RequestId, block_ids: Sequence[int], *, new: bool) -> bool:
        """Keep ``block_ids``, which somebody else holds too, under ``name``, behind those that are kept under it.

        False, and nothing is kept, if what was kept has been given up: nobody reads it. ``new``: nothing was kept yet.
        """
        assert not (new and name in self._exports), f"{name} is kept already"
        kept = () if new else self._exports[name].block_ids if name in self._exports else None
        if kept is None:
            return False
        self._pool.retain(block_ids)
        blocks = (*kept, *block_ids)
        self._exports[name] = KvExport(name, blocks, len(blocks) * self._block_tokens)
        return True

    def export(self, name: RequestId) -> KvExport | None:
        return self._exports.get(name)

    def release_export(self, name: RequestId) -> bool:
        """Release the blocks of the export ``name``; False if there is no such export."""
        export = self._exports.pop(name, None)
        if export is None:
            return False
        self._pool.release(export.block_ids)
        return True

    def hold(self, block_ids: Sequence[int]) -> None:
        """Keep blocks (in use or cached) from being reused while somebody reads them."""
        self._pool.retain(block_ids)
        self._held.update(block_ids)

    def unhold(self, block_ids: Sequence[int]) -> None:
        self._held.subtract(block_ids)
        self._pool.release(block_ids, used=False)

    def references(self) -> Counter[int]:
        """Count the references that exports and holds have on each block."""
        counts = +self._held
        for export in self._exports.values():
            counts.update(export.block_ids)
        return counts

    def __repr__(self) -> str:
        return f"HeldBlocks({len(self._exports)} exports, {(+self._held).total()} held)"
