"""Many nodes in one process, which hold generated keys: a cluster of a hundred nodes on a machine of two cores.

    python -m benchmarks.master.node_farm --master etcd://127.0.0.1:2379 --num-nodes 25 --keys-per-node 100000

Each is a whole node of the production's code, with a port, a registration, reports and a segment of its own; they share
an event loop, an interpreter and a run directory. What they hold at first was put by nobody: it is entered as chunks
that a master was told of long ago, so a node's first word of it is its report.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tanghulu.runtime import process as processes
from tanghulu.runtime.clock import SystemClock
from tanghulu.runtime.config import command, option
from tanghulu.runtime.process import Process, SupervisorLine
from tanghulu.runtime.telemetry import new_registry
from tanghulu.store.node.main import Node, NodeConfig
from tanghulu.store.node.state.chunk import ChunkEvent, compact
from tanghulu.store.node.state.outcomes import Reserved
from tanghulu.store.protocol.checksums import compute
from tanghulu.store.protocol.types import NewChunk
from tanghulu.types import Address, ChunkKey, Role

#: Keys that are entered in one step of the event loop.
_AT_ONCE = 2000


def key_of(number: int) -> ChunkKey:
    """A key as blocks of KV have them: 54 characters."""
    return ChunkKey(f"kv/0123456789abcdef/{number:032x}/0")


def value_of(number: int) -> bytes:
    """The bytes under ``key_of(number)``."""
    return b"%16d" % number


@dataclass(frozen=True, kw_only=True)
class FarmConfig(NodeConfig):
    """The options of a node, which all of them have, and how many there are."""

    num_nodes: int = option(10, "nodes in this process")
    first_key: int = option(0, "number of the first key of the first node")
    keys_per_node: int = option(1000, "keys that each of them holds at the start")


async def fill(node: Node, first: int, num_keys: int) -> None:
    """Have ``node``, which does not run yet, hold these keys as if its masters knew of them."""
    chunks, view, now_ms = node.state.chunks, node._segment.view, int(SystemClock().now_s() * 1000)
    for start in range(first, first + num_keys, _AT_ONCE):
        for number in range(start, min(start + _AT_ONCE, first + num_keys)):
            value = value_of(number)
            new = NewChunk(key_of(number), (now_ms << 16) + number, len(value), compute(value))
            reserved = node.state.reserve(new, None)
            assert isinstance(reserved, Reserved), "the memory of a node is too small for its keys"
            chunk = reserved.chunk
            view[chunk.offset : chunk.offset + len(value)] = value
            chunk.compact_checksums = compact(new.checksums)
            chunks.publish(chunk, ChunkEvent.COMMIT_UNSEEN)
        chunks.end_call()
        await asyncio.sleep(0)


def nodes_of(process: Process, config: FarmConfig) -> Iterator[tuple[Process, Node]]:
    """The nodes, each with what it takes for its process."""
    for number in range(config.num_nodes):
        run_dir = process.run_dir / str(number)
        run_dir.mkdir(mode=0o700)
        own = replace(
            process,
            run_dir=run_dir,
            status=SupervisorLine(-1, process.stopping.set),
            registry=new_registry(),
            generation=secrets.randbits(48),
            serving=asyncio.get_running_loop().create_future(),
        )
        yield own, Node(own, config)


async def serve(process: Process, config: FarmConfig) -> None:
    """Fill all nodes, then run them until the process is told to stop."""
    nodes = list(nodes_of(process, config))
    process.progress("opened", 0.0)
    for number, (_, node) in enumerate(nodes):
        await fill(node, config.first_key + number * config.keys_per_node, config.keys_per_node)
        if process.stopping.is_set():
            return
    process.progress("filled", 1.0)
    async with asyncio.TaskGroup() as tasks:
        for _, node in nodes:
            tasks.create_task(node.run())
        for own, _ in nodes:
            await own.serving
        process.ready(process.instance_id(0), Address(config.host, 0))


class Farm:
    """The process, seen by who started it. It is there when it runs; ``wait`` for what it says of its start."""

    def __init__(self, *flags: str) -> None:
        self._status, theirs = socket.socketpair()
        fd = theirs.fileno()
        command_line = [sys.executable, "-m", "benchmarks.master.node_farm", *flags, "--status-fd", str(fd)]
        self.popen = subprocess.Popen(command_line, pass_fds=[fd], env=_environment())
        theirs.close()
        self._lines = self._status.makefile()
        self.private_bytes: dict[str, int] = {}  # by what it had done

    def wait(self, what: str) -> None:
        """Wait until the process has ``opened`` its nodes, ``filled`` them, or is ``ready``; raises SystemExit."""
        while what not in self.private_bytes:
            message = json.loads(self._lines.readline() or "{}")
            done = message.get("what", message.get("event", ""))
            if done not in ("opened", "filled", "ready"):
                raise SystemExit(f"the nodes did not start: {message}")
            self.private_bytes[done] = private_bytes(self.popen.pid)

    def stop(self) -> None:
        """Stop the process; its supervisor's line goes with it."""
        self.popen.terminate()
        self.popen.wait()
        self._lines.close()
        self._status.close()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": ":".join(sys.path), "GRPC_VERBOSITY": "ERROR"}


def private_bytes(pid: int) -> int:
    """Memory of a process that it shares with nobody: segments do not count."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


COMMAND = command(
    "node-farm",
    FarmConfig,
    lambda config: processes.run(Role.NODE, config, serve),
    "Run many store nodes in one process, with generated keys in them.",
)

if __name__ == "__main__":
    COMMAND()
