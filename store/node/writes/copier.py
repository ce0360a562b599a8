"""Makes the copies ordered by the master: pulls chunks from other nodes and puts them here, with all their options.

A client of the store in the node's own process does the reading, by any transport that reaches the source, and the
checksums are verified; then the chunk is put like any other, so it is announced and the master's decision on it
applies.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from tanghulu.errors import ChunkNotFound, TanghuluError
from tanghulu.masters import Masters
from tanghulu.store.client.chunk import Chunk as ReadChunk
from tanghulu.store.client.drivers.asynchronous import AsyncioDriver
from tanghulu.store.client.logic import operations, query
from tanghulu.store.client.logic.context import Context
from tanghulu.store.client.logic.effects import Deadline, Logic, PeerId
from tanghulu.store.client.settings import Settings
from tanghulu.store.node.writes.puts import PutBatch, PutService
from tanghulu.store.protocol.announcements import CopyOrder, Orders
from tanghulu.store.protocol.messages import ChunkInfo
from tanghulu.store.protocol.types import NewChunk
from tanghulu.types import ChunkKey

_log = structlog.get_logger(__name__)
#: Concurrent copies: each may hold a whole value in memory.
MAX_AT_ONCE = 4
#: Waiting orders; the master sends fewer.
MAX_WAITING = 1024
COPY_DEADLINE_S = 20.0


class Copier:
    """``run`` until cancelled; ``on_failed`` is called with every failed order."""

    def __init__(self, masters: Masters, puts: PutService, on_failed: Callable[[str], None]) -> None:
        self._settings = Settings(master=masters)
        self._puts = puts
        self._on_failed = on_failed
        self._orders: asyncio.Queue[CopyOrder] = asyncio.Queue(MAX_WAITING)
        self._driver: AsyncioDriver | None = None
        self.num_copied = 0
        self.num_failed = 0

    def order(self, orders: Orders) -> None:
        """Make these copies, soon."""
        if self._driver is None:
            return  # closing, or not begun: the master's orders expire by themselves
        self._driver.context.nodes.learn(orders.sources)
        for order in orders.copies:
            try:
                self._orders.put_nowait(order)
            except asyncio.QueueFull:
                self._failed(order, TanghuluError(f"more than {MAX_WAITING} copies are waiting"))

    async def run(self) -> None:
        """Process the orders until cancelled."""
        self._driver = self._open()
        workers = [asyncio.create_task(self._work(self._driver)) for _ in range(MAX_AT_ONCE)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            driver, self._driver = self._driver, None
            with contextlib.suppress(TanghuluError):
                await driver.close()

    def _open(self) -> AsyncioDriver:
        return AsyncioDriver(self._settings)

    async def _work(self, driver: AsyncioDriver) -> None:
        while True:
            order = await self._orders.get()
            try:
                await self._copy(driver, order)
            except TanghuluError as error:
                self._failed(order, error)
            else:
                self.num_copied += 1

    async def _copy(self, driver: AsyncioDriver, order: CopyOrder) -> None:
        deadline = driver.deadline(COPY_DEADLINE_S)
        info, chunk = await driver.run(_pull(driver.context, deadline, order), deadline)
        with chunk:
            new = NewChunk(
                ChunkKey(order.key), info.version, info.size_bytes, info.checksums, info.pin, info.ttl_s, info.replicas
            )
            until_s = asyncio.get_running_loop().time() + deadline.remaining_s()
            value = chunk.numpy().data.cast("B")
            written = await PutBatch(self._puts, [new], values=[value]).finish(until_s)
            del value
            (outcome,) = await self._puts.settled(written, visible=True, until_s=until_s)
        if isinstance(outcome, TanghuluError):
            raise outcome
        if outcome:  # then it is announced already, or another version of the key is
            raise TanghuluError("this node holds the key already")

    def _failed(self, order: CopyOrder, error: TanghuluError) -> None:
        _log.info("copy.failed", key=order.key, source=order.source, code=error.code, error=error.message)
        self.num_failed += 1
        self._on_failed(order.key)


def _pull(context: Context, deadline: Deadline, order: CopyOrder) -> Logic[tuple[ChunkInfo, ReadChunk]]:
    """Return the source's description of the chunk, and its verified bytes."""
    context.locations.set(order.key, (PeerId(order.source),))
    chunk = yield from operations.get(context, deadline, order.key)  # which promotes it from an SSD
    try:
        info = yield from query.stat_at(order.key, order.source)
        if not info.version == chunk.version == order.version:
            raise ChunkNotFound(f"{order.source} holds {order.key!r} at another version than {order.version}")
    except TanghuluError:
        chunk.close()
        raise
    return info, chunk
