"""What readers of other workers' KV leave behind when something fails: nothing, at either end."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tanghulu.errors import DeadlineExceeded, NodeUnavailable, PeerSilent, TransferFailed
from tanghulu.rpc import dialling
from tanghulu.rpc.fast_client import FastConnection
from tanghulu.runtime.clock import SystemClock
from tanghulu.session.outputs import KvSource
from tanghulu.transfer_engine.engine import TransferEngine
from tanghulu.transfer_engine.gpu.staging import HostCopier
from tanghulu.types import Address, BlockHash
from tanghulu.workers.kv import peer_links
from tanghulu.workers.kv.peer_links import SilenceWatch
from tanghulu.workers.kv.peer_reader import PeerReader
from tests.rpc.service import until
from tests.rpc.test_silent_hosts import out_of_reach
from tests.virtual.clock import ManualClock
from tests.workers.kv.test_staging import LAYOUT, NAME, Holder, buffers, bytes_of
from tests.workers.peers import export_at, prefix_at
from tests.workers.rig import read_export

HASHES = [BlockHash(bytes([number] * 16)) for number in (5, 9)]


@pytest.fixture
def transfers() -> Iterator[TransferEngine]:
    made = TransferEngine(host_id="here", clock=SystemClock())
    yield made
    made.close()


@pytest.fixture
def reader(transfers: TransferEngine) -> Iterator[PeerReader]:
    made = PeerReader(transfers, "w2", NAME)
    yield made
    made.close()


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[FastConnection]:
    """Every connection that readers open."""
    opened: list[FastConnection] = []

    def dial(*where: object, **how: object) -> FastConnection:
        opened.append(FastConnection(*where, **how))  # type: ignore[arg-type]
        return opened[-1]

    monkeypatch.setattr(peer_links, "FastConnection", dial)
    return opened


def mapped(holder: Holder, export: KvSource) -> KvSource:
    """The export as a reader of this host names it, that maps the holder's memory."""
    return export_at(holder.instance, export.export_id, export.num_tokens)


async def test_blocks_come_back_when_a_connection_is_lost_under_a_reader(
    tmp_path: Path, reader: PeerReader, connections: list[FastConnection]
) -> None:
    """The reader's process lives, and maps the memory: only it can say that it reads no more."""
    holder = Holder(tmp_path, 4, HostCopier())
    async with holder.serving():
        export = mapped(holder, holder.export([1, 2]))
        assert await asyncio.to_thread(read_export, reader, export, 0, buffers(2)) == 2
        connections[0].close()  # as at a missed deadline
        await until(lambda: holder.access.quarantined_bytes == 2 * LAYOUT.block_bytes)
        await asyncio.to_thread(reader.release, export)
        await until(lambda: holder.given_back == ["one"])
        assert holder.access.quarantined_bytes == 0
        assert holder.window.slots.num_free == 4


async def test_a_prefix_that_did_not_come_whole_is_released(tmp_path: Path, transfers: TransferEngine, reader) -> None:
    holder = Holder(tmp_path, 4, HostCopier())

    def fail(*_: object) -> None:
        raise TransferFailed("it broke off")

    async with holder.serving():
        held = prefix_at(holder.instance, 2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transfers, "transfer", fail)
            with pytest.raises(TransferFailed):
                await asyncio.to_thread(reader.read_prefix, held, HASHES, buffers(2))
        await until(lambda: len(holder.given_back) == 1)
        assert holder.access.num_leases == 0
        assert await asyncio.to_thread(reader.read_prefix, held, HASHES, buffers(2)) == 2


async def test_a_prefix_whose_reader_was_lost_is_given_back(tmp_path: Path, reader: PeerReader) -> None:
    """The reader has not heard of the export that its pin made, so it cannot release it."""
    holder = Holder(tmp_path, 4, HostCopier())
    show = holder.window.show

    loop = asyncio.get_running_loop()

    def lose(blocks, offsets):
        for peer in list(holder.service.peers):
            loop.call_soon_threadsafe(peer.hang_up)
        return show(blocks, offsets)

    holder.window.show = lose
    async with holder.serving():
        with pytest.raises(NodeUnavailable):
            await asyncio.to_thread(reader.read_prefix, prefix_at(holder.instance, 2), HASHES, buffers(2))
        await until(lambda: len(holder.given_back) == 1)
        assert holder.access.num_leases == 0


async def test_the_memory_is_kept_until_what_was_begun_is_shown(tmp_path: Path, reader: PeerReader) -> None:
    """A reader that hangs up ends its call, not the copy that it asked for; nobody may unmap what it writes to."""
    holder = Holder(tmp_path, 4, HostCopier())
    show, go_on = holder.window.show, threading.Event()

    loop = asyncio.get_running_loop()

    def lose(blocks, offsets):
        for peer in list(holder.service.peers):
            loop.call_soon_threadsafe(peer.hang_up)
        assert go_on.wait(30)
        return show(blocks, offsets)

    holder.window.show = lose
    async with holder.serving():
        with pytest.raises(NodeUnavailable):
            await asyncio.to_thread(reader.read_prefix, prefix_at(holder.instance, 2), HASHES, buffers(2))
        await until(lambda: len(holder.given_back) == 1)
        closing = asyncio.ensure_future(holder.server.close())
        await asyncio.sleep(0.05)
        assert not closing.done()
        go_on.set()
        await closing
        assert holder.window.slots.num_free == 4
        with pytest.raises(NodeUnavailable, match="is shutting down"):
            await asyncio.to_thread(reader.read_prefix, prefix_at(holder.instance, 2), HASHES, buffers(2))


async def test_a_prefix_whose_reader_dies_while_it_reads_is_given_back(
    tmp_path: Path, reader: PeerReader, transfers: TransferEngine, connections: list[FastConnection]
) -> None:
    """Nobody else knows of it; before, it was held until its time was up."""
    holder = Holder(tmp_path, 4, HostCopier())

    def die(*_: object) -> None:
        connections[0].close()
        raise NodeUnavailable("the reader is gone")

    async with holder.serving():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transfers, "submit", die)
            with pytest.raises(NodeUnavailable):
                await asyncio.to_thread(reader.read_prefix, prefix_at(f"{holder.address}|", 2), HASHES, buffers(2))
        await until(lambda: len(holder.given_back) >= 1)


@pytest.mark.parametrize("broken", [None, 2])
async def test_an_export_is_read_in_turns(
    tmp_path: Path, reader: PeerReader, transfers: TransferEngine, monkeypatch: pytest.MonkeyPatch, broken: int | None
) -> None:
    """Each has a deadline of its own, so a slow wire loses nothing; what came before one that fails is kept."""
    monkeypatch.setattr("tanghulu.workers.kv.peer_reader.TURN_BYTES", 2 * LAYOUT.block_bytes)
    holder, turns, transfer = Holder(tmp_path, 12, HostCopier()), list[int](), transfers.transfer

    def counted(requests: list[object], deadline_s: float) -> None:
        if len(turns) == broken:
            raise TransferFailed("it broke off")
        turns.append(len(requests))
        transfer(requests, deadline_s)  # type: ignore[arg-type]

    monkeypatch.setattr(transfers, "transfer", counted)
    async with holder.serving():
        got = buffers(5)
        blocks = [7, 1, 15, 4, 0]
        arrived = await asyncio.to_thread(read_export, reader, mapped(holder, holder.export(blocks)), 0, got)
    assert (arrived, turns) == ((5, [2, 2, 1]) if broken is None else (4, [2, 2]))
    assert [bytes(each) for each in got[:arrived]] == [bytes_of(holder.parts, block) for block in blocks[:arrived]]


async def test_a_stale_connection_is_opened_anew(tmp_path: Path, reader: PeerReader) -> None:
    holder = Holder(tmp_path, 4, HostCopier())
    async with holder.serving():
        export = mapped(holder, holder.export([1, 2]))
        assert await asyncio.to_thread(read_export, reader, export, 0, buffers(1)) == 1
        for peer in list(holder.service.peers):
            peer.hang_up()
        assert await asyncio.to_thread(read_export, reader, export, 1, buffers(1)) == 1
        await asyncio.to_thread(reader.release, export)
        await until(lambda: holder.given_back == ["one"])


async def test_mappings_of_workers_that_are_gone_are_closed(
    tmp_path: Path, reader: PeerReader, transfers: TransferEngine
) -> None:
    for run in range(3):
        (tmp_path / str(run)).mkdir()
        holder = Holder(tmp_path / str(run), 2, HostCopier())
        async with holder.serving():
            assert await asyncio.to_thread(read_export, reader, mapped(holder, holder.export([1])), 0, buffers(1)) == 1
            assert len(transfers.open_segments()) == 1


async def test_a_silent_worker_holds_up_no_reads_from_others(tmp_path: Path, reader: PeerReader, monkeypatch) -> None:
    monkeypatch.setattr(peer_links, "HELLO_DEADLINE_S", 300.0)
    holder = Holder(tmp_path, 2, HostCopier())
    async with holder.serving():
        with socket.create_server(("127.0.0.1", 0)) as silent:
            nowhere = export_at(f"127.0.0.1:{silent.getsockname()[1]}|", 1, 4)
            waiting = asyncio.create_task(asyncio.to_thread(read_export, reader, nowhere, 0, buffers(1)))
            accepted, _ = await asyncio.to_thread(silent.accept)
            assert await asyncio.to_thread(read_export, reader, mapped(holder, holder.export([1])), 0, buffers(1)) == 1
            assert not waiting.done()
            accepted.close()
        with pytest.raises(NodeUnavailable):
            await waiting


def test_after_one_waited_for_a_silent_worker_nobody_waits_for_a_while(
    transfers: TransferEngine, connections: list[FastConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped worker costs its readers one deadline, not one for each of them after the other."""
    monkeypatch.setattr(peer_links, "HELLO_DEADLINE_S", 0.05)
    clock = ManualClock()
    reader = PeerReader(transfers, "w2", NAME, clock)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        export = export_at(f"127.0.0.1:{silent.getsockname()[1]}|", 1, 4)
        with pytest.raises(DeadlineExceeded):
            read_export(reader, export, 0, buffers(1))
        for use in (lambda: read_export(reader, export, 0, buffers(1)), lambda: reader.release(export)):
            with pytest.raises(NodeUnavailable, match="did not answer a moment ago"):
                use()
        assert len(connections) == 1
        clock.advance(peer_links.SILENT_PAUSE_S)
        with pytest.raises(DeadlineExceeded):
            read_export(reader, export, 0, buffers(1))
        assert len(connections) == 2
    reader.close()


def test_a_host_out_of_reach_is_tried_by_one_reader_alone(
    transfers: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialling, "REACH_S", 0.05)
    clock = ManualClock()
    reader = PeerReader(transfers, "w2", NAME, clock)
    with out_of_reach() as address:
        export = export_at(f"{address}|", 1, 4)
        with pytest.raises(PeerSilent):
            read_export(reader, export, 0, buffers(1))
        with pytest.raises(NodeUnavailable, match="did not answer a moment ago"):
            reader.release(export)
        clock.advance(peer_links.SILENT_PAUSE_S)
        with pytest.raises(PeerSilent):
            read_export(reader, export, 0, buffers(1))
    reader.close()


def test_a_read_ends_with_the_connection_that_it_was_asked_for_on() -> None:
    """Nothing comes any more, and nobody calls on that connection: only the kernel knows."""
    watch, cancelled = SilenceWatch(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = FastConnection(Address(*server.getsockname()))
        peer, _ = server.accept()
        with watch.over(connection, cancelled.set) as reasons:
            peer.close()
            assert cancelled.wait(30)
        assert [type(reason) for reason in reasons] == [NodeUnavailable]
    watch.close()
