"""The contract over shm and tcp, and what is particular to them."""

from __future__ import annotations

import pytest

from tanghulu.errors import NodeUnavailable
from tanghulu.transfer_engine.engine import EngineConfig, TransferEngine, TransferRequest
from tests.contracts.transfer import *  # noqa: F403 - all of the contract
from tests.contracts.transfer import READ
from tests.transfer_engine.segment_process import HOST_ID, SegmentProcess


def test_shm_is_preferred_and_maps(engine: TransferEngine, owner: SegmentProcess):
    remote = engine.open_segment(owner.descriptor)
    assert remote.transport == "shm"
    view = remote.map()
    assert view is not None
    owner.poke(123, b"zero-copy")
    assert bytes(view[123:132]) == b"zero-copy"
    piece = view[123:132]
    remote.close()
    assert remote.map() is None
    assert bytes(piece) == b"zero-copy"  # slices keep the pages


def test_another_host_uses_tcp(owner: SegmentProcess):
    with TransferEngine(host_id="elsewhere") as engine:
        remote = engine.open_segment(owner.descriptor)
        assert remote.transport == "tcp"
        assert remote.map() is None
        with pytest.raises(NodeUnavailable, match="shm: the segment is on host 'test-host'"):
            engine.open_segment(owner.descriptor, transport="shm")


def test_a_bound_device(owner: SegmentProcess):
    with TransferEngine(host_id=HOST_ID, config=EngineConfig(tcp_devices=("lo",))) as engine:
        remote = engine.open_segment(owner.descriptor, transport="tcp")
        engine.transfer([TransferRequest(READ, bytearray(10), remote, 0, 10)], 5)
