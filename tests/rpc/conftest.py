"""The carriers' tests run on both event loops: processes use uvloop, embedders what they like."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop

from tests.rpc.service import Served, serving


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as made:
        yield made
