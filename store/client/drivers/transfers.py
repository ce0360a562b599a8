"""Transfers of one instruction, by either driver: all at once, with an outcome per request if that fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from tanghulu.errors import TanghuluError
from tanghulu.transfer_engine.engine import TransferBatch, TransferEngine, TransferRequest


def move(engine: TransferEngine, requests: Sequence[TransferRequest], deadline_s: float) -> list[TanghuluError | None]:
    """Move the requests and return one outcome each; each moves at most twice."""
    until_s = time.monotonic() + deadline_s
    try:
        engine.transfer(requests, deadline_s)
        return [None] * len(requests)
    except TanghuluError as error:
        if len(requests) == 1:
            return [error]
    try:  # again, to find the failing ones: the same bytes to the same places
        left_s = max(until_s - time.monotonic(), 0.0)
        return list(engine.submit(TransferBatch(requests)).wait(left_s).errors)
    except TanghuluError as error:
        return [error] * len(requests)


async def move_async(
    engine: TransferEngine, requests: Sequence[TransferRequest], deadline_s: float
) -> list[TanghuluError | None]:
    """Do the same for asyncio."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + deadline_s
    try:
        await engine.transfer_async(requests, deadline_s)
        return [None] * len(requests)
    except TanghuluError as error:
        if len(requests) == 1:
            return [error]
    try:
        left_s = max(until_s - loop.time(), 0.0)
        return list((await engine.submit(TransferBatch(requests)).wait_async(left_s)).errors)
    except TanghuluError as error:
        return [error] * len(requests)
