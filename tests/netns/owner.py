"""A segment in the network namespace that this process was started in; told to end by its standard input's end."""

from __future__ import annotations

import asyncio
import pickle
import sys

import uvloop

from tanghulu.transfer_engine.core.config import ListenOptions
from tanghulu.transfer_engine.core.segment import MemorySegment
from tanghulu.transfer_engine.server import SegmentServer
from tanghulu.transfer_engine.topology.discovery import discover


async def serve(size_bytes: int) -> None:
    segment = MemorySegment.create("arena", size_bytes, prefault=True)
    listen = ListenOptions(host="0.0.0.0", tcp_devices=tuple(discover().addresses()))
    server = SegmentServer(segment, None, generation=1, host_id="owner", listen=listen)
    await server.start()
    print(pickle.dumps(server.descriptor()).hex(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close()
    segment.close()


uvloop.run(serve(int(sys.argv[1])))
