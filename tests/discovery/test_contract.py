"""The contract of discovery, kept by each of its implementations."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tanghulu.discovery.base import Discovery
from tests.contracts.discovery import *  # noqa: F403 - all of the contract
from tests.discovery.sources import Source, source


@pytest.fixture(params=["memory", "file", "master", "etcd"])
async def src(request: pytest.FixtureRequest) -> AsyncIterator[Source]:
    async with source(request.param) as made:
        yield made


@pytest.fixture
async def discovery(src: Source) -> AsyncIterator[Discovery]:
    async with src.open() as opened:
        yield opened
