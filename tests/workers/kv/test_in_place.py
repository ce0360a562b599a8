"""Blocks read where another worker's device has them: the contract of reads, and what goes wrong between two processes.

The memory shared is that of `tests.workers.shared_memory`.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from tanghulu.errors import LeaseExpired, NodeUnavailable, TransferFailed
from tanghulu.runtime.clock import SystemClock
from tanghulu.session.outputs import KvSource, PrefixHolder
from tanghulu.transfer_engine.engine import TransferEngine
from tanghulu.transfer_engine.gpu.staging import DeviceBlocks
from tanghulu.types import BlockHash
from tanghulu.workers.kv import device_sharing, peer_reader
from tanghulu.workers.kv.device_sharing import DeviceSharing, make_sharing
from tanghulu.workers.kv.peer_reader import ExportPart, PeerReader
from tests.workers.kv.holder_process import REUSED
from tests.workers.kv.test_peer_links import test_a_stale_connection_is_opened_anew
from tests.workers.kv.test_staging import (
    LAYOUT,
    NAME,
    Holder,
    buffers,
    noise,
    test_a_prefix_is_read_through_few_slots,
    test_an_export_is_read_through_few_slots,
    test_an_export_of_an_earlier_run_names_nothing,
    test_exports_that_come_together_are_read_together,
    test_what_stands_behind_a_missing_export_is_not_kept_from_others,
)
from tests.workers.peers import export_at
from tests.workers.rig import read_export
from tests.workers.shared_memory import FileIpc, mapped

#: The contract of reads, run once more with the reader of this module and holders that share.
CONTRACT = [
    test_a_stale_connection_is_opened_anew,
    test_an_export_is_read_through_few_slots,
    test_an_export_of_an_earlier_run_names_nothing,
    test_a_prefix_is_read_through_few_slots,
    test_exports_that_come_together_are_read_together,
    test_what_stands_behind_a_missing_export_is_not_kept_from_others,
]
OWN = [2, 0, 6]


class HookedIpc(FileIpc):
    """Calls ``before`` and ``after`` at both ends of the next copies."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.before: Callable[[], None] | None = None
        self.after: Callable[[], None] | None = None

    @contextlib.contextmanager
    def waited(self) -> Iterator[None]:
        before, after, self.before, self.after = self.before, self.after, None, None
        if before is not None:
            before()
        yield
        if after is not None:
            after()


class Near:
    """A worker that reads in place; its cache of 8 blocks is ``memory``."""

    def __init__(self, folder: Path) -> None:
        self.ipc = HookedIpc(folder / "own")
        self.memory = mapped(folder / "own", 8, LAYOUT.block_bytes).copy_(noise(8, [LAYOUT.block_bytes], 9)[0])
        self.transfers = TransferEngine(host_id="here", clock=SystemClock())
        self.peers = PeerReader(self.transfers, "w2", NAME, sharing=DeviceSharing(self.memory, self.ipc))

    def close(self) -> None:
        self.peers.close()
        self.transfers.close()


class Reader:
    """`PeerReader` to tests that read into buffers: by way of own blocks."""

    def __init__(self, near: Near) -> None:
        self._near = near
        self.release = near.peers.release

    def read(self, parts: Sequence[ExportPart], got: Sequence[memoryview]) -> int:
        return self._fetched(self._near.peers.read_in_place(parts, range(len(got))), got)

    def read_prefix(self, holder: PrefixHolder, hashes: Sequence[BlockHash], got: Sequence[memoryview]) -> int:
        return self._fetched(self._near.peers.read_prefix_in_place(holder, hashes, range(len(got))), got)

    def _fetched(self, count: int | None, got: Sequence[memoryview]) -> int:
        assert count is not None, "not read in place"
        for block, buffer in enumerate(got[:count]):
            buffer[:] = self._near.memory[block].numpy().tobytes()
        return count


@pytest.fixture
def near(tmp_path: Path) -> Iterator[Near]:
    (tmp_path / "reader").mkdir()
    made = Near(tmp_path / "reader")
    yield made
    made.close()


@pytest.fixture
def reader(near: Near, monkeypatch: pytest.MonkeyPatch) -> Reader:
    monkeypatch.setattr(Holder, "shares", True)
    monkeypatch.setattr(peer_reader, "IN_PLACE_TURN_BYTES", 3 * LAYOUT.block_bytes)
    return Reader(near)


class Other:
    """The process of a holder, and its export of three blocks."""

    def __init__(self, folder: Path, seed: int, port: int = 0, lease_ms: int = 30_000) -> None:
        command = [sys.executable, "-m", "tests.workers.kv.holder_process"]
        command += map(str, (folder, seed, port, lease_ms))
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.instance, export_id = json.loads(self.process.stdout.readline())
        self.export: KvSource = export_at(self.instance, export_id, 3 * LAYOUT.block_tokens)
        self.blocks = noise(20, [LAYOUT.block_bytes], seed)[0][[3, 1, 4]]
        self.memory = mapped(folder / f"cache-{seed}", 20, LAYOUT.block_bytes)

    @property
    def part(self) -> ExportPart:
        return ExportPart(self.export, 0, 3)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Other]]:
    started: list[Other] = []

    def begin(seed: int, **more: int) -> Other:
        started.append(Other(tmp_path, seed, **more))
        return started[-1]

    yield begin
    for each in started:
        each.kill()


def test_blocks_come_from_the_other_process(near: Near, start) -> None:
    other, before = start(1), near.memory.clone()
    with capture_logs() as logs:
        assert near.peers.read_in_place([other.part], OWN) == 3
    assert torch.equal(near.memory[OWN], other.blocks)
    rest = [block for block in range(8) if block not in OWN]
    assert torch.equal(near.memory[rest], before[rest])
    assert [each["event"] for each in logs] == ["peer.cache_opened"]


def test_blocks_whose_lease_ends_during_the_copy_do_not_count(near: Near, start) -> None:
    """The holder has used them for something else by the time that they are copied."""
    other = start(1, lease_ms=300)

    def wait_until_reused() -> None:
        while not bool((other.memory == REUSED).all()):
            pass

    near.ipc.before = wait_until_reused
    with pytest.raises(LeaseExpired, match="none of 3 blocks"):
        near.peers.read_in_place([other.part], OWN)
    assert not near.memory[OWN].any()


def test_blocks_of_a_peer_that_dies_during_the_copy_do_not_count(near: Near, start) -> None:
    other = start(1)
    near.ipc.after = other.kill
    with pytest.raises(NodeUnavailable):
        near.peers.read_in_place([other.part], OWN)
    assert not near.memory[OWN].any()


def test_a_restarted_peer_is_opened_anew(near: Near, start) -> None:
    """Its memory is another one, though the address is the same."""
    first = start(1)
    assert near.peers.read_in_place([first.part], OWN) == 3
    first.kill()
    port = int(first.instance.partition("|")[0].rpartition(":")[2])
    again = start(2, port=port)
    assert again.instance == first.instance
    assert near.peers.read_in_place([again.part], OWN) == 3
    assert torch.equal(near.memory[OWN], again.blocks)
    assert near.ipc.num_opened == 2


def test_a_cache_that_cannot_be_opened_is_read_through_the_segment(near: Near, start, tmp_path: Path) -> None:
    other = start(1)
    (tmp_path / "cache-1").unlink()
    with capture_logs() as logs:
        assert near.peers.read_in_place([other.part], OWN) is None
        got = buffers(3)
        assert read_export(near.peers, other.export, 0, got) == 3
    assert [bytes(each) for each in got] == [row.numpy().tobytes() for row in other.blocks]
    assert [(each["event"], each["instead"]) for each in logs] == [("peer.cache_not_opened", "its segment")]


def test_caches_of_other_blocks_are_not_opened(near: Near) -> None:
    sharing = DeviceSharing(torch.zeros(2, 8, dtype=torch.uint8), near.ipc)
    with pytest.raises(TransferFailed, match="blocks have"):
        sharing.open(DeviceSharing(near.memory, near.ipc).own)


@pytest.mark.parametrize("least_piece", [1, 1 << 20])
def test_small_blocks_are_copied_together(near: Near, monkeypatch: pytest.MonkeyPatch, least_piece: int) -> None:
    monkeypatch.setattr(device_sharing, "LEAST_PIECE_BYTES", least_piece)
    theirs = noise(20, [LAYOUT.block_bytes], 4)[0]
    DeviceSharing(near.memory, near.ipc).copy(theirs, [19, 0, 7], OWN)
    assert torch.equal(near.memory[OWN], theirs[[19, 0, 7]])


def test_only_a_cache_in_one_part_of_a_gpu_is_shared() -> None:
    assert make_sharing(DeviceBlocks(noise(4, [64]))) is None
    assert make_sharing(DeviceBlocks(noise(4, [64, 64]))) is None
