"""Blocks kept for readers outside any request: exports for other workers, and writes to the store. Pure.

An export is a list of blocks that grows until it is complete. A prefill that will be handed over is exported while it
runs: each block is held for readers from the step on that filled it, in addition to the request's own reference, so
that it outlasts the request. Example: a prompt of 1,300 tokens in chunks of 512 and blocks of 64. After the first step
the export has 8 blocks, after the second 16; the third samples, and completes it with all 21. The export of a prompt of
one chunk is complete from the beginning.

    (nothing) --grow--> GROWING --grow--> GROWING --complete--> COMPLETE --release--> (nothing)
                           '--withdraw--> WITHDRAWN --release--> (nothing)

It is withdrawn when its request stops running here without a hand-over: ended, aborted or preempted. A preempted
request is not exported again before it is handed over, so that blocks in use by readers never keep older requests from
the room that they were given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum

from msgspec import Struct

from tanghulu.types import BlockHash, RequestId
from tanghulu.workers.engine.block_pool import BlockPool
from tanghulu.workers.engine.requests import EngineRequest


class ExportState(Enum):
    """State of an export."""

    GROWING = "its request is prefilled here, and fills further blocks"
    COMPLETE = "its request was handed over: it has the KV of all tokens"
    WITHDRAWN = "its request goes on without it; readers may still be there"


class KvExport(Struct, frozen=True):
    """Blocks held for readers under ``name``: KV of the first ``num_tokens`` tokens of ``request_id``."""

    request_id: RequestId
    name: RequestId
    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    state: ExportState = ExportState.COMPLETE


class Exports:
    """References on blocks of ``pool``, by export or by count, and the exports changed since `take_changed`."""

    def __init__(self, pool: BlockPool, block_tokens: int) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._exports: dict[RequestId, KvExport] = {}
        self._changed: dict[RequestId, KvExport] = {}
        self._held: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._exports)

    def get(self, name: RequestId) -> KvExport | None:
        return self._exports.get(name)

    def take_changed(self) -> tuple[KvExport, ...]:
        """Return requests' exports that grew, were completed or were withdrawn since the last call."""
        changed, self._changed = tuple(self._changed.values()), {}
        return changed

    # --- of requests

    def grow(self, request: EngineRequest) -> None:
        """Export the full blocks of a running ``request`` not exported yet, if it will be handed over."""
        if not request.hold_kv or request.num_preemptions:
            return
        shown = self._shown_of(request)
        fresh = request.block_ids[len(shown) : request.num_committed_blocks]
        if fresh:
            self._pool.retain(fresh)
            num_tokens = request.num_committed_blocks * self._block_tokens
            self._put(KvExport(request.request_id, _name(request), (*shown, *fresh), num_tokens, ExportState.GROWING))

    def complete(self, request: EngineRequest) -> None:
        """Export all blocks with KV of ``request``, which gives up its references on all its blocks."""
        used, shown = -(-request.num_computed // self._block_tokens), self._shown_of(request)
        self._pool.release([*request.block_ids[: len(shown)], *request.block_ids[used:]])
        block_ids, request.block_ids = tuple(request.block_ids[:used]), []
        assert block_ids[: len(shown)] == shown
        self._put(KvExport(request.request_id, _name(request), block_ids, request.num_computed))

    def withdraw(self, request: EngineRequest) -> None:
        """Stop the growth of the export of ``request``, if it has one and was not handed over."""
        export = self._exports.get(_name(request))
        if export is not None and export.state is ExportState.GROWING:
            self._put(KvExport(export.request_id, export.name, export.block_ids, export.num_tokens, _S.WITHDRAWN))

    def _shown_of(self, request: EngineRequest) -> tuple[int, ...]:
        export = self._exports.get(_name(request))
        return () if export is None else export.block_ids

    def _put(self, export: KvExport) -> None:
        self._exports[export.name] = self._changed[export.name] = export

    # --- of others

    def export_prefix(self, name: RequestId, hashes: Sequence[BlockHash]) -> KvExport | None:
        """Keep the cached blocks of the longest leading run of ``hashes`` as ``name``; None if none is cached."""
        if not (blocks := self._pool.match(hashes)):
            return None
        export = self._exports[name] = KvExport(name, name, tuple(blocks), len(blocks) * self._block_tokens)
        return export

    def release(self, name: RequestId) -> bool:
        """Release the blocks of the export ``name``, which stops growing; False if there is no such export."""
        export = self._exports.pop(name, None)
        if export is None:
            return False
        assert export.state is not ExportState.GROWING, f"{name} still grows"
        self._pool.release(export.block_ids)
        return True

    def hold(self, block_ids: Sequence[int]) -> None:
        """Keep blocks (in use or cached) from being reused while they are read."""
        self._pool.retain(block_ids)
        self._held.update(block_ids)

    def unhold(self, block_ids: Sequence[int]) -> None:
        self._held.subtract(block_ids)
        self._pool.release(block_ids, used=False)

    def references(self) -> Counter[int]:
        """Count the references of exports and holds on each block."""
        counts = +self._held
        for export in self._exports.values():
            counts.update(export.block_ids)
        return counts

    def __repr__(self) -> str:
        return f"Exports({len(self._exports)} exports, {(+self._held).total()} held)"


_S = ExportState


def _name(request: EngineRequest) -> RequestId:
    """Name the export of ``request``, distinct from one withdrawn by a preemption."""
    again = request.num_preemptions
    return RequestId(f"{request.request_id}/{again}") if again else request.request_id
