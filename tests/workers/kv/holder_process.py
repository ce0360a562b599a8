"""A worker's side of the hand-over as a process: blocks that it shares, and that it uses again once given back."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from tanghulu.runtime.tasks import beside
from tanghulu.transfer_engine.gpu.staging import HostCopier
from tanghulu.types import RequestId
from tanghulu.workers.kv import peer_server
from tests.workers.kv.test_staging import Holder

REUSED = 0xFF


class SharingHolder(Holder):
    shares = True

    def release(self, name: RequestId) -> None:
        super().release(name)
        self.parts[0].fill_(REUSED)


async def serve(folder: Path, seed: int, port: int, lease_ms: int) -> None:
    """Print where to find the export of blocks 3, 1, 4, and serve until killed; all are gone ``lease_ms`` later."""
    SharingHolder.lease_ms, SharingHolder.port = lease_ms, port
    peer_server.EXPORT_TTL_S, peer_server.SWEEP_S = lease_ms / 1000, 0.02
    holder = SharingHolder(folder, 4, HostCopier(), seed)
    async with holder.serving(), beside(holder.server.sweep()):
        export = holder.export([3, 1, 4])
        print(json.dumps([holder.instance, export.export_id]), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), *map(int, sys.argv[2:])))
