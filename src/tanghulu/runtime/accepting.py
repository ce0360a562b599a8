"""Ends an asyncio server's listening without orphaning accepted connections."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence


async def accept_no_more(servers: Sequence[asyncio.Server]) -> None:
    """Have ``servers`` accept nothing more, so that they can be closed; accepted connections then have their protocols.

    asyncio makes a connection's protocol two turns of the loop after accepting it, and up to Python 3.11 forgets one
    whose server is closed in between: its client waits until garbage collection.
    """
    loop = asyncio.get_running_loop()
    for server in servers:
        for listener in server.sockets:
            loop.remove_reader(listener.fileno())
    for _ in range(2):
        await asyncio.sleep(0)
