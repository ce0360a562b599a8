"""The transfer engine beside the plain limits of the machine, in one run.

For each size and direction, in turns (so that a busy neighbour hurts all alike): the engine over shm next to one
memmove between two prefaulted areas, and the engine over tcp next to one plain blocking stream between two processes
(sendall and recv_into, an eight-byte request in front, one byte of acknowledgement behind a WRITE). Buffers rotate
through several times the cache's size for 1 MiB and up. Prints medians and keeps them as JSON.

    python benchmarks/transfer_bench.py [--rounds 15] [--seed 1] [--streams 2] [--no-keep]
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import random
import socket
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from report import keep
from tanghulu.transfer_engine.engine import EngineConfig, Opcode, TransferEngine, TransferRequest
from tanghulu.transfer_engine.segment import MemorySegment
from tanghulu.transfer_engine.server import SegmentServer

SIZES = (64 << 10, 1 << 20, 16 << 20)
AREA_BYTES = 128 << 20
REQUEST = struct.Struct("<Q")
READ, WRITE = Opcode.READ, Opcode.WRITE


def receive_into(sock: socket.socket, view: memoryview) -> None:
    got = 0
    while got < len(view):
        got += sock.recv_into(view[got:])


def serve_plain(listener: socket.socket, area: memoryview) -> None:
    """One blocking stream: positive request: send so many bytes; the top bit set: receive them."""
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while request := sock.recv(REQUEST.size, socket.MSG_WAITALL):
        (value,) = REQUEST.unpack(request)
        size = value & ~(1 << 63)
        if value >> 63:
            receive_into(sock, area[:size])
            sock.sendall(b"\1")
        else:
            sock.sendall(area[:size])


def serve(pipe: multiprocessing.connection.Connection, unix_path: str) -> None:
    async def main() -> None:
        segment = MemorySegment.create("bench", AREA_BYTES, prefault=True)
        server = SegmentServer(
            segment, None, host="127.0.0.1", unix_path=unix_path, generation=1, host_id="bench", name="bench"
        )
        await server.start()
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=serve_plain, args=(listener, segment.view), daemon=True).start()
        pipe.send((server.descriptor(), listener.getsockname()[1]))
        await asyncio.to_thread(pipe.recv)
        await server.close()
        os._exit(0)  # the plain thread waits in recv

    uvloop.run(main())


def timed(call: Callable[[int], None], times: int, first: int) -> float:
    start = time.perf_counter()
    for number in range(first, first + times):
        call(number)
    return (time.perf_counter() - start) / times


class Bench:
    """The calls that are compared: each takes a running number and moves one buffer."""

    def __init__(self, engine: TransferEngine, descriptor: Any, plain_port: int) -> None:
        self.engine = engine
        self.local = np.ones(AREA_BYTES, np.uint8)
        self.other = np.ones(AREA_BYTES, np.uint8)
        self.buffer = engine.register(self.local)
        self.view = memoryview(self.local)
        self.remotes = {name: engine.open_segment(descriptor, transport=name) for name in ("shm", "tcp")}
        self.plain = socket.create_connection(("127.0.0.1", plain_port))
        self.plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def call(self, kind: str, opcode: Opcode, size: int) -> Callable[[int], None]:
        spots = max(1, min(AREA_BYTES // size, 64 if size < 1 << 20 else 1 << 30))

        def by_engine(number: int) -> None:
            at = number % spots * size
            self.engine.transfer([TransferRequest(opcode, self.buffer, remote, at, size, at)], 30)

        def by_memmove(number: int) -> None:
            at = number % spots * size
            to, source = (self.local, self.other) if opcode is READ else (self.other, self.local)
            ctypes.memmove(to.ctypes.data + at, source.ctypes.data + at, size)

        def by_stream(number: int) -> None:
            at = number % spots * size
            if opcode is READ:
                self.plain.sendall(REQUEST.pack(size))
                receive_into(self.plain, self.view[at : at + size])
            else:
                self.plain.sendall(REQUEST.pack(size | 1 << 63))
                self.plain.sendall(self.view[at : at + size])
                assert self.plain.recv(1) == b"\1"

        if kind in self.remotes:
            remote = self.remotes[kind]
            return by_engine
        return by_memmove if kind == "memmove" else by_stream


def measure(bench: Bench, rounds: int, chooser: random.Random) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for size in SIZES:
        for opcode in (READ, WRITE):
            kinds = ["shm", "memmove", "tcp", "plain stream"]
            calls = {kind: bench.call(kind, opcode, size) for kind in kinds}
            times = {kind: max(2, int((0.02 if kind in ("shm", "memmove") else 0.05) * 2e9 / (size + 60_000)))
                     for kind in kinds}  # fmt: skip
            samples: dict[str, list[float]] = {kind: [] for kind in kinds}
            for each in range(rounds + 1):
                for kind in chooser.sample(kinds, len(kinds)):
                    seconds = timed(calls[kind], times[kind], each * times[kind])
                    if each:  # the first round warms up
                        samples[kind].append(seconds)
            for kind, limit in (("shm", "memmove"), ("tcp", "plain stream")):
                engine_s, limit_s = statistics.median(samples[kind]), statistics.median(samples[limit])
                rows.append({
                    "transport": kind, "op": opcode.name, "size_bytes": size,
                    "engine_us": round(engine_s * 1e6, 1), "engine_gb_s": round(size / engine_s / 1e9, 2),
                    "limit": limit, "limit_us": round(limit_s * 1e6, 1), "limit_gb_s": round(size / limit_s / 1e9, 2),
                    "share_of_limit": round(limit_s / engine_s, 3),
                    "best_engine_us": round(min(samples[kind]) * 1e6, 1),
                    "best_limit_us": round(min(samples[limit]) * 1e6, 1),
                })  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'':4} {'op':5} {'size':>8} {'engine':>12} {'':>10} {'plain limit':>12} {'':>10} {'share':>6} {'best':>6}")
    for row in sorted(rows, key=lambda row: (row["transport"], row["size_bytes"])):
        best = row["best_limit_us"] / row["best_engine_us"]
        print(
            f"{row['transport']:4} {row['op']:5} {row['size_bytes'] >> 10:5} KiB {row['engine_us']:9.1f} us "
            f"{row['engine_gb_s']:5.2f} GB/s {row['limit_us']:9.1f} us {row['limit_gb_s']:5.2f} GB/s "
            f"{row['share_of_limit']:6.0%} {best:6.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=EngineConfig().streams_per_peer)
    parser.add_argument("--no-keep", action="store_true", help="do not write results/transfer.json")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=serve, args=(theirs, str(Path(folder) / "door")))
        process.start()
        descriptor, plain_port = ours.recv()
        with TransferEngine(host_id="bench", config=EngineConfig(streams_per_peer=options.streams)) as engine:
            bench = Bench(engine, descriptor, plain_port)
            rows = measure(bench, options.rounds, random.Random(options.seed))
        ours.send("stop")
        process.join()
    show(rows)
    if not options.no_keep:
        print("kept in", keep("transfer", rows, seed=options.seed, streams=options.streams))


if __name__ == "__main__":
    main()
