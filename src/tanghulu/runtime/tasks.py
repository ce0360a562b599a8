"""Tasks that run beside others and end with them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
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
