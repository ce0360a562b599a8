"""One tensor-parallel rank's share of a model, the ranks' group, and the summation of their results.

Heads and the intermediate width are split by rows of Q, K, V, gate and up; the output and down projections by columns,
so that each rank holds a summand of the result and one sum a product makes it whole. (Megatron-LM,
https://arxiv.org/abs/1909.08053.) Example: 9 heads, 3 KV heads, 3 ranks: rank 1 has heads 3..5 and KV head 1. The
embedding is whole everywhere; the head's rows are divided and rank 0 gathers the logits.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tanghulu.errors import ConfigError
from tanghulu.workers.compute.device import CPU
from tanghulu.workers.weights.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank ``rank`` of ``size``. With more than one, the process must be in a torch.distributed group of that size."""

    rank: int = 0
    size: int = 1

    def own(self, count: int) -> slice:
        """Return this rank's run of ``count`` items, which ``size`` divides."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def total(self, summand: torch.Tensor) -> torch.Tensor:
        """Add up all ranks' ``summand``, in place; every rank must call it."""
        if self.size > 1:
            dist.all_reduce(summand)
        return summand

    def gather_columns(self, part: torch.Tensor) -> torch.Tensor:
        """Return on rank 0 all ranks' ``part`` [L, columns] side by side; elsewhere none. Every rank must call it."""
        if self.size == 1 or len(part) == 0:
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(part.contiguous(), parts)
        return part[:0] if parts is None else torch.cat(parts, dim=1)


#: The only rank.
WHOLE = Shard()


def require_split(config: ModelConfig, size: int) -> None:
    """Raise ConfigError that names the figure of ``config`` not divisible among ``size`` ranks."""
    if size < 1:
        raise ConfigError(f"--tp is {size}; it must be at least 1")
    counts = [(config.num_heads, "attention heads"), (config.num_kv_heads, "KV heads")]
    counts += [(width, "MLP columns") for width in sorted(config.mlp_widths)]
    for count, what in counts:
        if count % size:
            each = ", ".join(f"{count} {what}" for count, what in counts)
            raise ConfigError(f"--tp {size} does not divide the model's {count} {what}; choose a divisor of {each}")


#: Longest wait of a rank for the others: far beyond any step.
_PATIENCE = datetime.timedelta(minutes=5)


def join(rank: int, size: int, meeting_file: str, device: torch.device = CPU) -> Shard:
    """Meet the other ranks through ``meeting_file`` (a path visible to all, no file yet) and become ``rank``.

    They communicate over NCCL if ``device``, this rank's own, is a GPU, else over gloo.
    """
    method = f"file://{meeting_file}"
    if device.type == "cuda":
        dist.init_process_group(
            "nccl", init_method=method, rank=rank, world_size=size, timeout=_PATIENCE, device_id=device
        )
        return Shard(rank, size)
    # All ranks are on this host; without a name gloo asks the resolver for the host's address, which may fail.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size, timeout=_PATIENCE)
    return Shard(rank, size)


def leave() -> None:
    """Leave the group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()
