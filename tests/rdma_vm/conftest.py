"""Fixtures of what runs in the first guest: an engine here, the owner of the segment in the other guest.

The set-up goes over the control network, the data over two soft-RoCE devices with a network each.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator

import pytest

from tanghulu.transfer_engine.engine import RemoteSegment, TransferEngine
from tests.rdma_vm.guest_agent import RemoteAgent, RemoteOwner
from tests.rdma_vm.guest_config import CONFIG
from tests.transfer_engine.segment_process import HOST_ID


@pytest.fixture(scope="session")
def agent() -> Iterator[RemoteAgent]:
    agent = RemoteAgent()
    yield agent
    agent.close()


@pytest.fixture(scope="session")
def owner(agent: RemoteAgent) -> RemoteOwner:
    """The one of all tests that leave its process alone."""
    return agent.shared_owner()


@pytest.fixture
def transport() -> str:
    return "rdma"


@pytest.fixture(autouse=True)
def no_descriptor_leaks(owner: RemoteOwner) -> Iterator[None]:
    """Queue pairs that were given up while the kernel looked for their peers end some seconds later."""
    before = num_descriptors()
    yield
    until_s = time.monotonic() + 10
    while num_descriptors() > before and time.monotonic() < until_s:
        gc.collect()
    assert num_descriptors() <= before, "descriptors leak"


@pytest.fixture
def engine(no_descriptor_leaks: None) -> Iterator[TransferEngine]:
    with TransferEngine(host_id=HOST_ID, config=CONFIG) as engine:
        yield engine
        engine.check()


@pytest.fixture
def remote(engine: TransferEngine, owner: RemoteOwner) -> RemoteSegment:
    return engine.open_segment(owner.descriptor, transport="rdma")


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
