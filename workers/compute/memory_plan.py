"""Memory needs of a torch worker, planned before it loads, so that it refuses instead of being killed.

On a GPU the plan is for one rank's device; pinned memory on the host is additional. Some of a GPU's memory is taken by
libraries and by recorded graphs, from outside of what torch's allocator holds ready. Pure but for `available_bytes`.
Weights requested as float32 and kept in half form (`linear`) take half of what is planned for them; only reading them
shows whether they do. Weights in two forms, bfloat16's where a CPU multiplies it, take as much as float32; if that does
not fit, the worker keeps one. Example, SmolLM2 in float32 with 1 GiB of KV: weights 621 MiB (the embedding and its
packed copy as the head 108 each), workspace 83 MiB: 1.7 GiB in all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tanghulu.errors import ConfigError
from tanghulu.types import format_size
from tanghulu.workers.weights.model_config import ModelConfig

_MEMINFO = Path("/proc/meminfo")
_FLOAT32 = 4
#: What a GPU's libraries take: code of kernels, 32 MiB for products on each of three streams, and fragments.
_LIBRARIES_BYTES = 512 << 20
#: Buffers of NCCL, where there are several ranks.
_GROUP_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on this host, all tensor-parallel ranks together; or on the GPU of one rank."""

    weights_bytes: int
    kv_bytes: int
    workspace_bytes: int
    libraries_bytes: int = 0
    graphs_bytes: int = 0

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        *,
        kv_bytes: int,
        num_batched_tokens: int,
        num_seqs: int,
        stored_item_bytes: int,
        computed_item_bytes: int,
        num_ranks: int = 1,
    ) -> MemoryPlan:
        """Plan for steps of at most ``num_batched_tokens`` tokens and ``num_seqs`` sequences.

        ``stored_item_bytes`` is the size of an element of the embedding, ``computed_item_bytes`` of the multiplied
        weights, in all their forms.
        """
        vocabulary = config.vocab * config.hidden
        weights = _layers_elements(config) * computed_item_bytes
        weights += vocabulary * (num_ranks * stored_item_bytes + computed_item_bytes) + num_ranks * _rotary_bytes(
            config
        )
        queries = config.num_heads * config.head_dim
        widest = 4 * config.hidden + 3 * queries + config.mlp_row_elements
        masks = config.max_context * config.num_heads // config.num_kv_heads
        workspace = (
            num_batched_tokens * (widest + masks) * _FLOAT32 * num_ranks + 3 * num_seqs * config.vocab * _FLOAT32
        )
        return cls(weights, kv_bytes, workspace)

    @classmethod
    def on_gpu(
        cls,
        config: ModelConfig,
        *,
        kv_bytes: int,
        block_bytes: int,
        num_batched_tokens: int,
        num_seqs: int,
        item_bytes: int,
        gathered_tokens: int,
        gathered_item_bytes: int,
        has_masks: bool,
        has_graphs: bool = False,
        num_ranks: int = 1,
    ) -> MemoryPlan:
        """Plan for one rank of ``num_ranks``; ``kv_bytes`` and ``block_bytes`` are of all ranks together.

        A tied head is the embedding itself. ``gathered_tokens`` bounds the keys and values that attention copies, at
        ``gathered_item_bytes`` per number; ``has_masks``: it makes a mask for each query. One block beyond those
        requested serves the filling of batches. ``has_graphs``: decode steps are recorded; their workspace is a pool
        apart, in which each size of a step also keeps its logits.
        """
        vocabulary = config.vocab * config.hidden * item_bytes
        heads = 0 if config.tie_embeddings else vocabulary // num_ranks
        layers = _layers_elements(config) * item_bytes // num_ranks
        widest = 4 * config.hidden + (3 * config.num_heads * config.head_dim + config.mlp_row_elements) // num_ranks
        gathered = 2 * max(gathered_tokens, config.max_context) * config.num_kv_heads * config.head_dim // num_ranks
        # Sampling holds probabilities, keys and sums of all rows: some ten numbers of 8 bytes per token.
        sampling = 10 * 2 * _FLOAT32 * num_seqs * config.vocab
        workspace = num_batched_tokens * widest * _FLOAT32 + gathered * gathered_item_bytes + sampling
        if has_masks:
            workspace += num_batched_tokens * config.max_context * config.num_heads // config.num_kv_heads * item_bytes
        recorded = num_seqs * (widest + 4 * config.vocab) * _FLOAT32 + gathered * gathered_item_bytes
        return cls(
            vocabulary + heads + layers + _rotary_bytes(config),
            (kv_bytes + block_bytes) // num_ranks,
            workspace,
            _LIBRARIES_BYTES + (_GROUP_BYTES if num_ranks > 1 else 0),
            recorded if has_graphs else 0,
        )

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.workspace_bytes + self.libraries_bytes + self.graphs_bytes

    def fits(self, available: int | None) -> bool:
        """Return whether the plan is at most ``available`` bytes (None: unknown, not checked)."""
        return available is None or self.total_bytes <= available

    def require(self, available: int | None) -> None:
        """Raise ConfigError with the plan unless it `fits`."""
        if available is not None and not self.fits(available):
            raise ConfigError(
                f"the worker needs {format_size(self.total_bytes)} ({self}); {format_size(available)} is available; "
                "lower --kv-memory or --max-num-batched-tokens, or choose a smaller model or dtype"
            )

    def __str__(self) -> str:
        parts = {"weights": self.weights_bytes, "KV cache": self.kv_bytes, "workspace": self.workspace_bytes}
        parts |= {"libraries": self.libraries_bytes, "recorded graphs": self.graphs_bytes}
        return ", ".join(f"{name} {format_size(size)}" for name, size in parts.items() if size)


def _rotary_bytes(config: ModelConfig) -> int:
    """Return the bytes of the cosines and sines of all positions, of layers with a window separately."""
    return (1 if config.sliding is None else 2) * 2 * config.max_context * config.head_dim * _FLOAT32


def _layers_elements(config: ModelConfig) -> int:
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    return config.num_layers * config.hidden * heads * config.head_dim + config.mlp_elements


def available_bytes(meminfo: Path = _MEMINFO) -> int | None:
    """Return the bytes that the kernel would give without swapping; None if it does not report it."""
    try:
        text = meminfo.read_text(encoding="ascii")
    except OSError:
        return None
    lines = [line.split() for line in text.splitlines() if line.startswith("MemAvailable:")]
    return int(lines[0][1]) * 1024 if lines else None
