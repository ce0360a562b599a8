"""The lane between workers while a prefill goes on: the watch, and what both ends give back."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tanghulu.errors import ChunkNotFound, NodeUnavailable
from tanghulu.runtime.clock import SystemClock
from tanghulu.session.outputs import KvSource
from tanghulu.transfer_engine.engine import TransferEngine
from tanghulu.transfer_engine.gpu.staging import HostCopier
from tanghulu.types import RequestId
from tanghulu.workers.engine.engine import EngineCore
from tanghulu.workers.engine.exports import ExportState, KvExport
from tanghulu.workers.kv.peer_methods import ExportWatchReply
from tanghulu.workers.kv.peer_reader import PeerReader
from tests.rpc.service import until
from tests.workers.kv.test_staging import LAYOUT, NAME, Holder, buffers, bytes_of
from tests.workers.peers import export_at
from tests.workers.rig import PROMPT, NoPeers, Rig, read_export
from tests.workers.tiny import BLOCK, request

ONE = RequestId("one")
GROWING, COMPLETE, WITHDRAWN = ExportState


@pytest.fixture
def reader() -> Iterator[PeerReader]:
    transfers = TransferEngine(host_id="here", clock=SystemClock())
    made = PeerReader(transfers, "w2", NAME)
    yield made
    made.close()
    transfers.close()


def show(holder: Holder, *blocks: int, state: ExportState = GROWING) -> dict[RequestId, KvSource]:
    return holder.server.add_exports([KvExport(ONE, ONE, blocks, len(blocks) * LAYOUT.block_tokens, state)])


def begin(holder: Holder, *blocks: int) -> KvSource:
    source = show(holder, *blocks)[ONE]
    return export_at(holder.instance, source.export_id, source.num_tokens)


async def watch(reader: PeerReader, export: KvSource, num_known: int) -> ExportWatchReply:
    def ask() -> ExportWatchReply:
        with reader.watch(export) as wait:
            return wait(num_known)

    return await asyncio.to_thread(ask)


async def test_a_watch_is_answered_when_blocks_are_complete(tmp_path: Path, reader: PeerReader, monkeypatch) -> None:
    monkeypatch.setattr("tanghulu.workers.kv.peer_reader.WATCH_S", 300.0)
    monkeypatch.setattr("tanghulu.workers.kv.peer_server.MAX_WATCH_S", 300.0)
    holder = Holder(tmp_path, 8, HostCopier())
    async with holder.serving():
        export = begin(holder, 3, 4)
        assert await watch(reader, export, 0) == ExportWatchReply(2)
        waiting = asyncio.create_task(watch(reader, export, 2))
        got = buffers(3)
        assert await asyncio.to_thread(read_export, reader, export, 0, got[:2]) == 2, "it holds up no other read"
        assert not waiting.done()
        assert show(holder, 3, 4, 9) == {}, "its reader knows where it is"
        assert await waiting == ExportWatchReply(3)
        assert await asyncio.to_thread(read_export, reader, export, 2, got[2:]) == 1
        assert [bytes(each) for each in got] == [bytes_of(holder.parts, block) for block in (3, 4, 9)]


async def test_a_watch_ends_with_the_prefill(tmp_path: Path, reader: PeerReader, monkeypatch) -> None:
    monkeypatch.setattr("tanghulu.workers.kv.peer_reader.WATCH_S", 300.0)
    monkeypatch.setattr("tanghulu.workers.kv.peer_server.MAX_WATCH_S", 300.0)
    holder = Holder(tmp_path, 8, HostCopier())
    async with holder.serving():
        export = begin(holder, 3)
        waiting = asyncio.create_task(watch(reader, export, 1))
        await until(lambda: len(holder.service.peers) > 0)
        show(holder, 3, state=WITHDRAWN)
        with pytest.raises(ChunkNotFound):
            await waiting
        assert holder.given_back == ["one"], "nobody reads: at once"


async def test_a_hand_over_completes_the_export(tmp_path: Path, reader: PeerReader, monkeypatch) -> None:
    monkeypatch.setattr("tanghulu.workers.kv.peer_reader.WATCH_S", 300.0)
    monkeypatch.setattr("tanghulu.workers.kv.peer_server.MAX_WATCH_S", 300.0)
    holder = Holder(tmp_path, 8, HostCopier())
    async with holder.serving():
        export = begin(holder, 3)
        assert await asyncio.to_thread(read_export, reader, export, 0, buffers(1)) == 1
        waiting = asyncio.create_task(watch(reader, export, 1))
        await until(lambda: len(holder.service.peers) > 1)
        handed = show(holder, 3, 4, state=COMPLETE)[ONE]
        assert handed.export_id == export.export_id
        assert await waiting == ExportWatchReply(2, True)
        assert await watch(reader, export, 2) == ExportWatchReply(2, True), "there will be no more"
        assert await asyncio.to_thread(read_export, reader, export, 1, buffers(1)) == 1
        await asyncio.to_thread(reader.release, export)
        await until(lambda: holder.given_back == ["one"])


async def test_what_a_reader_pinned_is_held_until_it_says_so(tmp_path: Path, reader: PeerReader) -> None:
    holder = Holder(tmp_path, 8, HostCopier())
    async with holder.serving():
        export = begin(holder, 3, 4)
        assert await asyncio.to_thread(read_export, reader, export, 0, buffers(2)) == 2
        show(holder, 3, 4, state=WITHDRAWN)
        assert holder.given_back == []
        await asyncio.to_thread(lambda: reader.release(export, keep=True))
        await until(lambda: holder.given_back == ["one"])
        assert holder.access.num_leases == 0


async def test_a_reader_that_leaves_takes_nothing_from_others(tmp_path: Path, reader: PeerReader) -> None:
    holder = Holder(tmp_path, 8, HostCopier())
    async with holder.serving():
        export = begin(holder, 3, 4)
        assert await asyncio.to_thread(read_export, reader, export, 0, buffers(2)) == 2
        await asyncio.to_thread(lambda: reader.release(export, keep=True))
        await until(lambda: holder.access.num_leases == 0)
        assert holder.given_back == []
        assert await asyncio.to_thread(read_export, reader, export, 0, buffers(2)) == 2


async def test_a_release_waits_for_no_answer(tmp_path: Path, reader: PeerReader) -> None:
    holder = Holder(tmp_path, 8, HostCopier())
    async with holder.serving():
        source = show(holder, 3, state=COMPLETE)[ONE]
        export = export_at(holder.instance, source.export_id, source.num_tokens)
        assert await asyncio.to_thread(read_export, reader, export, 0, buffers(1)) == 1
        reader.release(export)  # the loop that would answer stands still meanwhile
        await until(lambda: holder.given_back == ["one"])


async def test_no_reader_gives_up_an_export_that_grows(tmp_path: Path, reader: PeerReader) -> None:
    """Its blocks are the prefill's still, and another reader may come."""
    holder = Holder(tmp_path, 8, HostCopier())
    async with holder.serving():
        export = begin(holder, 3)
        assert await asyncio.to_thread(read_export, reader, export, 0, buffers(1)) == 1
        await asyncio.to_thread(reader.release, export)
        await until(lambda: holder.access.num_leases == 0)
        assert holder.given_back == []
        assert show(holder, 3, 4) == {}
        assert await watch(reader, export, 0) == ExportWatchReply(2)


async def test_blocks_of_an_export_that_was_given_back_are_shown_to_nobody(tmp_path: Path, reader: PeerReader) -> None:
    """Nothing holds them any more, so that they may be another prompt's by now."""
    holder = Holder(tmp_path, 8, HostCopier())
    async with holder.serving():
        export = begin(holder, 3)
        show(holder, 3, state=WITHDRAWN)
        assert holder.given_back == ["one"]
        with pytest.raises(ChunkNotFound):
            await watch(reader, export, 0)
        with pytest.raises(ChunkNotFound):
            await asyncio.to_thread(read_export, reader, export, 0, buffers(1))


async def test_a_release_that_keeps_the_export_opens_no_connection(tmp_path: Path, reader: PeerReader) -> None:
    """Where the session is gone, so are its leases."""
    await asyncio.to_thread(lambda: reader.release(export_at("127.0.0.1:1|", 1, 0), keep=True))


# --- the pulling end, on the tiny model


class GrowingPeers(NoPeers):
    """A worker whose prefill fills ``blocks`` one after the other as `fill` is called; it ends with `end`."""

    def __init__(self, blocks: list[bytes]) -> None:
        self.blocks = blocks
        self.changed = threading.Condition()
        self.num_filled, self.over = 0, False
        self.released: queue.Queue[bool] = queue.Queue()
        self.reads: list[tuple[int, int]] = []

    def fill(self, count: int) -> None:
        with self.changed:
            self.num_filled += count
            self.changed.notify_all()

    def end(self) -> None:
        with self.changed:
            self.over = True
            self.changed.notify_all()

    def watch(self, peer):
        outer = self

        class Watching:
            def __enter__(self):
                return outer._wait

            def __exit__(self, *_):
                return None

        return Watching()

    def _wait(self, num_known: int) -> ExportWatchReply:
        with self.changed:
            self.changed.wait_for(lambda: self.over or self.num_filled > num_known, 0.05)
            if self.over:
                raise ChunkNotFound("the prefill has ended")
            return ExportWatchReply(self.num_filled, self.num_filled == len(self.blocks))

    def read(self, parts, buffers) -> int:
        [(_, first_block, _)] = parts
        self.reads.append((first_block, len(buffers)))
        for buffer, block in zip(buffers, self.blocks[first_block:], strict=False):
            buffer[:] = block
        return max(0, min(len(buffers), len(self.blocks) - first_block))

    def release(self, peer, bytes_read: int = 0, *, keep: bool = False) -> None:
        self.released.put(keep)


@pytest.fixture
def prompt_blocks(tiny_model) -> tuple[list[int], list[bytes]]:
    """The text of PROMPT, and its full blocks."""
    from tests.workers.rig import DictStore

    store = DictStore()
    writer = Rig(tiny_model, store)
    tokens, _ = writer.run("first", PROMPT, 4)
    writer.run_until_idle()
    writer.close()
    return tokens, list(store.chunks.values())


EARLY, LATE = export_at("there|", 1, 0), export_at("there|", 2, 5 * BLOCK)


def pull(rig: Rig) -> None:
    sequence = request("p", PROMPT).sequence
    rig.thread.post(lambda core: core.pull_ahead(RequestId("p"), sequence, EARLY))


def wait_until_cached(rig: Rig, count: int) -> None:
    found: queue.Queue[int] = queue.Queue()

    def look(core: EngineCore) -> None:
        found.put(core.scheduler.pool.num_hits(request("p", PROMPT).sequence.block_hashes))

    while True:
        rig.thread.post(look)
        if found.get(timeout=30) == count:
            return


def test_blocks_are_pulled_as_they_are_filled_and_the_rest_comes_with_the_hand_over(tiny_model, prompt_blocks) -> None:
    tokens, blocks = prompt_blocks
    peers = GrowingPeers(blocks)
    rig = Rig(tiny_model, None, peers)
    pull(rig)
    for filled in (1, 3):
        peers.fill(filled - peers.num_filled)
        wait_until_cached(rig, filled)
    peers.end()
    assert rig.run("again", PROMPT, 4, ahead=RequestId("p"), peer=LATE) == (tokens, 5 * BLOCK)
    assert peers.reads == [(0, 1), (1, 2), (3, 2)], "each block once"
    assert {peers.released.get(timeout=30) for _ in range(2)} == {True, False}
    rig.run_until_idle()
    rig.close()


def test_a_request_waits_for_no_prefill_that_stands_still(tiny_model, prompt_blocks) -> None:
    """The prefill worker says nothing any more; the request was sent to compute the rest here."""
    tokens, blocks = prompt_blocks
    peers = GrowingPeers(blocks)
    rig = Rig(tiny_model, None, peers)
    pull(rig)
    peers.fill(2)
    wait_until_cached(rig, 2)
    assert rig.run("again", PROMPT, 4, ahead=RequestId("p")) == (tokens, 2 * BLOCK)
    rig.run_until_idle()
    rig.close()


def test_a_pull_whose_peer_is_away_holds_nothing(tiny_model) -> None:
    class Away(GrowingPeers):
        def watch(self, peer):
            raise NodeUnavailable("away")

    peers = Away([])
    rig = Rig(tiny_model, None, peers)
    pull(rig)
    assert peers.released.get(timeout=30)
    rig.run_until_idle()
    rig.thread.post(lambda core: core.abort(RequestId("p")))
    rig.close()


def test_an_aborted_pull_gives_back_its_blocks(tiny_model, prompt_blocks) -> None:
    peers = GrowingPeers(prompt_blocks[1])
    rig = Rig(tiny_model, None, peers)
    pull(rig)
    peers.fill(2)
    wait_until_cached(rig, 2)
    rig.thread.post(lambda core: core.abort(RequestId("p")))
    rig.run_until_idle()
    assert peers.released.get(timeout=30), "what it pinned, and not the export"
    rig.close()
