"""Both sides of a one-sided transport in one process, over far ends that copy memory; for test_onesided_contract."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from typing import Any

from tanghulu.errors import NodeUnavailable, TransferFailed
from tanghulu.transfer_engine.core.paths import Path
from tanghulu.transfer_engine.core.slices import Slice
from tanghulu.transfer_engine.core.transport import Completion
from tanghulu.transfer_engine.engine import Opcode
from tanghulu.transfer_engine.transports.onesided.connection import StagedSlots
from tanghulu.transfer_engine.transports.onesided.listener import Grant
from tanghulu.transfer_engine.transports.rdma.wire import RDMA
from tests.transfer_engine.segment_process import Owner

READ, WRITE = Opcode.READ, Opcode.WRITE
SIZE = 3 << 20
DEVICE = "here0"


class Wires:
    """What the tests do to the copies: change bytes of the next ones, keep slices back, break the next."""

    def __init__(self) -> None:
        self.num_changed = 0
        self.kept_back = False
        self.num_broken = 0
        self.num_copies = 0
        #: Far ends that are open, by their address: the number of copies is checked against it.
        self.open: set[int] = set()
        self.granting = threading.Event()
        self.granting.set()


class HereEnd:
    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        wires.open.add(id(self))

    def close(self) -> None:
        self._wires.open.discard(id(self))


class HereEnds:
    """The segment's address, and an end that says whether it is open still."""

    dialect = RDMA
    devices = (DEVICE,)
    max_ends = 1000

    def __init__(self, segment: Any, wires: Wires) -> None:
        self._segment, self._wires = segment, wires

    async def start(self) -> None:
        pass

    def admit(self, connect_payload: bytes) -> None:
        assert connect_payload == b"please"

    async def make(self, token: int, connect_payload: bytes, take: Callable[[Grant], None]) -> None:
        await asyncio.to_thread(self._wires.granting.wait)
        end = HereEnd(self._wires)
        take(Grant(end, self._segment.address.to_bytes(8, "little") + id(end).to_bytes(8, "little")))

    def close(self) -> None:
        pass


class HereMover:
    """Copies when it is asked what has landed."""

    connect_payload = b"please"

    def __init__(self, wires: Wires) -> None:
        self.ready = False
        self._wires = wires
        self._slots = StagedSlots(4)
        self._posted: list[tuple[Slice, int | None]] = []

    def connect(self, granted: bytes) -> None:
        self._address, self._end = (int.from_bytes(granted[at : at + 8], "little") for at in (0, 8))
        self.ready = True

    def advance(self) -> None:
        pass

    def has_room_for(self, piece: Slice) -> bool:
        return self._slots.has_room_for(piece)

    def post(self, piece: Slice) -> None:
        self._posted.append((piece, self._slots.take(piece)))

    def flush(self) -> None:
        pass

    @property
    def num_posted(self) -> int:
        return len(self._posted)

    @property
    def writing(self) -> bool:
        return any(piece.opcode is WRITE for piece, _ in self._posted)

    def collect(self, landed: list[Slice], ended: list[Completion]) -> None:
        while self._posted and not self._wires.kept_back:
            if self._wires.num_broken:
                self._wires.num_broken -= 1
                raise TransferFailed("the wire is broken")
            piece, slot = self._posted[0]
            self._move(piece, slot)
            self._posted.pop(0)
            if slot is not None:
                self._slots.put(slot, piece)
                self._slots.check()
            landed.append(piece)

    def _move(self, piece: Slice, slot: int | None) -> None:
        if self._end not in self._wires.open:
            raise NodeUnavailable("the owner's end is closed")
        here = piece.buffer.address + piece.local_offset if slot is None else self._slots.address(slot)
        there = self._address + piece.remote_offset
        to, source = (here, there) if piece.opcode is READ else (there, here)
        ctypes.memmove(to, source, piece.length)
        self._wires.num_copies += 1
        if self._wires.num_changed:
            self._wires.num_changed -= 1
            ctypes.c_uint8.from_address(to + piece.length // 2).value ^= 4

    def fileno(self) -> int:
        return -1

    def arm(self) -> None:
        pass

    def woken(self) -> None:
        pass

    def close(self) -> None:
        self._posted.clear()


class HereMovers:
    dialect = RDMA

    def __init__(self, wires: Wires) -> None:
        self._wires = wires

    def make(self, path: Path, token: int, wake: Callable[[], None]) -> HereMover:
        assert path.local_device == path.endpoint.device == DEVICE
        return HereMover(self._wires)

    def close(self) -> None:
        pass


class HereOwner:
    """A SegmentProcess without the process: its loop runs in a thread."""

    def __init__(self, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        access = options.pop("access", False)
        settings = {"transports": ("rdma", "tcp"), "generation": 1} | options
        self.owner = Owner(80 << 20, access, settings)
        self._run(self.owner.server.start())
        self.descriptor = self.owner.server.descriptor()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._run(getattr(self.owner, name)(*arguments))

    def close(self) -> None:
        self.owner.server.check()
        self._run(self.owner.server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        self.owner.segment.close()
