"""The other tensor-parallel ranks: processes of this worker that compute their share of every step.

The worker itself is rank 0: it schedules, samples and moves KV. A step's token runs go to the ranks over a socket each;
sums travel between the ranks by torch.distributed. On CPUs all ranks map the worker's one KV segment, in which a block
holds every rank's part, so that transfers see whole blocks. On GPUs each rank keeps its part in its own memory, which
the worker opens (CUDA's inter-process memory), so that its transfers move all parts. The end of the worker closes the
sockets, whereupon ranks end. The end of a rank must end the worker (`RankProcesses.watch`): a sum over gloo would fail,
but one over NCCL waits in the GPU until the group's timeout.
"""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import TYPE_CHECKING

from tanghulu.errors import ConfigError
from tanghulu.model_files.fields import MAX_COUNT

if TYPE_CHECKING:
    import torch

    from tanghulu.workers.compute.linear import Arithmetic
    from tanghulu.workers.engine.kv_layout import KvLayout

_START_S = 180.0
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class RankTask:
    """Everything a rank needs to load its share of ``model``; ``threads`` is per rank.

    ``dtype`` is the type of the weights, ``layout`` that of a cache with a part for each rank. ``model``, ``lora`` and
    ``attention`` are as on the command line. With ``device`` a GPU, the first of the ranks', each rank takes the one at
    its own offset from it.
    """

    model: str
    layout: KvLayout
    dtype: torch.dtype
    arithmetic: Arithmetic
    threads: int
    device: torch.device
    attention: str = "auto"
    lora: str = ""
    max_context: int = MAX_COUNT
    rank: int = 0
    meeting_file: str = ""


class RankProcesses:
    """The processes of ranks 1 .. size-1, from their start to `close`. The engine's thread sends steps."""

    def __init__(self, first: RankTask) -> None:
        """Start the processes with the task of rank 0 as their own; they load the model while the caller does."""
        self.size = first.layout.num_parts
        self._folder = tempfile.mkdtemp(prefix="tanghulu-tp-")
        self.meeting_file = os.path.join(self._folder, "meeting")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._closing = False
        for rank in range(1, self.size):
            self._start(replace(first, rank=rank, meeting_file=self.meeting_file))

    def _start(self, task: RankTask) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "tanghulu.workers.ranks.main", str(theirs.fileno())]
            self._processes.append(subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL))
        self._connections.append(Connection(ours.detach()))
        self._connections[-1].send(task)

    def wait_loaded(self) -> None:
        """Wait until every rank holds its weights; raises ConfigError that names one that ended or is late."""
        for rank, connection in enumerate(self._connections, start=1):
            try:
                loaded = connection.poll(_START_S) and connection.recv() == "loaded"
            except (EOFError, OSError):
                loaded = False
            if not loaded:
                self.close()
                raise ConfigError(f"tensor-parallel rank {rank} of {self.size} did not load the model; see its output")

    def watch(self, on_end: Callable[[Exception], None]) -> None:
        """Call ``on_end``, in a thread, for each rank whose process ends before `close`."""

        def wait(rank: int, process: subprocess.Popen[bytes]) -> None:
            status = process.wait()
            if not self._closing:
                on_end(ChildProcessError(f"tensor-parallel rank {rank} of {self.size} ended with status {status}"))

        for rank, process in enumerate(self._processes, start=1):
            threading.Thread(target=wait, args=(rank, process), name=f"rank {rank}", daemon=True).start()

    def map_cache(self, fd: int) -> None:
        """Let the ranks use the KV segment behind ``fd``; before the first step."""
        for connection, process in zip(self._connections, self._processes, strict=True):
            send_handle(connection, fd, process.pid)

    def open_caches(self, num_blocks: int) -> list[torch.Tensor]:
        """Let the ranks on GPUs make caches of their own; return the memory of each, on its GPU."""
        import torch.multiprocessing  # it teaches connections to carry memory of GPUs  # noqa: F401

        for connection in self._connections:
            connection.send(num_blocks)
        return [connection.recv() for connection in self._connections]

    def send(self, chunks: Sequence[object]) -> None:
        data = pickle.dumps(chunks, protocol=pickle.HIGHEST_PROTOCOL)
        for connection in self._connections:
            connection.send_bytes(data)

    def close(self) -> None:
        """Close the connections, which ends the ranks; kill those that remain."""
        self._closing = True
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._connections, self._processes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)
