"""How many slices a second one Python process hands to RDMA devices, and what network rate that feeds.

    python -m benchmarks.transfer.rdma_posting [--keep]             # null devices: posts go nowhere, and end at once
    python -m benchmarks.transfer.rdma_posting --guest [--keep]     # and a real verbs device in a QEMU guest

Layers, each with the slices a second that it reaches:

* ``chain``: work requests laid out in memory (``PostRing.fill``), 64 a chain;
* ``pair``: ``QueuePair.post`` and ``poll``: the same, the call into the library, and the completions;
* ``engine``: ``submit`` and ``wait`` of a batch over 8 null devices: slicing, choice of path, windows, books.

A null device is the engine's own code with a function of libc that does nothing in the place of the device's; nothing
is moved, so the figures are what the processor allows, not what a card does. ``--guest`` measures a real post, to a
soft-RoCE device, and what pyverbs takes (where it is installed) beside a bare loop, as ratios: emulated processors have
no speed of their own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common.report import ROOT, keep
from tanghulu.transfer_engine.core.segment import Endpoint, SegmentDescriptor
from tanghulu.transfer_engine.engine import (
    EngineConfig,
    Opcode,
    TransferBatch,
    TransferEngine,
    TransferRequest,
    TransportLimits,
)
from tanghulu.transfer_engine.transports.onesided.wire import ControlAnswer
from tanghulu.transfer_engine.transports.rdma import abi
from tanghulu.transfer_engine.transports.rdma.devices import LocalDevices
from tanghulu.transfer_engine.transports.rdma.verbs import (
    CompletionRing,
    Device,
    DeviceInfo,
    MemoryRegion,
    PostRing,
    QueuePair,
    WorkCompletion,
    WorkRequest,
    choose_signalled,
    probe,
)
from tanghulu.transfer_engine.transports.rdma.wire import RDMA, QueuePairAddress, SegmentKey, pack_granted

CHAIN = 64
NUM_DEVICES = 8
SLICE_SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
#: The plan's target: eight cards of 400 Gb/s.
TARGET_GBIT_S = 8 * 400
GUESTS = ROOT / "tests" / "rdma_vm" / "rdma_vm.sh"
_ADDRESS = QueuePairAddress("::1", 0, 1, 1, 5)


class NullPair(QueuePair):
    """A queue pair whose device takes everything and has it done at once."""

    def __init__(self, max_works: int) -> None:
        self._info = DeviceInfo("null", "::1", 0, 0, 5)
        self._fd = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # always readable: something has always ended
        self._ring, self._ended = PostRing(max_works), CompletionRing(max_works)
        self._nothing = ctypes.create_string_buffer(8)
        self._pair_address, self._rejected = ctypes.addressof(self._nothing), ctypes.c_void_p()
        self._call_post = abi.POST(("strlen", ctypes.CDLL(None)))  # of an empty string: 0, as a device that took all
        self._completed: list[WorkCompletion] = []

    @property
    def address(self) -> QueuePairAddress:
        return _ADDRESS

    def connect(self, peer: QueuePairAddress) -> None:
        pass

    def post(self, works: Any, tell: Any) -> None:
        super().post(works, tell)
        self._completed += [
            WorkCompletion(work.work_id, "", False) for work, signalled in zip(works, tell, strict=True) if signalled
        ]

    def poll(self) -> list[WorkCompletion]:
        completed, self._completed = self._completed, []
        return completed

    def arm(self) -> None:
        pass

    def woken(self) -> None:
        pass

    def flush(self, last_work: int, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class NullDevice:
    def register(self, address: int, size_bytes: int, *, remote: bool, writable: bool = True) -> MemoryRegion:
        return MemoryRegion(1, 2, lambda: None)

    def queue_pair(self, max_works: int) -> NullPair:
        return NullPair(max_works)

    def close(self) -> None:
        pass


class NullDevices(LocalDevices):
    def __init__(self) -> None:
        super().__init__([DeviceInfo(f"null{n}", "::1", 0, 0, 5) for n in range(NUM_DEVICES)])
        self._open = {name: NullDevice() for name in self.names}  # type: ignore[misc]


def answer_everything(listener: socket.socket) -> None:
    """The owner's listener: grants every request."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


def answer(connection: socket.socket) -> None:
    granted, said = pack_granted(_ADDRESS, SegmentKey(1 << 40, 3)), bytearray()
    with connection:
        while data := connection.recv(1 << 16):
            said += data
            while (request := RDMA.take_request(said)) is not None:
                connection.sendall(RDMA.pack_answer(ControlAnswer(request.op, payload=granted)))


def per_second(work: Callable[[], int], rounds: int = 7, enough_s: float = 0.1) -> float:
    """Median over rounds; ``work`` says how many it did. Seconds of this process's CPU: others may be busy too."""
    rates = []
    for _ in range(rounds):
        num, start_s = 0, time.process_time()
        while (took_s := time.process_time() - start_s) < enough_s:
            num += work()
        rates.append(num / took_s)
    return statistics.median(rates)


def chain_of(length: int) -> list[WorkRequest]:
    return [
        WorkRequest(n, Opcode.WRITE, (1 << 40) + n * length, 3, (1 << 41) + n * length, 4, length) for n in range(CHAIN)
    ]


def measure_chain(slice_bytes: int) -> float:
    ring, works = PostRing(CHAIN), chain_of(slice_bytes)
    tell = choose_signalled([slice_bytes] * CHAIN)

    def once() -> int:
        ring.fill(works, tell)
        return CHAIN

    return per_second(once)


def measure_pair(slice_bytes: int) -> float:
    pair, works = NullPair(CHAIN), chain_of(slice_bytes)

    def once() -> int:
        pair.post(works, choose_signalled([slice_bytes] * CHAIN))
        assert pair.poll()[-1].work_id == CHAIN - 1
        return CHAIN

    try:
        return per_second(once)
    finally:
        pair.close()


def measure_engine(slice_bytes: int) -> float:
    limits = {"rdma": TransportLimits(slice_bytes, CHAIN * slice_bytes, CHAIN)}
    size = 1024 * slice_bytes
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer_everything, args=(listener,), daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        endpoints = tuple(Endpoint("rdma", address, f"null{n}") for n in range(NUM_DEVICES))
        with TransferEngine(host_id="here", transports=["rdma"], config=EngineConfig(limits=limits)) as engine:
            engine._shared.get("rdma", NullDevices, NullDevices.let_go)  # where it would find the machine's
            remote = engine.open_segment(SegmentDescriptor("null", size, "there", 1, endpoints))
            buffer = engine.register(memoryview(bytearray(1)).cast("B"))
            buffer.size_bytes = size  # nothing is touched

            def once() -> int:
                batch = TransferBatch([TransferRequest(Opcode.WRITE, buffer, remote, 0, size)])
                assert engine.submit(batch).wait(60).ok
                return 1024

            return per_second(once, enough_s=0.3)


LAYERS: dict[str, Callable[[int], float]] = {"chain": measure_chain, "pair": measure_pair, "engine": measure_engine}


def null_rows() -> list[dict[str, Any]]:
    rows = []
    for layer, measure in LAYERS.items():
        for slice_bytes in SLICE_SIZES:
            rate = measure(slice_bytes)
            gbit_s = rate * slice_bytes * 8 / 1e9
            rows.append(
                {"device": "null", "layer": layer, "slice_kib": slice_bytes >> 10, "slices_per_cpu_s": round(rate),
                 "us_per_slice": round(1e6 / rate, 2), "feeds_gbit_s": round(gbit_s),
                 "processes_for_8x400": round(TARGET_GBIT_S / gbit_s, 2)}
            )  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    return rows


# --- a real device


def bare_loop() -> int:
    for _ in range(1000):
        pass
    return 1000


def device_rows() -> list[dict[str, Any]]:
    """Posts to this machine's first device, through a queue pair that is connected to another of the same device."""
    found = probe()
    if not found.devices:
        raise SystemExit(f"no device: {found.reason}")
    loop_s = 1 / per_second(bare_loop)
    device = Device(found.devices[0])
    area = ctypes.create_string_buffer(CHAIN * 64)
    address = ctypes.addressof(area)
    region = device.register(address, len(area), remote=True)
    works = [
        WorkRequest(n, Opcode.WRITE, address, region.local_key, address + n * 64, region.remote_key, 1)
        for n in range(CHAIN)
    ]
    rows = []
    for name, chain in (("one", 1), ("chained", CHAIN)):
        here, there = device.queue_pair(CHAIN), device.queue_pair(1)
        here.connect(there.address)
        there.connect(here.address)
        spent_s = [timed_post(here, works[:chain]) for _ in range(40)]
        rows.append(device_row(f"ctypes, {name}", statistics.median(spent_s) / chain, loop_s))
        here.close()
        there.close()
    rows += pyverbs_rows(loop_s)
    region.close()
    device.close()
    return rows


def device_row(how: str, post_s: float, loop_s: float) -> dict[str, Any]:
    return {"device": "soft-RoCE in a guest", "how": how, "post_in_bare_loop_steps": round(post_s / loop_s, 1)}


def timed_post(pair: QueuePair, works: list[WorkRequest]) -> float:
    """Seconds of the post alone; what was posted has ended on return."""
    start_s = time.perf_counter()
    pair.post(works, choose_signalled([work.length for work in works]))
    took_s = time.perf_counter() - start_s
    while not any(each.work_id == works[-1].work_id for each in pair.poll()):
        pass
    return took_s


def pyverbs_rows(loop_s: float) -> list[dict[str, Any]]:
    """What pyverbs takes for building the requests alone, without the call into the device, which is the same."""
    sys.path.append("/usr/lib/python3/dist-packages")
    try:
        from pyverbs import enums, wr
    except ImportError:
        return []

    def build() -> int:
        following = None
        for number in range(CHAIN):
            request = wr.SendWR(
                wr_id=number, opcode=enums.IBV_WR_RDMA_WRITE, num_sge=1, sg=[wr.SGE(4096, 1, 3)],
                send_flags=enums.IBV_SEND_SIGNALED, next_wr=following,
            )  # fmt: skip
            request.set_wr_rdma(4, 8192)
            following = request
        return CHAIN

    ring, works = PostRing(CHAIN), chain_of(1)

    def fill() -> int:
        ring.fill(works, [True] * CHAIN)
        return CHAIN

    return [
        device_row("build only, pyverbs", 1 / per_second(build), loop_s),
        device_row("build only, ctypes", 1 / per_second(fill), loop_s),
    ]


def guest_rows() -> list[dict[str, Any]]:
    program = [sys.executable, "-m", "benchmarks.transfer.rdma_posting"]
    command = [GUESTS, "run", "--vms", "1", "--rails", "1", "--", *program, "--device"]
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    lines = [line.removeprefix("[node0] ") for line in printed.splitlines()]
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    if not rows:
        raise SystemExit(f"the guest measured nothing:\n{printed[-3000:]}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--guest", action="store_true", help="measure in a guest too")
    parser.add_argument("--device", action="store_true", help="measure this machine's first verbs device alone")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/rdma_posting.json")
    arguments = parser.parse_args()
    if arguments.device:
        for row in device_rows():
            print(json.dumps(row), flush=True)
        return
    rows = null_rows()
    for row in guest_rows() if arguments.guest else []:
        rows.append(row)
        print(json.dumps(row))
    if arguments.keep:
        print(keep("rdma_posting", rows, load=os.getloadavg()[0]))


if __name__ == "__main__":
    main()
