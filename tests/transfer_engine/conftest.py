"""Engines and owners for the transfer engine's tests; every test is checked for leaked descriptors."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tanghulu.transfer_engine.engine import EngineConfig, RemoteSegment, TransferEngine
from tests.transfer_engine.segment_process import HOST_ID, SegmentProcess, warm_up


@pytest.fixture(scope="module")
def owner() -> Iterator[SegmentProcess]:
    """One open segment for all tests of a module that leave its process alone."""
    with SegmentProcess() as process:
        yield process


@pytest.fixture(autouse=True)
def no_descriptor_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test opens it closes. (Module-wide owners are opened first.)"""
    warm_up()
    if "owner" in request.fixturenames:
        request.getfixturevalue("owner")
    before = len(_open_descriptors())
    yield
    if len(_open_descriptors()) > before:
        gc.collect()  # slow, so only when there is something to find
    after = _open_descriptors()
    assert len(after) <= before, f"{before} descriptors became {after}"


def _open_descriptors() -> list[str]:
    links = [Path("/proc/self/fd") / fd for fd in os.listdir("/proc/self/fd")]
    return sorted(str(link.readlink()) for link in links if link.is_symlink())


@pytest.fixture
def engine(no_descriptor_leaks: None) -> Iterator[TransferEngine]:
    with TransferEngine(host_id=HOST_ID) as engine:
        yield engine
        engine.check()


@pytest.fixture
def eager_engine(no_descriptor_leaks: None) -> Iterator[TransferEngine]:
    """One that loses patience with a path at once, and tries for long."""
    config = EngineConfig(slice_deadline_s=0.1, retries_max=50, connect_timeout_s=0.5)
    with TransferEngine(host_id=HOST_ID, config=config) as engine:
        yield engine
        engine.check()


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def remote(engine: TransferEngine, owner: SegmentProcess, transport: str) -> RemoteSegment:
    return engine.open_segment(owner.descriptor, transport=transport)
