"""An engine in its thread with its connector, a store in memory, and peers that are away."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from tanghulu.errors import ChunkNotFound, NodeUnavailable
from tanghulu.session.outputs import KvSource, PrefixHolder
from tanghulu.session.speed import SpeedMeter
from tanghulu.store.client.block_store import BlockStore
from tanghulu.store.client.model import Status
from tanghulu.types import BlockHash, Fingerprint
from tanghulu.workers.compute.models.model import Model, kv_dtype_name
from tanghulu.workers.compute.runners import TorchRunner
from tanghulu.workers.engine.engine import EngineCore, ModelRunner
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.engine.scheduler import EngineCoreConfig
from tanghulu.workers.engine.thread import EngineThread, StepReport
from tanghulu.workers.kv.connector import ConnectorConfig, KvConnector
from tanghulu.workers.kv.peer_reader import ExportPart, PeerReader
from tanghulu.workers.kv.ports import BlockPort, HostBlocks
from tanghulu.workers.kv.store_adapter import StoreAdapter
from tanghulu.workers.metrics import WorkerMetrics
from tests.workers.tiny import BLOCK, VOCAB, request, runner_of

PROMPT = [2 + i % (VOCAB - 2) for i in range(5 * BLOCK + 3)]


class DictStore:
    """A store in memory, with a switch for failure; ``client`` is what a worker's adapter calls."""

    def __init__(self) -> None:
        self.chunks: dict[bytes, bytes] = {}  # by the hash of the block
        self.broken = False
        self.gate = threading.Event()
        self.gate.set()

    def get_many_into(self, keys: Sequence[str], buffers: Sequence[memoryview], **_: object) -> list[Any]:
        self._pass()
        found: list[Any] = []
        for key, buffer in zip(keys, buffers, strict=True):
            block_hash = _hash_of(key)
            if block_hash in self.chunks:
                buffer[:] = self.chunks[block_hash]
            found.append(len(buffer) if block_hash in self.chunks else ChunkNotFound(key))
        return found

    def put_many(self, items: Sequence[tuple[str, memoryview]], **_: object) -> list[Status]:
        self._pass()
        self.chunks.update({_hash_of(key): value.tobytes() for key, value in items})
        return [Status(key) for key, _ in items]

    def _pass(self) -> None:
        assert self.gate.wait(30)
        if self.broken:
            raise NodeUnavailable("the node is away")


def _hash_of(key: str) -> bytes:
    return bytes.fromhex(key.split("/")[2])


class NoPeers:
    def read(self, parts: Sequence[ExportPart], buffers: Sequence[memoryview]) -> int:
        raise NodeUnavailable("the prefill worker is away")

    def read_prefix(self, holder: PrefixHolder, hashes: Sequence[BlockHash], buffers: Sequence[memoryview]) -> int:
        raise NodeUnavailable("the holder is away")

    def read_in_place(self, *_: object) -> None:
        """Nothing is shared."""

    read_prefix_in_place = read_in_place

    def release(self, peer: KvSource, bytes_read: int = 0, *, keep: bool = False) -> None:
        raise NodeUnavailable("the prefill worker is away")


def read_export(reader: PeerReader, peer: KvSource, first_block: int, buffers: Sequence[memoryview]) -> int:
    """Read one export's blocks from ``first_block`` on."""
    return reader.read([ExportPart(peer, first_block, len(buffers))], buffers)


class Rig:
    """An engine in its thread with its connector; reports come in a queue."""

    def __init__(
        self,
        model: Model,
        store: DictStore | None,
        peers: Any = None,
        runner: ModelRunner | None = None,
        port: BlockPort | None = None,
        *,
        num_blocks: int = 64,
        moves_preempted: bool = False,
        kv_dtype: str = "auto",
        **bounds: float,
    ) -> None:
        self.registry = CollectorRegistry()
        layout = KvLayout.of(model.config, BLOCK, kv_dtype_name(kv_dtype, model.dtype))
        self.metrics = WorkerMetrics(self.registry, layout, num_blocks)
        adapter = None if store is None else StoreAdapter(BlockStore(store), Fingerprint(bytes(16)), layout.layer_bytes)  # type: ignore[arg-type]
        if runner is None:
            capacity = num_blocks * layout.block_bytes
            in_place = runner_of(TorchRunner, model, block_tokens=BLOCK, kv_dtype=kv_dtype, kv_capacity_bytes=capacity)
            runner, port = in_place, HostBlocks(in_place.cache)
        assert port is not None
        limits = ConnectorConfig(**bounds)  # type: ignore[arg-type]
        self.connector = KvConnector(adapter, peers or NoPeers(), self.metrics, SpeedMeter(), layout, port, limits)
        config = EngineCoreConfig(block_tokens=BLOCK, moves_preempted=moves_preempted, debug_checks=True)
        self.core = EngineCore(runner, config, self.connector)
        self.reports: queue.Queue[StepReport | BaseException] = queue.Queue()
        self.thread = EngineThread(self.core, self._report, self.reports.put)
        self.connector.attach(self.thread)
        self.thread.start()

    def _report(self, report: StepReport) -> None:
        self.metrics.report([report])
        self.reports.put(report)

    def run(self, name: str, prompt: Sequence[int], num_tokens: int, **more: object) -> tuple[list[int], int]:
        """(tokens, cached tokens) of one request."""
        made = request(name, prompt, num_tokens, **more)  # type: ignore[arg-type]
        self.thread.post(lambda core: core.add(made))
        tokens: list[int] = []
        while True:
            for output in self.next_report().result.outputs:
                assert output.request_id == name
                tokens += output.tokens
                if output.finish is not None:
                    return tokens, output.cached_tokens

    def run_all(self, prompts: dict[str, list[int]], num_tokens: int) -> dict[str, list[int]]:
        """The greedy tokens of all ``prompts``, served at once."""
        made = [request(name, prompt, num_tokens) for name, prompt in prompts.items()]
        self.thread.post(lambda core: [core.add(each) for each in made] and None)
        texts: dict[str, list[int]] = {name: [] for name in prompts}
        while any(len(text) < num_tokens for text in texts.values()):
            for output in self.next_report().result.outputs:
                texts[output.request_id] += output.tokens
        return texts

    def next_report(self) -> StepReport:
        report = self.reports.get(timeout=30)
        assert isinstance(report, StepReport), report
        return report

    def run_until_idle(self) -> None:
        """Wait until everything under way has come back to the engine."""
        while self.value("store_pending_blocks") or self.value("blocks_in_use"):
            self.next_report()

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"tanghulu_worker_{name}", labels) or 0.0

    def drop(self) -> None:
        done = threading.Event()
        self.thread.post(lambda core: (core.pool.drop_cached(), done.set())[1])
        assert done.wait(30)

    def close(self) -> None:
        self.connector.close()
        self.thread.stop()
        self.core.check()
