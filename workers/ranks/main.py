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
from tanghulu.workers.compute.device import device_of_rank, pick_device, wait_for
from tanghulu.workers.compute.forward_batch import build_forward_batch
from tanghulu.workers.compute.kv_cache import DeviceKvCache, KvCache
from tanghulu.workers.compute.linear import Arithmetic
from tanghulu.workers.compute.models.registry import Model, kv_dtype_name, load_model, pick_dtype
from tanghulu.workers.compute.models.shard import Shard
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.ranks.group import join, leave
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
    device = device_of_rank(pick_device(task.device), task.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    source = resolve_model(task.model, task.lora).within(task.max_context)
    dtype = pick_dtype(task.dtype, device)
    windows = source.config.sliding is not None
    kept_as = getattr(torch, kv_dtype_name(task.kv_dtype, dtype))
    needs = AttentionNeeds(device, dtype, source.config.head_dim, task.block_tokens, windows, kept_as)
    attention = pick_attention(task.attention, needs)
    arithmetic = Arithmetic.of(dtype, device)
    if task.in_one_form:
        arithmetic = arithmetic.in_one_form()
    shard = Shard(task.rank, task.size)
    model = load_model(source, dtype, shard=shard, device=device, attention=attention, arithmetic=arithmetic)
    worker.send("loaded")
    join(task.rank, task.size, task.meeting_file, device)
    cache = _make_cache(worker, model, task) if device.type == "cuda" else _map_cache(recv_handle(worker), model, task)
    while True:
        chunks = worker.recv()
        model.forward(build_forward_batch(chunks, task.block_tokens, device), cache)


def _make_cache(worker: Connection, model: Model, task: RankTask) -> DeviceKvCache:
    """Make a cache on this rank's GPU, of the size set by the worker, and open its memory to the worker."""
    import torch.multiprocessing  # it teaches connections to carry memory of GPUs  # noqa: F401

    cache = DeviceKvCache(_layout(model, task), worker.recv(), model.device)
    wait_for(model.device)  # it is zeroed before the worker copies blocks into it
    worker.send(cache.memory)
    return cache


def _layout(model: Model, task: RankTask) -> KvLayout:
    return KvLayout.of(model.config, task.block_tokens, kv_dtype_name(task.kv_dtype, model.dtype), task.size)


def _map_cache(fd: int, model: Model, task: RankTask) -> KvCache:
    layout = _layout(model, task)
    size = os.fstat(fd).st_size
    area = mmap.mmap(fd, size)
    os.close(fd)
    return KvCache(layout, layout.num_blocks_in(size), memoryview(area), part=task.rank)


if __name__ == "__main__":
    main()
