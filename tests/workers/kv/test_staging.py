"""Blocks of a device on their way through pinned memory: in rings, and in the slots that other workers read.

The device is main memory, and its copies are as late as copies may be: they happen when somebody waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from prometheus_client import CollectorRegistry

from tanghulu.errors import ChunkNotFound, ConfigError, NodeUnavailable, Overloaded
from tanghulu.rpc.fast_port import FastPort
from tanghulu.rpc.fast_server import FastService
from tanghulu.runtime.clock import SystemClock
from tanghulu.session.outputs import KvSource
from tanghulu.transfer_engine.core.access import AccessTable
from tanghulu.transfer_engine.core.config import ListenOptions
from tanghulu.transfer_engine.core.segment import MemorySegment
from tanghulu.transfer_engine.engine import TransferEngine
from tanghulu.transfer_engine.gpu import mover as gpu_mover
from tanghulu.transfer_engine.gpu.mover import BlockMover
from tanghulu.transfer_engine.gpu.staging import DeviceBlocks, HostCopier, StagingRing
from tanghulu.transfer_engine.server import SegmentServer
from tanghulu.types import BlockHash, Fingerprint, InstanceId, RequestId
from tanghulu.workers.compute.device import CPU
from tanghulu.workers.compute.models.model import Model
from tanghulu.workers.compute.runners import DeviceRunner
from tanghulu.workers.engine.exports import KvExport
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.kv import staging as kv_staging
from tanghulu.workers.kv.peer_reader import ExportPart, PeerReader
from tanghulu.workers.kv.peer_server import KvIdentity, PeerServer
from tanghulu.workers.kv.staging import DeviceStaging, SlotTable, StagedWindow
from tanghulu.workers.metrics import WorkerMetrics
from tests.rpc.service import until
from tests.transfer_engine.gpu.late_copier import LateCopier
from tests.workers.peers import export_at, prefix_at
from tests.workers.rig import PROMPT, DictStore, Rig, read_export
from tests.workers.shared_memory import FileIpc, mapped
from tests.workers.tiny import BLOCK, runner_of


def noise(num_blocks: int, part_bytes: Sequence[int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (num_blocks, size), generator=generator, dtype=torch.uint8) for size in part_bytes]


def bytes_of(parts: Sequence[torch.Tensor], block: int) -> bytes:
    return b"".join(part[block].numpy().tobytes() for part in parts)


class TestPort:
    @settings(deadline=None, max_examples=80)
    @given(
        count=st.integers(0, 11),
        in_half=st.integers(1, 3),
        spare=st.integers(0, 30),
        part_bytes=st.sampled_from([(16,), (8, 24)]),
        moved=st.integers(0, 11),
        out=st.booleans(),
    )
    def test_blocks_pass_in_order_up_to_the_first_that_did_not(self, count, in_half, spare, part_bytes, moved, out):
        parts = noise(20, part_bytes)
        before = [part.clone() for part in parts]
        copier = LateCopier()
        size = sum(part_bytes)
        port = BlockMover(DeviceBlocks(parts), [StagingRing(CPU, 2 * (in_half * size + spare % size), copier)])
        blocks = random.Random(count).sample(range(20), count)
        seen: list[bytes] = []

        def move(at: int, buffers: Sequence[memoryview]) -> int:
            assert at == len(seen), "on from where the last ended"
            assert 0 < len(buffers) <= in_half
            wanted = [buffer for index, buffer in enumerate(buffers) if at + index < moved]
            for index, buffer in enumerate(wanted):
                if not out:
                    buffer[:] = bytes([100 + at + index]) * size
                seen.append(bytes(buffer))
            for buffer in buffers[len(wanted) :]:
                if not out:
                    buffer[:] = b"\xee" * size  # what a broken transfer leaves
            return len(wanted)

        assert (port.drain if out else port.fill)(blocks, move) == min(count, moved) == len(seen)
        assert copier.num_under_way == 0
        for index, block in enumerate(blocks):
            if out and index < moved:
                assert seen[index] == bytes_of(before, block)
            if not out and index < moved:
                assert bytes_of(parts, block) == bytes([100 + index]) * size
        untouched = set(range(20)) if out else set(range(20)) - set(blocks[:moved])
        assert all(bytes_of(parts, block) == bytes_of(before, block) for block in untouched)

    def test_a_move_that_raises_leaves_nothing_under_way_and_the_ring_free(self):
        parts, copier = noise(6, [8]), LateCopier()
        port = BlockMover(DeviceBlocks(parts), [StagingRing(CPU, 32, copier)])

        def fail(at: int, buffers: Sequence[memoryview]) -> int:
            raise NodeUnavailable("the node is away")

        def fail_later(at: int, buffers: Sequence[memoryview]) -> int:
            return fail(at, buffers) if at else len(buffers)

        for act, move in ((port.fill, fail), (port.drain, fail_later), (port.fill, fail)):
            with pytest.raises(NodeUnavailable):
                act([0, 1, 2, 3, 4], move)
            assert copier.num_under_way == 0
        assert port.drain([5], lambda at, buffers: len(buffers)) == 1

    def test_what_came_before_a_failure_is_kept(self):
        parts, copier = noise(6, [8]), LateCopier()
        before = [part.clone() for part in parts]
        port = BlockMover(DeviceBlocks(parts), [StagingRing(CPU, 32, copier)])

        def move(at: int, buffers: Sequence[memoryview]) -> int:
            if at >= 4:
                raise Overloaded("no slots")
            for index, buffer in enumerate(buffers):
                buffer[:] = bytes([100 + at + index]) * 8
            return len(buffers)

        assert port.fill([0, 1, 2, 3, 4], move) == 4
        assert copier.num_under_way == 0
        assert [bytes_of(parts, block) for block in range(4)] == [bytes([100 + block]) * 8 for block in range(4)]
        assert bytes_of(parts, 4) == bytes_of(before, 4)

    def test_a_ring_serves_one_at_a_time(self):
        port = BlockMover(DeviceBlocks(noise(2, [8])), [StagingRing(CPU, 32)])
        inside, go_on = threading.Event(), threading.Event()
        order: list[str] = []

        def slow(at: int, buffers: Sequence[memoryview]) -> int:
            inside.set()
            assert go_on.wait(10)
            order.append("slow")
            return 1

        thread = threading.Thread(target=port.fill, args=([0], slow))
        thread.start()
        assert inside.wait(10)
        other = threading.Thread(target=port.fill, args=([1], lambda at, buffers: order.append("other") or 1))
        other.start()
        go_on.set()
        thread.join(10)
        other.join(10)
        assert order == ["slow", "other"]


class TestSlots:
    @given(st.data())
    def test_no_slot_is_taken_while_anything_happens_in_it(self, data: st.DataObject):
        table = SlotTable(4)
        copying: set[int] = set()  # what a thread copies into
        read: set[int] = set()  # what somebody has a right to
        for _ in range(data.draw(st.integers(0, 40))):
            step = data.draw(st.sampled_from(["take", "arrive", "give back"]))
            if step == "take":
                count = data.draw(st.integers(0, 5))
                taken = table.take(count)
                assert len(taken) == min(count, 4 - len(copying | read))
                assert not set(taken) & (copying | read)
                copying.update(taken)
                read.update(taken)
            elif step == "arrive" and copying:
                slot = data.draw(st.sampled_from(sorted(copying)))
                table.arrived(slot)
                copying.remove(slot)
            elif step == "give back" and read:
                slot = data.draw(st.sampled_from(sorted(read)))
                table.give_back(slot)
                read.remove(slot)
            table.check()
        assert table.num_free == 4 - len(copying | read)

    def test_a_slot_that_is_not_taken_neither_arrives_nor_is_given_back(self):
        table = SlotTable(2)
        for event in table.arrived, table.give_back:
            with pytest.raises(KeyError):
                event(0)
        table.check()

    def test_a_full_window_is_refused_and_what_is_left_is_free_again(self):
        window = StagedWindow(DeviceBlocks(noise(6, [8])), memoryview(bytearray(3 * 8)), LateCopier())
        offsets = window.take([0, 1, 2, 3])
        assert len(offsets) == 2, "the next reader finds one"
        offsets += window.take([0, 1, 2, 3])
        assert sorted(offsets) == [0, 8, 16]
        with pytest.raises(Overloaded, match="--kv-staging"):
            window.take([4])
        window.leave(offsets)
        assert window.slots.num_free == 3


LAYOUT = KvLayout(num_layers=2, block_tokens=4, num_kv_heads=1, head_dim=4, dtype="float32")
NAME = Fingerprint(b"0123456789abcdef")


class Holder:
    """A worker's side of the hand-over whose blocks are on a device, with ``num_slots`` of pinned memory.

    If it ``shares`` them, readers are on its host, and may read them where they lie.
    """

    shares = False
    lease_ms = 10_000
    port = 0

    def __init__(self, run_dir: Path, num_slots: int, copier: HostCopier | LateCopier, seed: int = 0) -> None:
        self.parts = noise(20, [LAYOUT.block_bytes], seed)
        shared = None
        if self.shares:
            memory = mapped(run_dir / f"cache-{seed}", 20, LAYOUT.block_bytes)
            self.parts = [memory.copy_(self.parts[0])]
            shared = FileIpc(run_dir / f"cache-{seed}").share(memory)
        self.given_back: list[str] = []
        self.gave_back = asyncio.Event()
        self._run_dir, self._size = run_dir, num_slots * LAYOUT.block_bytes
        self._segment = MemorySegment.create("kv", self._size)
        self.window = StagedWindow(DeviceBlocks(self.parts), self._segment.view, copier, shared)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        clock, service = SystemClock(), FastService()
        metrics = WorkerMetrics(CollectorRegistry(), LAYOUT, 20)
        self.access = access = AccessTable(clock, self.lease_ms, self._size)
        self.service = service
        self.server = PeerServer(
            KvIdentity(InstanceId("w1"), 1, NAME), LAYOUT, self.window, access, clock, metrics, engine=self
        )
        listen = ListenOptions(transports=("shm", "tcp"), host="127.0.0.1", unix_path=str(self._run_dir / "kv.sock"))
        listen = replace(listen, shm_hang_up_frees=True)
        offered = SegmentServer(
            self._segment, access, generation=1, host_id="here", listen=listen, on_freed=self.server.on_freed
        )
        fast_port = FastPort(service, self._run_dir, "worker")
        self.address = await fast_port.bind("127.0.0.1", self.port)
        await offered.start()
        self.server.serve(service, offered)
        await fast_port.open()
        self.instance = f"{self.address}|{fast_port.unix_path}"
        self.reached = self.instance if self.shares else f"{self.address}|"
        try:
            yield
        finally:
            await fast_port.close()
            await offered.close()
            await self.server.close()
            self._segment.close()

    # --- the engine's thread, and the core that it runs commands on

    async def call(self, command: Callable[[Holder], KvExport | None]) -> KvExport | None:
        return command(self)

    def post_lazily(self, command: Callable[[Holder], None]) -> None:
        command(self)

    @property
    def exports(self) -> Holder:
        return self

    def release(self, name: RequestId) -> None:
        self.given_back.append(name)
        self.gave_back.set()

    def export_prefix(self, name: RequestId, hashes: Sequence[BlockHash]) -> KvExport | None:
        blocks = tuple(each[0] for each in hashes if each[0] < 20)
        return KvExport(name, name, blocks, len(blocks) * LAYOUT.block_tokens) if blocks else None

    def export(self, blocks: Sequence[int]) -> KvSource:
        name = RequestId("one")
        kv = KvExport(name, name, tuple(blocks), len(blocks) * LAYOUT.block_tokens)
        source = self.server.add_exports([kv])[name]
        return export_at(self.reached, source.export_id, kv.num_tokens)


@pytest.fixture
def reader() -> Iterator[PeerReader]:
    transfers = TransferEngine(host_id="here", clock=SystemClock())
    made = PeerReader(transfers, "w2", NAME)
    yield made
    made.close()
    transfers.close()


def buffers(count: int) -> list[memoryview]:
    return [memoryview(bytearray(LAYOUT.block_bytes)) for _ in range(count)]


async def test_an_export_is_read_through_few_slots(tmp_path: Path, reader: PeerReader):
    holder = Holder(tmp_path, 3, LateCopier())
    async with holder.serving():
        blocks = [7, 1, 15, 4, 0, 19, 3, 8]
        export = holder.export(blocks)
        got = buffers(8)
        assert await asyncio.to_thread(read_export, reader, export, 0, got[:2]) == 2
        assert await asyncio.to_thread(read_export, reader, export, 2, got[2:]) == 6
        assert [bytes(each) for each in got] == [bytes_of(holder.parts, block) for block in blocks]
        assert holder.given_back == []
        await asyncio.to_thread(reader.release, export, 8 * LAYOUT.block_bytes)
        assert holder.given_back == ["one"]
        assert holder.window.slots.num_free == 3
        holder.window.slots.check()


async def test_exports_that_come_together_are_read_together(tmp_path: Path, reader: PeerReader):
    holder = Holder(tmp_path, 8, LateCopier())
    async with holder.serving():
        rows = [[7, 1, 15], [4], [0, 19, 3]]
        parts = [ExportPart(holder.export(row), 0, len(row)) for row in rows[:2]]
        parts.append(ExportPart(holder.export(rows[2]), 1, 2))
        got = buffers(6)
        assert await asyncio.to_thread(reader.read, parts, got) == 6
        assert [bytes(each) for each in got] == [bytes_of(holder.parts, block) for block in (7, 1, 15, 4, 19, 3)]
        for part in parts:
            await asyncio.to_thread(reader.release, part.peer)
        await until(lambda: holder.given_back == ["one"] * 3)
        assert holder.window.slots.num_free == 8
        holder.window.slots.check()


@pytest.mark.parametrize("num_slots", [8, 3])
async def test_what_stands_behind_a_missing_export_is_not_kept_from_others(
    tmp_path: Path, reader: PeerReader, num_slots: int
):
    """The second of three is gone: the first arrives, and the third, which was pinned as well, waits for its turn."""
    holder = Holder(tmp_path, num_slots, LateCopier())
    async with holder.serving():
        first, gone, last = (holder.export([number, number + 1]) for number in (3, 6, 9))
        await asyncio.to_thread(reader.release, gone)
        got = buffers(6)
        assert await asyncio.to_thread(reader.read, [ExportPart(each, 0, 2) for each in (first, gone, last)], got) == 2
        await asyncio.to_thread(reader.release, first)
        assert await asyncio.to_thread(read_export, reader, last, 0, got[:2]) == 2
        assert [bytes(each) for each in got[:2]] == [bytes_of(holder.parts, block) for block in (9, 10)]
        await asyncio.to_thread(reader.release, last)
        await until(lambda: holder.window.slots.num_free == num_slots)
        holder.window.slots.check()


async def test_an_export_of_an_earlier_run_names_nothing(tmp_path: Path, reader: PeerReader):
    """A worker that was restarted at the same address has other prompts' KV: no id may find it."""
    (tmp_path / "before").mkdir()
    before = Holder(tmp_path / "before", 2, HostCopier())
    async with before.serving():
        stale = before.export([1, 2])
    after = Holder(tmp_path, 2, HostCopier())
    async with after.serving():
        after.export([3, 4])
        address, _, unix_path = after.reached.partition("|")
        there = structs.replace(stale, address=address, unix_path=unix_path)
        with pytest.raises(ChunkNotFound, match="compute the prompt"):
            await asyncio.to_thread(read_export, reader, there, 0, buffers(2))


async def test_a_prefix_is_read_through_few_slots(tmp_path: Path, reader: PeerReader):
    holder = Holder(tmp_path, 2, LateCopier())
    async with holder.serving():
        hashes = [BlockHash(bytes([number] * 16)) for number in (5, 9, 2, 11, 30)]
        got = buffers(5)
        held = prefix_at(holder.reached, 5)
        assert await asyncio.to_thread(reader.read_prefix, held, hashes, got) == 4
        assert [bytes(each) for each in got[:4]] == [bytes_of(holder.parts, block) for block in (5, 9, 2, 11)]
        assert holder.window.slots.num_free == 2


async def test_a_reader_that_hangs_up_during_the_copy_blocks_no_slot(tmp_path: Path, reader: PeerReader):
    begun, go_on = threading.Event(), threading.Event()

    class Slow(HostCopier):
        def wait(self, half: int) -> None:
            begun.set()
            assert go_on.wait(10)

    holder = Holder(tmp_path, 3, Slow())
    async with holder.serving():
        export = holder.export([1, 2])
        reading = asyncio.create_task(asyncio.to_thread(read_export, reader, export, 0, buffers(2)))
        assert await asyncio.to_thread(begun.wait, 10)
        reader.close()
        with pytest.raises(NodeUnavailable):
            await reading
        holder.server.release(int(export.export_id))
        await asyncio.wait_for(holder.gave_back.wait(), 10)  # its leases ended with its connection
        assert holder.window.slots.num_free == 1, "copies into the other two are still under way"
        go_on.set()
        await asyncio.get_running_loop().shutdown_default_executor()
        assert holder.window.slots.num_free == 3


async def test_a_second_reader_waits_for_no_slot(tmp_path: Path, reader: PeerReader):
    holder = Holder(tmp_path, 2, HostCopier())
    async with holder.serving():
        taken = holder.window.take([1]) + holder.window.take([2])
        held = prefix_at(f"{holder.address}|", 1)
        with pytest.raises(Overloaded, match="pinned memory"):
            await asyncio.to_thread(reader.read_prefix, held, [BlockHash(b"\x03" * 16)], buffers(1))
        holder.window.leave(taken)


async def test_readers_share_the_window(tmp_path: Path, reader: PeerReader):
    holder = Holder(tmp_path, 4, HostCopier())
    async with holder.serving():
        assert await asyncio.to_thread(read_export, reader, holder.export(range(8)), 0, buffers(8)) == 8
        held = prefix_at(f"{holder.address}|", 1)
        assert await asyncio.to_thread(reader.read_prefix, held, [BlockHash(b"\x03" * 16)], buffers(1)) == 1


async def test_no_more_is_shown_than_is_read(tmp_path: Path, reader: PeerReader):
    holder = Holder(tmp_path, 20, HostCopier())
    shown: list[int] = []
    show = holder.window.show
    holder.window.show = lambda blocks, offsets: shown.extend(blocks) or show(blocks, offsets)
    async with holder.serving():
        blocks = list(range(8))
        export = holder.export(blocks)
        for at in range(0, 8, 2):
            assert await asyncio.to_thread(read_export, reader, export, at, buffers(2)) == 2
    assert shown == blocks


def on_device(model: Model, store: DictStore, kv_dtype: str) -> tuple[Rig, BlockMover]:
    runner = runner_of(DeviceRunner, model, block_tokens=BLOCK, kv_dtype=kv_dtype, num_blocks=64)
    blocks = DeviceBlocks([runner.cache.memory])
    rings = [StagingRing(CPU, 5 * blocks.block_bytes, LateCopier()) for _ in range(6)]
    mover = BlockMover(blocks, rings[:4], rings[4:])
    return Rig(model, store, runner=runner, port=mover, kv_dtype=kv_dtype), mover


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_kv_of_a_device_and_of_main_memory_is_one(tiny_model: Model, kv_dtype: str, monkeypatch: pytest.MonkeyPatch):
    """What an engine on a device stores continues in one in main memory, and the other way round."""
    monkeypatch.setattr(gpu_mover, "_ROUND_BYTES", 1)  # a thread for each block, if there are as many
    store = DictStore()
    writer, mover = on_device(tiny_model, store, kv_dtype)
    text, _ = writer.run("one", PROMPT, 4)
    writer.run_until_idle()
    assert len(store.chunks) == 5
    reader = Rig(tiny_model, store, kv_dtype=kv_dtype)
    assert reader.run("two", PROMPT, 4) == (text, 5 * BLOCK)
    longer = [*PROMPT, *text, *range(10, 40)]
    wanted, _ = reader.run("three", longer, 5)
    reader.run_until_idle()
    writer.drop()
    got, cached = writer.run("four", longer, 5)
    assert got == wanted
    assert cached == len(longer) // BLOCK * BLOCK
    writer.close()
    reader.close()
    assert mover._threads is not None
    assert mover._threads._threads, "helpers had their share"
    mover.close()


def test_too_little_pinned_memory_is_refused():
    with pytest.raises(ConfigError, match="--kv-staging"):
        DeviceStaging(LAYOUT, CPU, 15 * LAYOUT.block_bytes)
    staging = DeviceStaging(LAYOUT, CPU, 16 * LAYOUT.block_bytes)
    assert staging.segment_bytes == 8 * LAYOUT.block_bytes


def test_the_cache_is_zeroed_before_blocks_may_be_copied(tiny_model: Model, monkeypatch: pytest.MonkeyPatch):
    """No copier waits for the stream that zeroes it."""
    done: list[str] = []
    monkeypatch.setattr(kv_staging, "wait_for", lambda device: done.append(f"waited for {device}"))
    monkeypatch.setattr(kv_staging, "make_copier", lambda *devices, settled: done.append("copier") or HostCopier())
    runner = runner_of(DeviceRunner, tiny_model, block_tokens=BLOCK, num_blocks=4, graphs=False)
    staging = DeviceStaging(runner.layout, CPU, 16 * runner.layout.block_bytes)
    staging.open(runner, None, memoryview(bytearray(staging.segment_bytes)))
    assert done == ["waited for cpu", *["copier"] * (kv_staging.NUM_RINGS + 1)]
    staging.close()
