"""A conductor in a process of its own that reports how long its event loop stood still, and its memory.

A stall is the smaller of two times between turns of the loop: that of the clock, and that of the process's CPUs. So a
busy machine that gives the process no CPU makes no stall, and neither do threads that compute while the loop turns.

Prints its ports; then for each line on stdin the longest stall and the peak of its memory since the last one, as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path

import structlog

from tanghulu.runtime import garbage
from tanghulu.types import Role
from tests.conductor.cluster import running_cluster
from tests.conductor.fake_worker import FakeWorker

PERIOD_S = 0.005
#: Tokens of the model's context: the bounds of texts grow with it.
CONTEXT = 32_768


class StallWatch:
    """The longest stall since it was last taken."""

    def __init__(self) -> None:
        self._longest_s = 0.0

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            wall_s, cpu_s = time.monotonic(), time.process_time()
            await asyncio.sleep(PERIOD_S)
            late_s = time.monotonic() - wall_s - PERIOD_S
            self._longest_s = max(self._longest_s, min(late_s, time.process_time() - cpu_s))

    def take(self) -> float:
        """The stall in seconds; begins anew."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s


def memory_kib() -> dict[str, int]:
    """The resident memory of this process now, and its peak since ``forget_peak``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest}
    return {"now": values["VmRSS"], "peak": values["VmHWM"]}


def forget_peak() -> None:
    """Begin a new peak; where the kernel does not let one, the old one stays."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


async def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    loop, watch = asyncio.get_running_loop(), StallWatch()
    with tempfile.TemporaryDirectory(prefix="th-", dir="/tmp") as run_dir:
        async with running_cluster(Path(run_dir), grpc_port=0) as cluster:
            worker = FakeWorker("worker-0", Role.BOTH, Path(run_dir))
            worker.card["context_length"] = CONTEXT
            cluster.workers.append(worker)
            await worker.start(cluster.discovery)
            await cluster.until(lambda: any(each.usable for each in cluster.registry.workers.values()))
            ports = {"http": cluster.conductor.address.port, "grpc": cluster.conductor.inference.address.port}
            print(json.dumps(ports), flush=True)
            garbage.begin()
            tasks = [asyncio.create_task(watch.run())]
            tasks.append(asyncio.create_task(garbage.keep_collecting(garbage.CpuUse().busy)))
            while await loop.run_in_executor(None, sys.stdin.readline):
                print(json.dumps({"stall_s": watch.take(), "kib": memory_kib()}), flush=True)
                forget_peak()
            for task in tasks:
                task.cancel()


if __name__ == "__main__":
    asyncio.run(main())
