"""The engine's thread and its connector on the tiny model: what travels, what fails, and that nothing is leaked."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest
from msgspec import structs

from tanghulu.errors import ChecksumMismatch, NodeUnavailable, TanghuluError
from tanghulu.session.load import WorkerLoad
from tanghulu.session.outputs import KvSource, PrefixHolder
from tanghulu.session.speed import ASSUMED_PEER_BYTES_PER_S, SpeedMeter
from tanghulu.types import BlockHash, RequestId
from tanghulu.workers.compute.models.model import Model
from tanghulu.workers.engine.engine import EngineCore
from tanghulu.workers.engine.thread import Command
from tanghulu.workers.kv.connector import NUM_FETCH_THREADS
from tanghulu.workers.kv.peer_reader import ExportPart
from tests.workers.peers import export_at, prefix_at
from tests.workers.rig import PROMPT, DictStore, NoPeers, Rig
from tests.workers.tiny import BLOCK, request


@pytest.fixture
def store() -> DictStore:
    return DictStore()


@pytest.fixture
def rig(tiny_model: Model, store: DictStore) -> Iterator[Rig]:
    made = Rig(tiny_model, store)
    yield made
    made.close()


def test_new_blocks_are_kept_and_found_after_the_cache_is_dropped(rig: Rig, store: DictStore) -> None:
    text, cached = rig.run("one", PROMPT, 4)
    assert cached == 0
    rig.run_until_idle()
    assert len(store.chunks) == 5
    rig.drop()
    before = rig.value("computed_tokens_total")
    assert rig.run("two", PROMPT, 4) == (text, 5 * BLOCK)
    assert rig.value("computed_tokens_total") - before == 3 + 3
    assert rig.value("prefix_tokens_total", source="store") == 5 * BLOCK


def test_another_engine_reads_what_this_one_wrote(rig: Rig, store: DictStore, tiny_model: Model) -> None:
    text, _ = rig.run("one", PROMPT, 4)
    rig.run_until_idle()
    other = Rig(tiny_model, store)
    assert other.run("two", PROMPT, 4) == (text, 5 * BLOCK)
    other.close()


def test_a_store_that_fails_costs_no_request(rig: Rig, store: DictStore) -> None:
    store.broken = True
    text, cached = rig.run("one", PROMPT, 4)
    rig.run_until_idle()
    assert cached == 0
    rig.drop()
    assert rig.run("two", PROMPT, 4) == (text, 0)  # not even asked: it failed a moment ago
    assert rig.value("fetch_failures_total", source="store") == 1


def test_a_peer_that_is_gone_is_computed(rig: Rig) -> None:
    text, _ = rig.run("one", PROMPT, 3)
    rig.run_until_idle()
    rig.drop()
    peer = export_at("nowhere|", 1, len(PROMPT))
    assert rig.run("two", PROMPT, 3, peer=peer)[0] == text
    assert rig.value("fetch_failures_total", source="peer") == 1


class ExportingPeers(NoPeers):
    """A worker that holds the first ``blocks`` of an export; ``error`` comes before the first or behind them."""

    def __init__(self, blocks: Sequence[bytes], error: TanghuluError | None = None) -> None:
        self.blocks, self.error = blocks, error
        self.released: queue.Queue[tuple[KvSource, int]] = queue.Queue()

    def read(self, parts: Sequence[ExportPart], buffers: Sequence[memoryview]) -> int:
        [(_, first_block, _)] = parts
        if self.error is not None:
            raise self.error
        for buffer, block in zip(buffers, self.blocks[first_block:], strict=False):
            buffer[:] = block
        return max(0, min(len(buffers), len(self.blocks) - first_block))

    def release(self, peer: KvSource, bytes_read: int = 0, *, keep: bool = False) -> None:
        self.released.put((peer, bytes_read))


@pytest.mark.parametrize(("num_held", "error"), [(0, NodeUnavailable("away")), (0, None), (3, None)])
def test_what_a_peer_did_not_bring_comes_from_the_store(tiny_model, store, num_held, error) -> None:
    """And the export is given back, whatever failed."""
    writer = Rig(tiny_model, store)
    tokens, _ = writer.run("first", PROMPT, 4)
    writer.run_until_idle()
    writer.close()
    peers = ExportingPeers(list(store.chunks.values())[:num_held], error)
    rig = Rig(tiny_model, store, peers)
    peer = export_at("there|", 1, len(PROMPT))
    assert rig.run("again", PROMPT, 4, peer=peer) == (tokens, 5 * BLOCK)
    assert rig.value("prefix_tokens_total", source="peer") == num_held * BLOCK
    assert rig.value("prefix_tokens_total", source="store") == (5 - num_held) * BLOCK
    block_bytes = len(next(iter(store.chunks.values())))
    assert peers.released.get(timeout=30) == (peer, num_held * block_bytes)
    rig.close()


def test_a_fetch_ends_in_one_command(tiny_model: Model) -> None:
    """Each command makes the engine report."""
    peers = ExportingPeers([])
    rig = Rig(tiny_model, None, peers)
    peers.blocks = [bytes(rig.core.cache.layout.block_bytes)] * 5
    posted: list[Command] = []
    engine = SimpleNamespace(core=rig.core, post=lambda command: (posted.append(command), rig.thread.post(command)))
    rig.connector.attach(engine)  # type: ignore[arg-type]
    rig.run("handed", PROMPT, 4, peer=export_at("there|", 1, 5 * BLOCK))
    peers.released.get(timeout=30)
    assert len(posted) == 1
    rig.close()


class WaitingPeers(NoPeers):
    """Workers whose exports are whole, but for those with an id in ``gone``; the first reads wait at a ``gate``."""

    def __init__(self, gone: frozenset[str] = frozenset()) -> None:
        self.gone, self.reads = gone, queue.Queue[list[str]]()
        self.gate = threading.Event()
        self.released: queue.Queue[tuple[str, int]] = queue.Queue()

    def read(self, parts: Sequence[ExportPart], buffers: Sequence[memoryview]) -> int:
        self.reads.put([part.peer.export_id for part in parts])
        assert self.gate.wait(30)
        num_ok = 0
        for part in parts:
            if part.peer.export_id in self.gone:
                break
            num_ok += part.num_blocks
        if not num_ok:
            raise NodeUnavailable("it is gone")
        for buffer in buffers[:num_ok]:
            buffer[:] = bytes(len(buffer))
        return num_ok

    def release(self, peer: KvSource, bytes_read: int = 0, *, keep: bool = False) -> None:
        self.released.put((peer.export_id, bytes_read))


@pytest.mark.parametrize("gone", [frozenset(), frozenset({"3"}), frozenset({"2", "4"})])
def test_hand_overs_that_wait_for_one_worker_are_fetched_together(tiny_model: Model, gone: frozenset[str]) -> None:
    """Each is told and released once, whoever else came with it; those of another worker go by themselves."""
    peers = WaitingPeers(gone)
    rig = Rig(tiny_model, None, peers)
    exports = {"a": "there|", "b": "there|", "1": "there|", "2": "there|", "3": "there|", "4": "elsewhere|"}
    posted: list[Command] = []
    engine = SimpleNamespace(core=rig.core, post=lambda command: (posted.append(command), rig.thread.post(command)))
    rig.connector.attach(engine)  # type: ignore[arg-type]
    made = {
        name: request(name, [number, *PROMPT], 2, peer=export_at(instance, name, 5 * BLOCK))
        for number, (name, instance) in enumerate(exports.items())
    }
    for name in "a", "b":  # each keeps a fetcher
        rig.thread.post(lambda core, name=name: core.add(made[name]))
        assert peers.reads.get(timeout=30) == [name]
    for name in "1", "2", "3", "4":
        rig.thread.post(lambda core, name=name: core.add(made[name]))
    while rig.value("requests_fetching") < 6:
        rig.next_report()
    peers.gate.set()
    released = dict(peers.released.get(timeout=30) for _ in exports)
    rig.run_until_idle()
    reads = []
    while not peers.reads.empty():
        reads.append(peers.reads.get())
    block_bytes = rig.core.cache.layout.block_bytes
    assert reads.count(["1", "2", "3"]) == reads.count(["4"]) == 1
    assert released == {name: 0 if name in gone else 5 * block_bytes for name in exports}
    assert peers.released.empty(), "each once"
    assert rig.value("fetch_failures_total", source="peer") == len(gone)
    assert rig.value("prefix_tokens_total", source="peer") == (6 - len(gone)) * 5 * BLOCK
    if not gone:
        assert len(reads) == 2
        assert len(posted) == 4, "those that came together are one command"
    rig.close()


def test_an_export_that_was_damaged_is_given_back(tiny_model: Model) -> None:
    peers = ExportingPeers([], ChecksumMismatch("the first exported block did not arrive as it was sent"))
    rig = Rig(tiny_model, None, peers)
    peer = export_at("there|", 1, len(PROMPT))
    _, cached = rig.run("one", PROMPT, 2, peer=peer)
    assert cached == 0
    assert peers.released.get(timeout=30) == (peer, 0)
    rig.close()


def test_an_export_that_waits_is_forgone_by_an_abort(tiny_model: Model) -> None:
    peers = ExportingPeers([])
    rig = Rig(tiny_model, None, peers)
    peer = export_at("there|", 1, len(PROMPT))
    made = request("one", PROMPT, 2, peer=peer)
    rig.thread.post(lambda core: (core.add(made), core.abort(made.request_id)))
    assert peers.released.get(timeout=30) == (peer, 0)
    rig.close()


def test_an_export_is_given_back_while_fetches_are_slow(tiny_model: Model, store: DictStore) -> None:
    store.gate.clear()
    peers = ExportingPeers([])
    rig = Rig(tiny_model, store, peers)
    for number in range(NUM_FETCH_THREADS):
        made = request(f"slow-{number}", [number, *PROMPT], 2)
        rig.thread.post(lambda core, made=made: core.add(made))
    while rig.value("requests_fetching") < NUM_FETCH_THREADS:
        rig.next_report()
    peer = export_at("there|", 1, len(PROMPT))
    rig.thread.post(lambda _: rig.connector.decline(peer))
    assert peers.released.get(timeout=30) == (peer, 0)
    store.gate.set()
    rig.close()


def test_beyond_the_bound_blocks_are_not_kept(tiny_model: Model, store: DictStore) -> None:
    rig = Rig(tiny_model, store, max_pending_bytes=0)
    rig.run("one", PROMPT, 2)
    rig.run_until_idle()
    assert rig.value("store_skipped_total") == 5
    assert not store.chunks
    rig.close()


def test_an_abort_while_its_prefix_is_loading_gives_all_back(rig: Rig, store: DictStore) -> None:
    store.gate.clear()
    made = request("one", PROMPT, 4)
    rig.thread.post(lambda core: core.add(made))
    while not rig.value("requests_fetching"):
        rig.next_report()
    rig.thread.post(lambda core: _assert(core.abort(RequestId("one"))))
    rig.next_report()
    assert rig.value("blocks_in_transfer") > 0
    store.gate.set()
    rig.run_until_idle()
    assert rig.value("blocks_in_transfer") == 0
    assert rig.core.scheduler.pool.num_in_use == 0


def test_a_failing_engine_is_reported(rig: Rig) -> None:
    rig.thread.post(lambda core: _assert(False))
    failure = rig.reports.get(timeout=30)
    assert isinstance(failure, AssertionError)


def _assert(condition: bool) -> None:
    assert condition


def test_small_steps_do_not_say_how_fast_prefill_is() -> None:
    meter = SpeedMeter(now_s=lambda: 0.0)
    meter.step(37, 1, 0.4)
    assert structs.replace(meter.speeds, prefill_share=0.0) == WorkerLoad(peer_bytes_per_s=ASSUMED_PEER_BYTES_PER_S)
    meter.step(512, 1, 1.0)
    meter.step(8, 8, 0.05)
    meter.fetched(10_000_000, 0.1)
    speeds = meter.speeds
    assert speeds.prefill_tokens_per_s == pytest.approx(512)
    assert speeds.decode_step_s == pytest.approx(0.05)
    assert speeds.store_bytes_per_s == pytest.approx(1e8)


class HoldingPeers(NoPeers):
    """Another worker's cache."""

    def __init__(self, chunks: dict[bytes, bytes]) -> None:
        self.chunks, self.asked, self.broken = chunks, 0, False

    def read_prefix(self, holder: PrefixHolder, hashes: Sequence[BlockHash], buffers: Sequence[memoryview]) -> int:
        self.asked += len(hashes)
        if self.broken:
            raise NodeUnavailable("the holder is away")
        for count, (block_hash, buffer) in enumerate(zip(hashes, buffers, strict=True)):
            if block_hash not in self.chunks:
                return count
            buffer[:] = self.chunks[block_hash]
        return len(hashes)


@pytest.mark.parametrize(
    ("held", "broken", "from_cache", "from_store"), [(5, False, 3, 2), (2, False, 2, 3), (5, True, 0, 5)]
)
def test_a_holder_is_asked_first_and_the_store_for_the_rest(tiny_model, store, held, broken, from_cache, from_store):
    writer = Rig(tiny_model, store)
    tokens, _ = writer.run("first", PROMPT, 4)
    writer.run_until_idle()
    writer.close()
    peers = HoldingPeers(dict(list(store.chunks.items())[:3]))
    peers.broken = broken
    rig = Rig(tiny_model, store, peers)
    again, cached = rig.run("again", PROMPT, 4, holder=prefix_at("there|", held))
    assert (again, cached) == (tokens, 5 * BLOCK)
    assert peers.asked == held
    assert rig.value("prefix_tokens_total", source="peer_cache") == from_cache * BLOCK
    assert rig.value("prefix_tokens_total", source="store") == from_store * BLOCK
    assert rig.value("fetch_failures_total", source="peer_cache") == broken
    rig.close()


@pytest.mark.parametrize(("num_held", "from_cache", "from_store"), [(5, 3, 2), (2, 2, 3), (0, 0, 5)])
def test_who_else_has_the_kv_is_asked_where_a_hand_over_is_gone(
    tiny_model, store, num_held, from_cache, from_store
) -> None:
    """The holder, then the store: one block at most is computed, and the text is the same."""
    writer = Rig(tiny_model, store)
    tokens, _ = writer.run("first", PROMPT, 4)
    writer.run_until_idle()
    writer.close()
    rig = Rig(tiny_model, store, HoldingPeers(dict(list(store.chunks.items())[:3])))
    holder = prefix_at("there|", num_held) if num_held else None
    gone = export_at("nowhere|", 1, len(PROMPT))
    again, cached = rig.run("again", PROMPT, 4, peer=gone, holder=holder)
    assert again == tokens
    assert len(PROMPT) - cached <= BLOCK
    assert rig.value("fetch_failures_total", source="peer") == 1
    assert rig.value("prefix_tokens_total", source="peer_cache") == from_cache * BLOCK
    assert rig.value("prefix_tokens_total", source="store") == from_store * BLOCK
    rig.close()


def test_an_exported_prefix_is_held_until_it_is_given_back(rig: Rig) -> None:
    rig.run("first", PROMPT, 1)
    rig.run_until_idle()
    done = threading.Event()

    def check(core: EngineCore) -> None:
        hashes = request("other", PROMPT, 1).sequence.block_hashes
        export = core.exports.export_prefix(RequestId("prefix-1"), [*hashes[:4], b"?" * 16])
        assert export is not None
        assert (len(export.block_ids), export.num_tokens) == (4, 4 * BLOCK)
        core.pool.drop_cached()
        assert core.scheduler.pool.num_hits(hashes) == 4
        core.check()
        assert core.exports.release(RequestId("prefix-1"))
        assert core.exports.export_prefix(RequestId("prefix-2"), [BlockHash(b"?" * 16)]) is None
        core.check()
        done.set()

    rig.thread.post(check)
    assert done.wait(30)
