"""Run by pytest in the first guest: the transports' contract over rdma, against the second guest."""

from __future__ import annotations

import numpy as np
import pytest

from tanghulu.transfer_engine.engine import Opcode, RemoteSegment, TransferBatch, TransferEngine, TransferRequest
from tests.contracts.transfer import (  # noqa: F401 - pytest collects them from here
    TestBadInput,
    TestChecksums,
    test_a_dropped_handle_lets_its_links_go,
    test_an_empty_batch_is_complete,
    test_asyncio,
    test_cancel_before_waiting,
    test_eight_threads,
    test_every_alignment,
    test_many_ranges_and_both_directions_in_one_batch,
    test_more_threads_than_links,
    test_one_batch_to_several_segments,
    test_opening_twice_gives_one_segment,
    test_random_batches_against_a_model,
    test_status_moves_a_batch_along,
    test_the_edges_of_the_segment,
)
from tests.rdma_vm.guest_agent import RemoteOwner
from tests.transfer_engine.segment_process import random_bytes

READ, WRITE = Opcode.READ, Opcode.WRITE


@pytest.mark.parametrize("length", [1, 2, 4095, 65_536, 65_537, (1 << 20) + 1, (2 << 20) + (1 << 18), 16 << 20])
@pytest.mark.parametrize("offset", [0, 4097])
def test_bytes_arrive(engine: TransferEngine, remote: RemoteSegment, owner: RemoteOwner, length: int, offset: int):
    """As in the contract, up to 16 MiB: emulation is slow. Buffers above 64 KiB are registered, others copied."""
    source, destination = random_bytes(length + 7, length), np.zeros(length + 9, np.uint8)
    engine.transfer([TransferRequest(WRITE, source, remote, offset, length, source_offset=7)], 20)
    assert owner.peek(offset, min(length, 1000)) == source[7:1007].tobytes()
    engine.transfer([TransferRequest(READ, destination, remote, offset, length, source_offset=5)], 20)
    assert np.array_equal(destination[5 : 5 + length], source[7:])
    assert not destination[:5].any()
    assert not destination[5 + length :].any()


def test_both_devices_share_a_batch(engine: TransferEngine, remote: RemoteSegment):
    paths = [path for path in remote.paths.paths if path.transport == "rdma"]
    assert [path.local_device for path in paths] == ["rxe0", "rxe1"]
    handle = engine.submit(TransferBatch([TransferRequest(READ, bytearray(16 << 20), remote, 0, 16 << 20)]))
    assert handle.wait(30).ok
    shares = [remote.paths.stats(path).num_bytes for path in paths]
    assert sum(shares) == 16 << 20
    assert min(shares) > 0, handle.story(0)


def test_rdma_is_preferred_to_tcp(engine: TransferEngine, owner: RemoteOwner):
    assert engine.open_segment(owner.descriptor).transport == "rdma"
