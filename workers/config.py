"""Options of a worker process, checked once at start."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from tanghulu.errors import ConfigError
from tanghulu.eviction.policies import POLICIES
from tanghulu.model_files.fields import MAX_COUNT
from tanghulu.runtime.config import check_bounds, option
from tanghulu.transfer_engine.options import TransferOptions
from tanghulu.workers.engine.block_pool import DEFAULT_EVICTION
from tanghulu.workers.engine.ngram_drafts import NgramProposer
from tanghulu.workers.kv.store_policy import POLICIES as STORE_POLICIES
from tanghulu.workers.sessions.port import SessionOptions


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(TransferOptions, SessionOptions):
    """Options of a worker."""

    model: str = option("smollm2", "a directory with safetensors or GGUF, a .gguf file, or smollm2", metavar="DIR")
    engine: str = option("torch", "torch, or mock, which imitates a model's timing", choices=("torch", "mock"))
    dtype: str = option("auto", "type of the weights", choices=("auto", "float32", "bfloat16", "float16"))
    kv_dtype: str = option(
        "auto",
        "type of the KV in cache, store and transfers; auto follows --dtype, int8 halves bfloat16 with a small loss",
        choices=("auto", "float32", "bfloat16", "int8"),
    )
    device: str = option("auto", "device of the model: auto (a GPU if torch finds one), cpu, cuda or cuda:N")
    device_turn: int = option(
        0,
        "number of this worker on its host, by which --device auto and cuda pick its GPU (with --tp, its GPUs)",
        least=0,
        most=MAX_COUNT,
    )
    device_workers: int = option(
        1, "number of workers on this host; those on one GPU share its memory for KV", least=1, most=MAX_COUNT
    )
    attention: str = option("auto", "attention backend", choices=("auto", "triton", "varlen", "sdpa"))
    batch_invariant: bool = option(
        False,
        "compute the same bits for a request whether it is batched, chunked, cached or moved; slows prefills down",
    )
    graphs: bool = option(True, "replay decode steps from CUDA graphs, on GPUs")
    kv_memory: int = option(
        0,
        "memory of the paged KV cache; 0 means 1 GiB on a CPU, and 90 % of what the model leaves free on a GPU",
        size=True,
    )
    kv_staging: int = option(
        1 << 30, "pinned host memory for KV on its way between a GPU and the store or other workers", size=True
    )
    block_tokens: int = option(64, "tokens per block; equal for all workers that share KV", least=1)
    block_hash: str = option("xxh3_128", "hash of block names", choices=("xxh3_128", "sha256"))
    max_num_batched_tokens: int = option(
        0, "limit on tokens per step; bounds how long a prefill delays decodes; 0 means 512 on a CPU, 2048 on a GPU"
    )
    max_num_seqs: int = option(0, "limit on requests per step; 0 means 32 on a CPU, 128 on a GPU")
    max_num_waiting: int = option(1024, "limit on queued requests; further ones are rejected", least=1)
    eviction: str = option(DEFAULT_EVICTION, "eviction policy of cached blocks", choices=tuple(POLICIES))
    threads: int = option(0, "limit on the model's threads; 0 means one per usable core", most=4096)
    lora: str = option("", "name=DIR: serve the model with this LoRA adapter (PEFT's format) as MODEL:name")
    speculative: str = option(
        "", "ngram:K proposes up to K tokens that followed the last ones before; the same text in fewer steps"
    )
    tp: int = option(1, "number of tensor-parallel ranks, a process each, on this host", least=1, most=1024)
    store_policy: str = option(
        "all",
        "blocks written to the store: all, those used twice, the rest as well when idle (defer), none",
        choices=tuple(STORE_POLICIES),
    )
    preemption: str = option(
        "recompute",
        "treatment of a preempted request's full blocks: recompute lost ones, or move them to the store",
        choices=("recompute", "store"),
    )
    peer_fetch: bool = option(True, "read prefixes from other workers' caches when the conductor asks for it")
    profile: str = option("", "write a torch profiler trace of the first 64 steps to this file", debug=True)
    checks: bool = option(False, "assert all invariants after every step (slow)", debug=True)
    mock_speedup: float = option(1.0, "speedup of the mock engine's timing", above=0, debug=True)
    mock_timing: str = option(
        "cpu-135m", "the mock engine's model of time", choices=("cpu-135m", "gpu-8b", "gpu-70b"), debug=True
    )
    mock_kv_token_bytes: int = option(
        16, "bytes of KV per token of the mock engine; a multiple of 8", least=8, debug=True
    )
    mock_hold: Path | None = option(
        None, "directory of files that pause the mock engine before steps (docs/workers.md)", debug=True
    )
    deterministic: bool = option(
        False, "make the mock engine's text depend on prompt and position alone, not on seeds", debug=True
    )

    def __post_init__(self) -> None:
        SessionOptions.__post_init__(self)
        check_bounds(self)
        is_speculative = NgramProposer.of(self.speculative) is not None
        if self.engine != "torch":
            self._require_no_model(is_speculative)
        if self.mock_kv_token_bytes % 8:
            raise ConfigError(f"--debug mock_kv_token_bytes={self.mock_kv_token_bytes} is no multiple of 8")
        if self.batch_invariant and (self.tp > 1 or self.attention in ("triton", "varlen")):
            raise ConfigError(
                f"--batch-invariant works with --tp 1 and --attention auto or sdpa, not with --tp {self.tp} and "
                f"--attention {self.attention}"
            )
        if self.preemption == "store" and not self.store:
            raise ConfigError("--preemption store needs the store: drop --no-store, or use --preemption recompute")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"--device is {self.device!r}; use auto, cpu, cuda or cuda:N")

    def for_device(self, *, on_gpu: bool) -> Self:
        """Return these with the device's values for limits that are 0; ``kv_memory`` on a GPU depends on the model."""
        tokens, seqs, kv_memory = (2048, 128, 0) if on_gpu else (512, 32, 1 << 30)
        return replace(
            self,
            max_num_batched_tokens=self.max_num_batched_tokens or tokens,
            max_num_seqs=self.max_num_seqs or seqs,
            kv_memory=self.kv_memory or kv_memory,
        )

    def _require_no_model(self, is_speculative: bool) -> None:
        """Raise ConfigError for options that only a real model supports."""
        needs_model = {
            "--kv-dtype": self.kv_dtype != "auto",
            "--lora": bool(self.lora),
            "--speculative": is_speculative,
            "--tp": self.tp > 1,
            "--batch-invariant": self.batch_invariant,
            "--debug profile": bool(self.profile),
        }
        for name, is_set in needs_model.items():
            if is_set:
                raise ConfigError(f"{name} works with --engine torch only; --engine {self.engine} computes no model")
