"""The connections of a test's own TCP server: none outlives it, not even one that was accepted at the very end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class OpenConnections:
    """Knows a connection once it is made: a handler that is cancelled before it begins would not close it."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Future[None], asyncio.StreamWriter] = {}

    def served_by(self, handle: Handler) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        """Return what `asyncio.start_server` calls. A connection is closed when its handler has ended."""

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task: asyncio.Future[None] = asyncio.ensure_future(handle(reader, writer))
            self._open[task] = writer
            task.add_done_callback(lambda task: self._open.pop(task).close())

        return accept

    def abort(self) -> None:
        """Reset all connections."""
        for writer in self._open.values():
            writer.transport.abort()

    async def close(self) -> None:
        """End the handlers and the connections; call it when the server listens no more."""
        for _ in range(3):  # what has been accepted is made in the next turns of the loop
            await asyncio.sleep(0)
        self.abort()
        handlers = list(self._open)
        for handler in handlers:
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
        await asyncio.sleep(0)  # a transport closes its socket in the next turn
