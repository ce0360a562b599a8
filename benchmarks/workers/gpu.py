"""What the engine does on a GPU: decode, prefill, KV from main memory, and what 90 % of a long prompt is worth.

    python -m benchmarks.workers.gpu [--device cuda] [--model 8b] [--no-check]
    python -m benchmarks.workers.gpu --device cpu --model tiny --batches 1,4 --prefill 256 --long 512   # does it run?

Weights are random, of the named model's shape; text does not matter to the time. The engine is the worker's own:
scheduler, runner, graphs, connector, and KV that passes through pinned memory. One round warms up, the least of
``--rounds`` counts.

check: logits of a prompt beside transformers with the same weights. decode: tokens/s of a batch behind prompts of
``--context`` tokens, with graphs and without. prefill: tokens/s of one prompt. load, save: GB/s of blocks between main
memory and the cache, copied out of ordinary memory into the ring as from a store's node, and as fast as the ring alone
goes, beside one plain copy of pinned memory. long: seconds to the first token, cold, with 90 % in a store in main
memory, with 90 % in the cache.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
import numpy as np
import torch
from prometheus_client import CollectorRegistry

from benchmarks.common.report import keep
from tanghulu.hashing import TokenSequence, root_hash
from tanghulu.session.outputs import KvSource, PrefixHolder
from tanghulu.session.sampling import Sampling, StopRule
from tanghulu.session.speed import SpeedMeter
from tanghulu.transfer_engine.gpu.mover import BlockMover
from tanghulu.transfer_engine.gpu.staging import DeviceBlocks, StagingRing, make_copier
from tanghulu.types import BlockHash, Fingerprint, RequestId
from tanghulu.workers.compute.attention.backends import AttentionNeeds, pick_attention
from tanghulu.workers.compute.device import describe_device, pick_device, wait_for
from tanghulu.workers.compute.forward_batch import SequenceChunk, build_forward_batch
from tanghulu.workers.compute.models.model import Model, dtype_name, load_model, pick_dtype
from tanghulu.workers.compute.runners import DeviceRunner
from tanghulu.workers.engine.engine import EngineCore
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.engine.requests import EngineRequest
from tanghulu.workers.engine.scheduler import EngineCoreConfig
from tanghulu.workers.engine.thread import EngineThread, StepReport
from tanghulu.workers.kv.connector import ConnectorConfig, KvConnector
from tanghulu.workers.kv.peer_reader import ExportPart
from tanghulu.workers.kv.staging import NUM_RINGS
from tanghulu.workers.metrics import WorkerMetrics
from tanghulu.workers.weights.hf_config import config_from_hf
from tanghulu.workers.weights.model_config import ModelConfig
from tanghulu.workers.weights.source import ModelSource

SHARED = 0.9
STEPS = 64
PATIENCE_S = 600.0
ROOT = root_hash(Fingerprint(b"benchmarks/gpu.."))


def shape(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": 65_536,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "bos_token_id": 0,
    }


#: Llama 3.2 1B and 3B, Llama 3.1 8B, and one that a CPU computes.
SHAPES = {
    "tiny": shape(64, 128, 2, 4, 2, 300),
    "1b": shape(2048, 8192, 16, 32, 8, 128_256),
    "3b": shape(3072, 8192, 28, 24, 8, 128_256),
    "8b": shape(4096, 14_336, 32, 32, 8, 128_256),
}


class RandomWeights:
    """A `WeightSource` whose tensors follow from their names, made where they are used."""

    def __init__(self, config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> None:
        hidden, width = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
        kv_width, inner = config["num_key_value_heads"] * config["head_dim"], config["intermediate_size"]
        vocabulary = (config["vocab_size"], hidden)
        self._shapes: dict[str, tuple[int, ...]] = {
            "embed_tokens": vocabulary, "lm_head": vocabulary, "q_proj": (width, hidden), "k_proj": (kv_width, hidden),
            "v_proj": (kv_width, hidden), "o_proj": (hidden, width), "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden), "down_proj": (hidden, inner),
        }  # fmt: skip
        self._hidden, self._device, self._dtype = hidden, device, dtype

    def has(self, name: str) -> bool:
        return "rotary" not in name

    def tensor(self, name: str) -> torch.Tensor:
        kind = name.split(".")[-2]
        if kind.endswith("norm"):
            return torch.ones(self._hidden, dtype=self._dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        made = torch.empty(self._shapes[kind], dtype=self._dtype, device=self._device)
        return made.normal_(0, 0.02, generator=generator)

    def untaken(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class RandomModel(ModelSource):
    weights: RandomWeights = field(kw_only=True)

    def open_weights(self) -> RandomWeights:
        return self.weights


class DictStore:
    """A store in this process's ordinary memory, in the place of a worker's adapter."""

    is_available = True

    def __init__(self) -> None:
        self.chunks: dict[bytes, np.ndarray] = {}

    def load(self, hashes: Sequence[BlockHash], buffers: Sequence[memoryview], from_ssd: set[BlockHash]) -> int:
        for count, (block_hash, buffer) in enumerate(zip(hashes, buffers, strict=True)):
            if block_hash not in self.chunks:
                return count
            np.copyto(np.frombuffer(buffer, np.uint8), self.chunks[block_hash])
        return len(hashes)

    def save(self, hashes: Sequence[BlockHash], buffers: Sequence[memoryview]) -> int:
        self.chunks.update({h: np.frombuffer(b, np.uint8).copy() for h, b in zip(hashes, buffers, strict=True)})
        return len(hashes)


class NoPeers:
    def read(self, parts: Sequence[ExportPart], buffers: Sequence[memoryview]) -> int:
        return 0

    def read_prefix(self, holder: PrefixHolder, hashes: Sequence[BlockHash], buffers: Sequence[memoryview]) -> int:
        return 0

    def read_in_place(self, *_: object) -> int:
        return 0

    read_prefix_in_place = read_in_place

    def release(self, peer: KvSource, bytes_read: int = 0, *, keep: bool = False) -> None:
        pass


class Bench:
    """A model on its device, and engines over it."""

    def __init__(self, device: torch.device, model: str, dtype: str, block_tokens: int, attention: str) -> None:
        self.device, self.block_tokens, self.config = device, block_tokens, SHAPES[model]
        self.dtype = pick_dtype(dtype, device)
        own: ModelConfig = config_from_hf(self.config)
        self.weights = RandomWeights(self.config, device, self.dtype)
        needs = AttentionNeeds(device, self.dtype, own.head_dim, block_tokens)
        backend = pick_attention(attention, needs)
        source = RandomModel(model, own, (), None, weights=self.weights)
        self.model: Model = load_model(source, self.dtype, device=device, attention=backend)
        self._numbers = iter(range(10**9))

    def request(self, tokens: Sequence[int], num_new: int) -> EngineRequest:
        sequence = TokenSequence(ROOT, self.block_tokens, list(tokens))
        sampling, stop = Sampling(temperature=0), StopRule(num_new, ignore_eos=True)
        return EngineRequest(RequestId(str(next(self._numbers))), sequence, len(tokens), sampling, stop)

    def prompt(self, length: int, seed: int) -> list[int]:
        return random.Random(seed).choices(range(2, self.config["vocab_size"]), k=length)

    def runner(self, num_tokens: int, num_seqs: int = 1, graphs: bool = True) -> DeviceRunner:
        num_blocks = num_seqs * (-(-num_tokens // self.block_tokens) + 1)
        layout = KvLayout.of(self.model.config, self.block_tokens, dtype_name(self.model.dtype))
        return DeviceRunner(self.model, layout, num_blocks, graphs=graphs)

    def engine(self, runner: DeviceRunner, budget: int, num_seqs: int = 1, **hooks: Any) -> EngineCore:
        sizes = {"max_num_batched_tokens": max(budget, num_seqs), "max_num_seqs": num_seqs}
        return EngineCore(runner, EngineCoreConfig(block_tokens=self.block_tokens, **sizes), **hooks)

    # --- what is measured

    def check(self, num_tokens: int) -> dict[str, Any]:
        """The largest difference from transformers' logits, as a part of the largest logit."""
        from transformers import LlamaConfig, LlamaForCausalLM

        tokens, runner = self.prompt(num_tokens, 1), self.runner(num_tokens)
        chunk = SequenceChunk(tokens, 0, range(runner.cache.num_blocks), True)
        ours = self.model.forward(build_forward_batch([chunk], self.block_tokens, self.device), runner.cache)[0]
        with torch.device(self.device):
            theirs = LlamaForCausalLM(LlamaConfig(**self.config)).to(self.dtype).eval()
        with torch.inference_mode():
            for name, parameter in theirs.named_parameters():
                parameter.copy_(self.weights.tensor(name))
            wanted = theirs(torch.tensor([tokens], device=self.device)).logits[0, -1].float()
        error = float((ours - wanted).abs().max() / wanted.abs().max())
        return {"what": "check", "tokens": num_tokens, "relative_error": error}

    def decode(self, batch: int, context: int, rounds: int, graphs: bool) -> dict[str, Any]:
        runner = self.runner(context + (rounds + 1) * STEPS + 1, batch, graphs)
        core = self.engine(runner, 2048, batch)
        for number in range(batch):
            core.add(self.request(self.prompt(context, number), (rounds + 1) * STEPS + 1))
        while core.step().num_sequences < batch or core.scheduler.pending[0] > batch:
            pass
        seconds = [_timed(lambda: [core.step() for _ in range(STEPS - 1)]) for _ in range(rounds + 1)][1:]
        rate = batch * (STEPS - 1) / min(seconds)
        return {"what": "decode", "batch": batch, "context": context, "graphs": graphs, "tokens_per_s": rate}

    def prefill(self, length: int, rounds: int) -> dict[str, Any]:
        runner = self.runner(length)
        seconds = []
        for number in range(rounds + 1):
            core = self.engine(runner, length)
            core.add(self.request(self.prompt(length, number), 1))
            seconds.append(_timed(core.step))
        return {"what": "prefill", "tokens": length, "tokens_per_s": length / min(seconds[1:])}

    def transfers(self, num_bytes: int, ring_bytes: int, rounds: int) -> list[dict[str, Any]]:
        """Blocks in and out, and the plain copies of pinned memory beside them."""
        runner = self.runner(self.block_tokens)
        count = max(8, num_bytes // runner.layout.block_bytes)
        runner = self.runner(self.block_tokens * count)
        port = self._port(runner, ring_bytes)
        size = count * runner.layout.block_bytes
        chunks = [np.ones(runner.layout.block_bytes, np.uint8) for _ in range(count)]
        blocks = list(range(count))

        def load(at: int, buffers: Sequence[memoryview]) -> int:
            for chunk, buffer in zip(chunks[at:], buffers, strict=False):
                np.copyto(np.frombuffer(buffer, np.uint8), chunk)
            return len(buffers)

        def save(at: int, buffers: Sequence[memoryview]) -> int:
            for chunk, buffer in zip(chunks[at:], buffers, strict=False):
                np.copyto(chunk, np.frombuffer(buffer, np.uint8))
            return len(buffers)

        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        target = runner.cache.memory[:count].view(-1)
        nothing: Callable[[int, Sequence[memoryview]], int] = lambda at, buffers: len(buffers)  # noqa: E731
        ways: dict[str, Callable[[], object]] = {
            "load": lambda: port.fill(blocks, load),
            "load, ring alone": lambda: port.fill(blocks, nothing),
            "load, plain pinned copy": lambda: (target.copy_(pinned, non_blocking=True), wait_for(self.device)),
            "save": lambda: port.drain(blocks, save),
            "save, ring alone": lambda: port.drain(blocks, nothing),
            "save, plain pinned copy": lambda: (pinned.copy_(target, non_blocking=True), wait_for(self.device)),
        }
        return [
            {"what": name, "bytes": size, "gb_per_s": size / min(_timed(way) for _ in range(rounds + 1)) / 1e9}
            for name, way in ways.items()
        ]

    def _port(self, runner: DeviceRunner, ring_bytes: int) -> BlockMover:
        blocks = DeviceBlocks([runner.cache.memory])
        size = max(ring_bytes, 2 * blocks.block_bytes)
        copiers = [make_copier(self.device, settled=True) for _ in range(NUM_RINGS)]
        return BlockMover(blocks, [StagingRing(self.device, size, copier) for copier in copiers])

    def long(self, length: int, budget: int, ring_bytes: int, rounds: int) -> list[dict[str, Any]]:
        """A prompt that is cold; one that shares 90 % with it behind a flush; one that does so without a flush."""
        runner = self.runner(2 * length)
        store = DictStore()
        metrics = WorkerMetrics(CollectorRegistry(), runner.layout, runner.cache.num_blocks)
        bounds = ConnectorConfig(max_pending_bytes=runner.cache.capacity_bytes)
        port = self._port(runner, ring_bytes)
        connector = KvConnector(store, NoPeers(), metrics, SpeedMeter(budget), runner.layout, port, bounds)
        served = Served(self.engine(runner, budget, transfers=connector), connector)
        connector.attach(served.thread)
        ttfts: dict[str, list[float]] = {"cold": [], "90 % in the store": [], "90 % in the cache": []}
        with served.running():
            for number in range(rounds + 1):
                first = self.prompt(length, 100 + number)
                for kind, seconds in ttfts.items():
                    if kind != "90 % in the cache":
                        served.flush()
                    shared = 0 if kind == "cold" else int(SHARED * length)
                    rest = (
                        [] if kind == "cold" else self.prompt(length - shared, 1000 * len(seconds) + len(kind) + number)
                    )
                    prompt = first if kind == "cold" else [*first[:shared], *rest]
                    taken, cached = served.ttft(self.request(prompt, 1))
                    assert kind == "cold" or cached >= shared - self.block_tokens, f"{kind}: {cached} of {shared}"
                    seconds.append(taken)
                store.chunks.clear()
        cold = min(ttfts["cold"][1:])
        return [
            {"what": "ttft", "tokens": length, "kind": kind, "ttft_s": min(each[1:]), "of_cold": min(each[1:]) / cold}
            for kind, each in ttfts.items()
        ]


class Served:
    """An engine in its thread, one request at a time."""

    def __init__(self, core: EngineCore, connector: KvConnector) -> None:
        self.core, self._connector = core, connector
        self._reports: list[StepReport] = []
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self.thread = EngineThread(core, self._report, self._failed)

    def _report(self, report: StepReport) -> None:
        with self._changed:
            self._reports.append(report)
            self._changed.notify()

    def _failed(self, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self.thread.start()
        try:
            yield
        finally:
            self._connector.close()
            self.thread.stop()

    def ttft(self, request: EngineRequest) -> tuple[float, int]:
        """(seconds to its token, tokens that were found); returns when its blocks are stored."""
        start_s = time.perf_counter()
        self.thread.post(lambda core: core.add(request))
        output = self._wait(lambda report: next(iter(report.result.outputs), None))
        taken = time.perf_counter() - start_s
        self.thread.post(lambda core: None)
        self._wait(lambda report: report.load.blocks_in_use == 0)
        return taken, output.cached_tokens

    def flush(self) -> None:
        self.thread.post(lambda core: (core.pool.drop_cached(), None)[1])

    def _wait(self, wanted: Callable[[StepReport], Any]) -> Any:
        with self._changed:
            while True:
                while self._reports:
                    if found := wanted(self._reports.pop(0)):
                        return found
                if self._failure is not None:
                    raise SystemExit(f"the engine failed: {self._failure!r}")
                if not self._changed.wait(PATIENCE_S):
                    raise SystemExit("the engine does not answer")


def _timed(act: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    act()
    return time.perf_counter() - start_s


@click.command()
@click.option("--device", default="cuda", help="cuda, cuda:N, or cpu to see that it runs")
@click.option("--model", type=click.Choice(list(SHAPES)), default="8b")
@click.option("--dtype", default="auto")
@click.option("--attention", default="auto")
@click.option("--block-tokens", default=256, help="torch's kernel reads tables of blocks of a multiple of 256")
@click.option("--batches", default="1,32,128")
@click.option("--context", default=512, help="tokens of a prompt before decode")
@click.option("--prefill", default=8192)
@click.option("--long", "long_tokens", default=32_768)
@click.option("--budget", default=4096, help="tokens of a step in the long prompts")
@click.option("--load-bytes", default=2 << 30)
@click.option("--ring-bytes", default=256 << 20)
@click.option("--rounds", default=3)
@click.option("--check/--no-check", default=True, help="logits beside transformers', which holds the weights again")
def main(device: str, model: str, dtype: str, attention: str, block_tokens: int, **sizes: Any) -> None:
    place = pick_device(device)
    bench = Bench(place, model, dtype, block_tokens, attention)
    rounds, rows = sizes["rounds"], list[dict[str, Any]]()

    def add(*found: dict[str, Any]) -> None:
        for row in found:
            print(row, flush=True)
            rows.append(row)

    if sizes["check"]:
        add(bench.check(min(512, sizes["prefill"])))
    for batch in map(int, sizes["batches"].split(",")):
        for graphs in (True, False) if place.type == "cuda" else (False,):
            add(bench.decode(batch, sizes["context"], rounds, graphs))
    add(bench.prefill(sizes["prefill"], rounds))
    add(*bench.transfers(sizes["load_bytes"], sizes["ring_bytes"], rounds))
    add(*bench.long(sizes["long_tokens"], sizes["budget"], sizes["ring_bytes"], rounds))
    if place.type == "cuda":
        path = keep("gpu", rows, model=model, device=describe_device(place), torch=torch.__version__)
        print(f"kept in {path}")
    else:
        print("a CPU's figures say nothing here and are not kept")


if __name__ == "__main__":
    main()
