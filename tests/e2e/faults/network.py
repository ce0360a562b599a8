"""A path to a process that can be cut, swallow everything, or hold back what is sent: a relay of TCP connections."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
import struct
import threading
from asyncio.trsock import TransportSocket
from collections.abc import Coroutine
from typing import Any

_PIECE_BYTES = 1 << 16
#: SO_LINGER with no time: what is closed is reset.
_RESET = struct.pack("ii", 1, 0)


class _Loop:
    """One event loop in a thread of its own for all paths of this process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="paths", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        future: concurrent.futures.Future[Any] = asyncio.run_coroutine_threadsafe(work, self.loop)
        return future.result(30)


_shared: list[_Loop] = []


def _loop() -> _Loop:
    if not _shared:
        _shared.append(_Loop())
    return _shared[0]


class BreakablePath:
    """Relays connections from one address to another. Thread-safe; bytes are never lost while it is not cut."""

    def __init__(self, begins: tuple[str, int], ends: tuple[str, int]) -> None:
        self._begins, self._ends = begins, ends
        self._relays: set[asyncio.Task[None]] = set()
        self._sockets: set[TransportSocket] = set()
        self._loop = _loop()
        self._loop.run(self._open())

    def __repr__(self) -> str:
        return f"<BreakablePath to {self._ends[1]}, {len(self._sockets) // 2} connections>"

    def cut(self) -> None:
        """Reset every connection at both ends; new ones are made at once."""
        self._loop.run(self._cut())

    def black_hole(self) -> None:
        """Swallow everything in both directions without a word; connections begin, and nothing comes of them."""
        self._loop.run(self._let(there=False, back=False))

    def hold_back(self) -> None:
        """Forward nothing to the process; what it says still comes back."""
        self._loop.run(self._let(there=False, back=True))

    def heal(self) -> None:
        """Forward all that was kept, and what comes."""
        self._loop.run(self._let(there=True, back=True))

    def close(self) -> None:
        self._loop.run(self._close())

    # --- on the loop

    async def _open(self) -> None:
        self._there, self._back = asyncio.Event(), asyncio.Event()
        await self._let(there=True, back=True)
        self._server = await asyncio.start_server(self._accept, *self._begins, limit=_PIECE_BYTES)

    async def _let(self, *, there: bool, back: bool) -> None:
        for way, is_open in ((self._there, there), (self._back, back)):
            if is_open:
                way.set()
            else:
                way.clear()

    async def _cut(self) -> None:
        for each in list(self._sockets):
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        relays = list(self._relays)
        for relay in relays:
            relay.cancel()
        await asyncio.gather(*relays, return_exceptions=True)

    async def _close(self) -> None:
        self._server.close()
        await self._cut()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        try:
            with contextlib.suppress(OSError):
                await self._there.wait()
                to_reader, to_writer = await asyncio.open_connection(*self._ends, limit=_PIECE_BYTES)
                await self._relay((reader, writer), (to_reader, to_writer))
        except asyncio.CancelledError:  # a cut, which is no error of this task
            pass
        finally:
            writer.transport.abort()
            self._relays.discard(task)

    async def _relay(
        self,
        near: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        far: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        sockets = {end[1].get_extra_info("socket") for end in (near, far)}
        self._sockets |= sockets
        try:
            async with asyncio.TaskGroup() as ways:
                both = [
                    ways.create_task(_forward(near[0], far[1], self._there)),
                    ways.create_task(_forward(far[0], near[1], self._back)),
                ]
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                for way in both:
                    way.cancel()
        finally:
            self._sockets -= sockets
            far[1].transport.abort()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: asyncio.Event) -> None:
    """Forward until one end hangs up; that, too, is told only while the way is open."""
    with contextlib.suppress(OSError):
        while True:
            piece = await reader.read(_PIECE_BYTES)
            await way.wait()
            if not piece:
                return
            writer.write(piece)
            await writer.drain()
