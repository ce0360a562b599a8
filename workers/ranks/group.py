"""The torch.distributed group of a worker's tensor-parallel ranks, on this host: joined once, left at the end."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

from tanghulu.workers.compute.device import CPU
from tanghulu.workers.compute.models.shard import Shard

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
