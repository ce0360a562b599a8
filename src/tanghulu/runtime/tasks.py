"""Tasks that run beside others and end with them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancel ``tasks`` and wait until all of them have ended, however they end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def beside(*coroutines: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """Run ``coroutines`` as tasks inside the block; at its end they are cancelled."""
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        yield
    finally:
        await cancelled(*tasks)
