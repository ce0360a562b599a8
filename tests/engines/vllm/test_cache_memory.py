"""The cache of vLLM as transfers see it: its layouts, and blocks on a device whose work is late.

The device is main memory: computation queued on its stream runs when somebody waits for it, and so do its copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from tanghulu.engines.common.options import ConnectorOptions
from tanghulu.engines.common.requests import Block, LoadJob, SaveJob
from tanghulu.engines.common.transfers import NUM_SAVE_THREADS, Ended, HostMemory, Transfers, Wait
from tanghulu.errors import ChunkNotFound, ConfigError, DeadlineExceeded, StoreFull, TanghuluError
from tanghulu.store.client.block_store import BlockStore
from tanghulu.store.client.model import Status
from tests.engines.common.test_transfers import MemoryStore

torch = pytest.importorskip("torch", reason="torch is not installed")

from tanghulu.engines.vllm import cache_memory  # noqa: E402
from tanghulu.engines.vllm.cache_memory import DeviceMemory, memory_of, parts_of_blocks, record_event  # noqa: E402
from tanghulu.transfer_engine.gpu import mover as gpu_mover  # noqa: E402
from tanghulu.transfer_engine.gpu.staging import CudaCopier, DeviceBlocks  # noqa: E402
from tests.transfer_engine.gpu.late_copier import LateCopier  # noqa: E402
from tests.workers.compute.fake_gpu import GPU, fake_gpu  # noqa: E402

NUM_BLOCKS, HEADS, TOKENS, CONTENT, NUM_LAYERS = 9, 3, 4, 8, 2
#: vLLM's layouts of [layers, blocks, heads, tokens, content], and whether a block is one run of memory.
LAYOUTS = {"LBHNC": True, "LBNHC": True, "BLHNC": True, "BLNHC": True, "LHBNC": False, "BHLNC": False}
OPTIONS = ConnectorOptions(master="127.0.0.1:1")


def layers_in(layout: str, device: Any = "cpu") -> dict[str, Any]:
    """Layers [blocks, heads, tokens, content] as vLLM shows them, of bfloat16, full of noise."""
    sizes = dict(zip("LBHNC", (NUM_LAYERS, NUM_BLOCKS, HEADS, TOKENS, CONTENT), strict=True))
    noise = torch.randint(0, 250, [sizes[axis] for axis in layout], generator=torch.Generator().manual_seed(1))
    whole = noise.to(torch.bfloat16).to(device).permute(*(layout.index(axis) for axis in "LBHNC"))
    return {f"layer {number}": whole[number] for number in range(NUM_LAYERS)}


def bytes_of(tensor: Any) -> bytes:
    raw: bytes = tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return raw


def block_bytes(layout: str, layers: dict[str, Any], block: int) -> bytes:
    """A block's bytes in the store: layer by layer, in the order of memory."""
    by_token = layout.index("N") < layout.index("H")
    return b"".join(bytes_of(each[block].transpose(0, 1) if by_token else each[block]) for each in layers.values())


class TestParts:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_a_block_of_every_layout_of_vllm(self, layout: str):
        layers = layers_in(layout)
        parts = [part for name, layer in layers.items() for part in parts_of_blocks(name, layer, NUM_BLOCKS)]
        assert len(parts) == NUM_LAYERS * (1 if LAYOUTS[layout] else HEADS)
        for block in range(NUM_BLOCKS):
            assert b"".join(bytes_of(part[block]) for part in parts) == block_bytes(layout, layers, block)
        parts[0][3].fill_(0)
        assert not next(iter(layers.values()))[3].all(), "they are views"

    def test_planes_of_k_and_v(self):
        cache = torch.rand(2, NUM_BLOCKS, TOKENS, HEADS, CONTENT)
        k, v = parts_of_blocks("0", cache, NUM_BLOCKS)
        assert (bytes_of(k[5]), bytes_of(v[5])) == (bytes_of(cache[0, 5]), bytes_of(cache[1, 5]))

    @pytest.mark.parametrize(
        "cache",
        [
            torch.empty(2 * NUM_BLOCKS, HEADS, NUM_BLOCKS, CONTENT),  # split by the attention backend
            torch.empty(NUM_BLOCKS, HEADS, TOKENS, 2 * CONTENT)[..., ::2],
            torch.empty(HEADS, TOKENS, NUM_BLOCKS, CONTENT).permute(2, 0, 1, 3),  # a run for each head and token
            torch.empty(4096),  # the raw memory of a model without attention
        ],
    )
    def test_scattered_blocks_are_refused(self, cache: Any):
        with pytest.raises(ConfigError, match=r"layer 0\.attn has shape .* strides .* VLLM_KV_CACHE_LAYOUT=LBNHC"):
            parts_of_blocks("0.attn", cache, NUM_BLOCKS)

    def test_layers_on_two_devices_are_refused(self):
        caches = {name: torch.empty(NUM_BLOCKS, 1, 2, 4, device=name) for name in ("cpu", "meta")}
        with pytest.raises(ConfigError, match="on cpu, meta; this connector needs one device"):
            memory_of(caches, NUM_BLOCKS, keys_of, 3)

    def test_the_store_reads_and_fills_main_memory_where_it_is(self):
        layers = layers_in("LBHNC")
        memory = memory_of(layers, NUM_BLOCKS, keys_of, 3)
        assert isinstance(memory, HostMemory)
        for buffer, layer in zip(memory._buffers(4), layers.values(), strict=True):
            assert buffer.ctypes.data == layer[4].data_ptr()
            assert buffer.nbytes == layer[4].nbytes

    def test_small_pieces_of_planes_cross_the_link_together(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **more: object())
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        with fake_gpu():
            cache = torch.empty(2, NUM_BLOCKS, TOKENS, HEADS, CONTENT, dtype=torch.bfloat16, device=GPU)
            blocks = DeviceBlocks([part for name in "01" for part in parts_of_blocks(name, cache, NUM_BLOCKS)])
            copier = CudaCopier([GPU], settled=True)
            monkeypatch.setattr(copier, "copy", lambda *args: pytest.fail("a copy of one piece"))
            staged = torch.empty(3, blocks.block_bytes, dtype=torch.uint8)
            copier.gather(0, staged, blocks, [7, 3, 0])
            copier.scatter(1, blocks, [7, 3, 0], staged)
        assert (len(blocks.parts), blocks.block_bytes) == (4, 2 * 2 * TOKENS * HEADS * CONTENT * 2)


def test_an_event_is_recorded_behind_the_current_stream(monkeypatch: pytest.MonkeyPatch):
    done: list[Any] = []

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking, "a waiting thread would take a core"

        def record(self, stream: str) -> None:
            done.append(stream)

        def synchronize(self) -> None:
            done.append("waited")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(done.append(f"on {device}")))
    wait = record_event(torch.device("cuda", 1))
    assert done == ["stream of cuda:1"]
    wait()
    assert done[1:] == ["on cuda:1", "waited"]


# --- transfers


def keys_of(hashes: Sequence[bytes]) -> list[Any]:
    return [each.hex() for each in hashes]


class WholeBlocks(MemoryStore):
    """Values are read and written through one buffer each; ``error_at`` makes the call for this key fail."""

    error_at: tuple[str, TanghuluError] = ("", ChunkNotFound(""))

    def _fails(self, keys: Sequence[str]) -> None:
        self._call()
        if self.error_at[0] in keys:
            raise self.error_at[1]

    def get_many_into(self, keys: Any, buffers: Any, *, deadline_s: float | None = None) -> list[int | TanghuluError]:
        self._fails(keys)
        found: list[int | TanghuluError] = []
        for key, buffer in zip(keys, buffers, strict=True):
            if key in self.chunks:
                buffer[:] = self.chunks[key]
            found.append(len(buffer) if key in self.chunks else ChunkNotFound(key))
        return found

    def put_many(self, items: Any, *, deadline_s: float | None = None) -> list[Status]:
        self._fails([key for key, _ in items])
        self.chunks |= {key: bytes(value) for key, value in items}
        return [Status(key) for key, _ in items]


class Stream:
    """Computation in the order of its launches, which has run when somebody has waited for it, and not before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._launched: list[Callable[[], object]] = []
        self._num_run = 0

    def launch(self, work: Callable[[], object]) -> None:
        self._launched.append(work)

    def record(self) -> Wait:
        count = len(self._launched)
        return lambda: self.run(count)

    def run(self, count: int | None = None) -> None:
        with self._lock:
            while self._num_run < (len(self._launched) if count is None else count):
                self._launched[self._num_run]()
                self._num_run += 1


class GatedCopier(LateCopier):
    """Waits for its copies end only while the gate is open."""

    def __init__(self, begun: threading.Event, gate: threading.Event) -> None:
        super().__init__()
        self._begun, self._gate = begun, gate

    def wait(self, half: int) -> None:
        if self.num_under_way:
            self._begun.set()
            assert self._gate.wait(30)
        super().wait(half)


class Rank:
    """A cache on a device, its transfers, and what ended."""

    def __init__(self, layout: str, store: WholeBlocks) -> None:
        self.layout, self.layers, self.stream = layout, layers_in(layout), Stream()
        self.begun, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        self.copiers: list[LateCopier] = []
        parts = [part for name, layer in self.layers.items() for part in parts_of_blocks(name, layer, NUM_BLOCKS)]
        num_threads = OPTIONS.threads + NUM_SAVE_THREADS
        self.memory = DeviceMemory(keys_of, parts, num_threads, self._make_copier, self.stream.record)
        self.store = BlockStore(store)  # type: ignore[arg-type]
        self.transfers = Transfers(self.store, self.memory, OPTIONS)

    def _make_copier(self) -> LateCopier:
        self.copiers.append(GatedCopier(self.begun, self.gate))
        return self.copiers[-1]

    def bytes_of(self, block: int) -> bytes:
        return block_bytes(self.layout, self.layers, block)

    def fill(self, block: int, value: int) -> None:
        for layer in self.layers.values():
            layer[block].fill_(value)

    def wait(self, num_loads: int = 0, num_saves: int = 0) -> Ended:
        ended = Ended()
        while len(ended.loaded) < num_loads or ended.saved.total() < num_saves:
            more = self.transfers.take_ended(10)
            ended.loaded |= more.loaded
            ended.bad_block_ids |= more.bad_block_ids
            ended.saved.update(more.saved)
        return ended

    def save(self, *block_ids: int) -> Ended:
        self.transfers.save(SaveJob(0, named(*block_ids)), self.memory.mark())
        return self.wait(num_saves=1)

    def load(self, *block_ids: int) -> Ended:
        self.transfers.load(LoadJob("r", named(*block_ids)), self.memory.mark())
        return self.wait(num_loads=1)

    def close(self) -> None:
        self.transfers.close()
        self.store.close()
        self.memory.close()
        assert not any(each.num_under_way for each in self.copiers)


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block or two a round, so that helpers and both halves of a ring have something to do."""
    monkeypatch.setattr(gpu_mover, "_ROUND_BYTES", 1)
    monkeypatch.setattr(cache_memory, "_RING_BYTES", 2)


@pytest.fixture
def store() -> WholeBlocks:
    return WholeBlocks()


@pytest.fixture(params=["LBNHC", "LHBNC"])
def rank(store: WholeBlocks, request: pytest.FixtureRequest) -> Iterator[Rank]:
    made = Rank(request.param, store)
    yield made
    made.gate.set()
    made.close()


def named(*ids: int) -> tuple[Block, ...]:
    """Blocks named by their position."""
    return tuple(Block(bytes([at]), block_id) for at, block_id in enumerate(ids))


def test_what_was_saved_is_loaded_into_other_blocks(store: WholeBlocks, rank: Rank):
    before = [rank.bytes_of(block) for block in (1, 2, 3, 0)]
    assert rank.save(1, 2, 3, 0).saved == {0: 1}
    assert [store.chunks[key] for key in keys_of([bytes([at]) for at in range(4)])] == before
    ended = rank.load(5, 4, 8, 6)
    assert (ended.loaded, ended.bad_block_ids) == ({"r"}, set())
    assert [rank.bytes_of(block) for block in (5, 4, 8, 6)] == before


def test_a_save_reads_what_was_computed_and_not_what_was_there_before(store: WholeBlocks, rank: Rank):
    """It starts when the computation of its blocks is queued, and a later step must not be in it either."""
    rank.stream.launch(lambda: rank.fill(2, 7))
    rank.transfers.save(SaveJob(0, named(2)), rank.memory.mark())
    rank.stream.launch(lambda: rank.fill(3, 9))
    rank.wait(num_saves=1)
    assert rank.bytes_of(2) == store.chunks["00"]
    assert all((layer[2] == 7).all() for layer in rank.layers.values())
    assert not any((layer[3] == 9).all() for layer in rank.layers.values()), "it waits for no later computation"


def test_a_load_overwrites_nothing_that_queued_computation_uses(store: WholeBlocks, rank: Rank):
    """The blocks' former request is read by a step under way, and vLLM may zero blocks before it gives them away."""
    rank.save(1, 2)
    loaded, former, read = [rank.bytes_of(1), rank.bytes_of(2)], rank.bytes_of(6), []
    rank.stream.launch(lambda: read.append(rank.bytes_of(6)))
    rank.stream.launch(lambda: rank.fill(6, 0))
    rank.load(6, 7)
    rank.stream.run()
    assert read == [former]
    assert [rank.bytes_of(6), rank.bytes_of(7)] == loaded


def test_a_load_has_ended_when_its_copies_have_landed(rank: Rank):
    rank.save(1, 2, 3)
    rank.begun.clear()
    rank.gate.clear()
    rank.transfers.load(LoadJob("r", named(5, 6, 7)), rank.memory.mark())
    assert rank.begun.wait(30)
    assert rank.transfers.take_ended() == Ended(), "the store has answered, the device has not"
    rank.gate.set()
    assert rank.wait(num_loads=1).bad_block_ids == set()
    assert [rank.bytes_of(block) for block in (5, 6, 7)] == [rank.bytes_of(block) for block in (1, 2, 3)]


@pytest.mark.parametrize("lost", [0, 1, 4])
def test_blocks_behind_a_lost_one_are_lost(store: WholeBlocks, rank: Rank, lost: int):
    rank.save(0, 1, 2, 3, 4)
    del store.chunks[bytes([lost]).hex()]
    wanted = [rank.bytes_of(block) for block in range(lost)]
    loading = (8, 7, 6, 5, 4)
    ended = rank.load(*loading)
    assert (ended.loaded, ended.bad_block_ids) == ({"r"}, set(loading[lost:]))
    assert [rank.bytes_of(block) for block in loading[:lost]] == wanted


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_a_store_that_fails_on_the_way(store: WholeBlocks, rank: Rank, failing: int):
    rank.save(0, 1, 2, 3)
    key = bytes([failing]).hex()
    store.error_at = key, DeadlineExceeded("late")
    ended = rank.load(4, 5, 6, 7)
    assert ended.loaded == {"r"}
    assert ended.bad_block_ids >= set(range(4 + failing, 8)), "the store is skipped after an error"
    rank.store = rank.transfers._store = BlockStore(store)  # type: ignore[arg-type]
    store.chunks.clear()
    store.error_at = key, StoreFull("full")
    assert rank.save(0, 1, 2, 3).saved == {0: 1}
    assert key not in store.chunks


@pytest.mark.parametrize("error", [DeadlineExceeded("late"), RuntimeError("a bug")])
def test_every_transfer_ends_whatever_happens(store: WholeBlocks, rank: Rank, error: Exception):
    before = [rank.bytes_of(block) for block in (5, 6)]
    store.error = error
    ended = rank.load(5, 6)
    assert (ended.loaded, ended.bad_block_ids) == ({"r"}, {5, 6})
    assert rank.save(1, 2).saved == {0: 1}
    assert [rank.bytes_of(block) for block in (5, 6)] == before


def test_a_device_that_failed_ends_its_transfers(store: WholeBlocks, rank: Rank):
    rank.save(1)

    def wait() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    rank.transfers.load(LoadJob("r", named(5)), wait)
    rank.transfers.save(SaveJob(1, (Block(b"\x09", 2),)), wait)
    ended = rank.wait(num_loads=1, num_saves=1)
    assert (ended.bad_block_ids, ended.saved) == ({5}, {1: 1})
    assert "09" not in store.chunks


def test_a_shutdown_with_transfers_under_way(store: WholeBlocks, rank: Rank):
    """They end, those that had not begun as failed, and no copy is left behind."""
    rank.save(1, 2)
    saved = [rank.bytes_of(1), rank.bytes_of(2)]
    inside, go_on = threading.Event(), threading.Event()

    def computing() -> None:
        inside.set()
        assert go_on.wait(30)

    for number in range(3):
        rank.transfers.save(SaveJob(number, (Block(b"\x08", 3), Block(b"\x09", 4))), computing)
    rank.begun.clear()
    rank.gate.clear()
    rank.transfers.load(LoadJob("r", named(5, 6)), rank.memory.mark())
    assert inside.wait(30)
    assert rank.begun.wait(30)
    rank.transfers.close()
    rank.store.close()
    closing = threading.Thread(target=rank.memory.close)
    closing.start()
    go_on.set()
    rank.gate.set()
    ended = rank.wait(num_loads=1, num_saves=3)
    closing.join(30)
    assert not closing.is_alive()
    assert (ended.loaded, ended.saved) == ({"r"}, {0: 1, 1: 1, 2: 1})
    assert ended.bad_block_ids in (set(), {6}, {5, 6})
    good = [block for block in (5, 6) if block not in ended.bad_block_ids]
    assert [rank.bytes_of(block) for block in good] == saved[: len(good)]
