"""How a node enters itself at the master, and leaves."""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from tanghulu.discovery.base import Discovery, Instance, Registration
from tanghulu.errors import TanghuluError, Unauthorized

_log = structlog.get_logger(__name__)
RETRY_S = 0.2


async def register(discovery: Discovery, instance: Instance) -> Registration:
    """Enter the node; a master that is not there yet is waited for. Raises Unauthorized if it refuses the node."""
    while True:
        try:
            return await discovery.register(instance)
        except Unauthorized:
            raise
        except TanghuluError as error:
            _log.warning("node.not_registered", code=error.code, error=error.message)
            await asyncio.sleep(RETRY_S)


def raise_refusal(registering: asyncio.Task[Registration]) -> None:
    """A node that the master will never let in does not start."""
    if registering.done():
        registering.result()


async def unregister(registering: asyncio.Task[Registration]) -> None:
    """Take the node out again, or stop trying to enter it."""
    if registering.done():
        with contextlib.suppress(TanghuluError):
            await registering.result().close()
        return
    registering.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await registering
