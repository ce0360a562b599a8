"""The process of a tensor-parallel rank other than 0: loads its share, maps the KV segment, computes step by step.

Started by `ranks.processes` only; ends when the worker disconnects.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

import torch

from tanghulu.workers.compute.attention.backends import AttentionNeeds, pick_attention
from tanghulu.workers.compute.device import device_of_rank, wait_for
from tanghulu.workers.compute.forward_batch import build_forward_batch
from tanghulu.workers.compute.kv_cache import DeviceKvCache, KvCache
from tanghulu.workers.compute.models.model import load_model
from tanghulu.workers.compute.models.shard import Shard, join, leave
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.ranks.processes import RankTask
from tanghulu.workers.weights.source import resolve_model


def main() -> None:
    """Serve the worker behind the socket whose number is the only argument."""
    for number in (signal.SIGINT, signal.SIGHUP):  # the worker handles the terminal's signals
        signal.signal(number, signal.SIG_IGN)
    with Connection(int(sys.argv[1])) as worker:
        try:
            _serve(worker)
        except EOFError:
            pass  # the worker is gone
        finally:
            leave()


def _serve(worker: Connection) -> None:
    task: RankTask = worker.recv()
    torch.set_num_threads(task.threads)
    layout, device = task.layout, device_of_rank(task.device, task.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    source = resolve_model(task.model, task.lora).within(task.max_context)
    windows, kept_as = source.config.sliding is not None, getattr(torch, layout.dtype)
    needs = AttentionNeeds(device, task.dtype, layout.head_dim, layout.block_tokens, windows, kept_as)
    attention, shard = pick_attention(task.attention, needs), Shard(task.rank, layout.num_parts)
    model = load_model(source, task.dtype, shard=shard, device=device, attention=attention, arithmetic=task.arithmetic)
    worker.send("loaded")
    join(task.rank, layout.num_parts, task.meeting_file, device)
    cache = _make_cache(worker, layout, device) if device.type == "cuda" else _map_cache(worker, layout, task.rank)
    while True:
        chunks = worker.recv()
        model.forward(build_forward_batch(chunks, layout.block_tokens, device), cache)


def _make_cache(worker: Connection, layout: KvLayout, device: torch.device) -> DeviceKvCache:
    """Make a cache on this rank's GPU, of the size set by the worker, and open its memory to the worker."""
    import torch.multiprocessing  # it teaches connections to carry memory of GPUs  # noqa: F401

    cache = DeviceKvCache(layout, worker.recv(), device)
    wait_for(device)  # it is zeroed before the worker copies blocks into it
    worker.send(cache.memory)
    return cache


def _map_cache(worker: Connection, layout: KvLayout, rank: int) -> KvCache:
    fd = recv_handle(worker)
    size = os.fstat(fd).st_size
    area = mmap.mmap(fd, size)
    os.close(fd)
    return KvCache(layout, layout.num_blocks_in(size), memoryview(area), part=rank)


if __name__ == "__main__":
    main()
