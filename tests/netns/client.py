"""Transfers from the network namespace that this process was started in; one JSON command a line, one answer a line."""

from __future__ import annotations

import json
import pickle
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from tanghulu.transfer_engine.engine import EngineConfig, Opcode, TransferBatch, TransferEngine, TransferRequest
from tanghulu.transfer_engine.topology.discovery import discover

MIB = 1 << 20


def kernel_bytes() -> dict[str, dict[str, int]]:
    """What the kernel counted on each device, received and sent."""
    names = [each.name for each in discover().usable]
    folders = {name: Path("/sys/class/net") / name / "statistics" for name in names}
    return {
        name: {kind: int((folder / f"{kind}_bytes").read_text()) for kind in ("rx", "tx")}
        for name, folder in folders.items()
    }


class Client:
    def __init__(self, descriptor: Any, num_bytes: int) -> None:
        self.descriptor = descriptor
        self.topology = discover()
        self.data = np.random.default_rng(1).integers(0, 256, num_bytes, dtype=np.uint8)
        self.engine = self.remote = None

    def open(self, devices: list[str]) -> None:
        """Use only these devices from now on."""
        if self.engine is not None:
            self.engine.close()
        used = tuple(each for each in self.topology.devices if each.name in devices)
        config = EngineConfig(
            topology=replace(self.topology, devices=used), slice_deadline_s=0.5, pause_s=0.2, pause_max_s=0.5,
            retries_max=8, streams_per_peer=1, connect_timeout_s=1.0,
        )  # fmt: skip
        self.engine = TransferEngine(transports=["tcp"], host_id="client", config=config)
        self.remote = self.engine.open_segment(self.descriptor)

    def move(self, opcode: str, num_mib: int, deadline_s: float = 60.0) -> dict[str, Any]:
        """One batch: what it took, what each path and kernel device did, and whether the bytes are right."""
        size = num_mib * MIB
        memory = np.zeros(size, dtype=np.uint8) if opcode == "READ" else self.data[:size]
        kernel_before, paths_before = kernel_bytes(), self._path_bytes()
        start_s = time.monotonic()
        handle = self.engine.submit(TransferBatch([TransferRequest(Opcode[opcode], memory, self.remote, 0, size)]))
        result = handle.wait(deadline_s)
        took_s = time.monotonic() - start_s
        kernel_after = kernel_bytes()
        return {
            "ok": result.ok,
            "error": str(result.errors[0]),
            "right": bool(np.array_equal(memory, self.data[:size])),
            "seconds": took_s,
            "mbit_s": size * 8 / took_s / 1e6,
            "kernel": {
                name: {kind: after - kernel_before.get(name, {}).get(kind, 0) for kind, after in each.items()}
                for name, each in kernel_after.items()
            },
            "paths": {name: num - paths_before.get(name, 0) for name, num in self._path_bytes().items()},
            "stats": [asdict(stats) | {"device": path.local_device, "state": state.value}
                      for path, state, stats in self.remote.path_stats()],
        }  # fmt: skip

    def _path_bytes(self) -> dict[str, int]:
        return {path.local_device: stats.num_bytes for path, _, stats in self.remote.path_stats()}


def main() -> None:
    client = Client(pickle.loads(bytes.fromhex(sys.argv[1])), int(sys.argv[2]))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(client, name)(*arguments)), flush=True)


main()
