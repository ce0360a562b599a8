"""Orderly ends: of tasks beside a block, of what a failed block has taken, of a server's listening."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import structlog

_log = structlog.get_logger(__name__)


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancel ``tasks`` and wait until all of them have ended, in whatever way."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def beside(*coroutines: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """Run ``coroutines`` as tasks inside the block; at its end they are cancelled.

    If one fails, it is logged, the block is cancelled, and the error is raised: a process without it would keep serving
    outdated state, and look healthy.
    """
    block, failures = asyncio.current_task(), list[BaseException]()
    assert block is not None

    def ended(task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("task.failed", task=getattr(task.get_coro(), "__qualname__", ""), exc_info=error)
            if not failures:
                block.cancel()
            failures.append(error)

    tasks = [asyncio.create_task(each) for each in coroutines]
    for task in tasks:
        task.add_done_callback(ended)
    try:
        yield
    except asyncio.CancelledError:
        if not failures or block.uncancel():
            raise
    finally:
        for task in tasks:
            task.remove_done_callback(ended)
        await cancelled(*tasks)
    if failures:
        raise failures[0]


class undo_on_error:
    """Call ``undo`` if the block raises, also by an interrupt or a cancel: nobody else owns yet what it has taken."""

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo = undo

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self._undo()


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
