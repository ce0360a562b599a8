"""Ways to move bytes between two processes, behind one small interface: an owner's end and a mover's end.

``tanghulu`` with one transport, Mooncake's transfer engine (its Python API, protocol tcp), NIXL with UCX, and the plain
limits: one memmove inside the mover's process, and one blocking socket stream for each caller. Each end runs in the
interpreter of its package.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

from memory import Memory

READ, WRITE = "READ", "WRITE"
TIMEOUT_S = 60
Move = Callable[[int, int], None]
"""``move(local_offset, remote_offset)`` returns when the bytes are there."""


class Owner(Protocol):
    """Offers memory; ``view`` is that memory, ``offer()`` what a mover needs to know."""

    view: memoryview

    def offer(self) -> dict[str, Any]: ...


class Mover(Protocol):
    """Moves between ``memory`` and an owner's."""

    def caller(self, op: str, size: int) -> Move:
        """What one caller's thread calls for transfers of ``size`` bytes; made before the time is taken."""
        ...


def use_packages(folder: str) -> None:
    """Let this interpreter find one more environment's packages, behind its own."""
    if folder and folder not in sys.path:
        sys.path.append(folder)


# --- tanghulu


class TanghuluOwner:
    """A SegmentServer on a loop of its own thread."""

    def __init__(self, area_bytes: int, folder: str, ucx: bool = False) -> None:
        import asyncio

        import uvloop

        from tanghulu.transfer_engine.core.config import ListenOptions
        from tanghulu.transfer_engine.core.segment import MemorySegment
        from tanghulu.transfer_engine.server import SegmentServer

        self._segment = MemorySegment.create("bench", area_bytes, prefault=True)
        self.view = self._segment.view
        self._loop = uvloop.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        transports = ("shm", "ucx", "tcp") if ucx else ("shm", "tcp")
        listen = ListenOptions(transports=transports, host="127.0.0.1", unix_path=os.path.join(folder, "segment.sock"))
        self._server = SegmentServer(self._segment, None, generation=1, host_id="bench", listen=listen)
        asyncio.run_coroutine_threadsafe(self._server.start(), self._loop).result(TIMEOUT_S)

    def offer(self) -> dict[str, Any]:
        import base64
        import pickle

        return {"descriptor": base64.b64encode(pickle.dumps(self._server.descriptor())).decode()}


class TanghuluMover:
    """``TransferEngine.transfer`` with one request a call; ``streams`` for tcp."""

    def __init__(self, memory: Memory, descriptor: str, transport: str, streams: int) -> None:
        import base64
        import pickle

        from tanghulu.transfer_engine import engine

        config = engine.EngineConfig(streams_per_peer=streams)
        self._engine = engine.TransferEngine(host_id="bench", transports=[transport], config=config)
        self._buffer = self._engine.register(memory.view)
        self._remote = self._engine.open_segment(pickle.loads(base64.b64decode(descriptor)))
        self._request, self._opcode = engine.TransferRequest, engine.Opcode

    def caller(self, op: str, size: int) -> Move:
        transfer, request, buffer, remote = self._engine.transfer, self._request, self._buffer, self._remote
        opcode = self._opcode[op]

        def move(local: int, there: int) -> None:
            transfer([request(opcode, buffer, remote, there, size, local)], TIMEOUT_S)

        return move


# --- Mooncake


class MooncakeOwner:
    """A TransferEngine that registered its memory; peers find it by address (P2PHANDSHAKE)."""

    def __init__(self, area_bytes: int) -> None:
        from mooncake.engine import TransferEngine

        self._memory = Memory(1, area_bytes)
        self.view = self._memory.view
        self._engine = TransferEngine()
        _zero(self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), "initialize")
        _zero(self._engine.register_memory(self._memory.address, area_bytes), "register_memory")

    def offer(self) -> dict[str, Any]:
        return {"peer": f"127.0.0.1:{self._engine.get_rpc_port()}", "base": self._memory.address}


class MooncakeMover:
    """``transfer_sync_read`` and ``transfer_sync_write``."""

    def __init__(self, memory: Memory, peer: str, base: int) -> None:
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        _zero(self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), "initialize")
        _zero(self._engine.register_memory(memory.address, len(memory.view)), "register_memory")
        self._address, self._peer, self._base = memory.address, peer, base

    def caller(self, op: str, size: int) -> Move:
        call = self._engine.transfer_sync_read if op == READ else self._engine.transfer_sync_write

        def move(local: int, there: int) -> None:
            _zero(call(self._peer, self._address + local, self._base + there, size), op)

        return move


def _zero(code: int, what: str) -> None:
    if code != 0:
        raise OSError(f"{what} answered {code}")


# --- NIXL


def _agent(name: str, memory: memoryview, address: int, progress: bool) -> Any:
    """An agent of NIXL's bindings; ``progress``: with a thread that sleeps until something comes.

    NIXL's Python wrapper sets that thread's delay to 0: it spins then, and takes a whole core of the machine.
    """
    from nixl_cu12 import _bindings as nixl

    config = nixl.nixlAgentConfig()
    config.useProgThread, config.pthrDelay = progress, 1000
    config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
    agent = nixl.nixlAgent(name, config)
    agent.createBackend("UCX", {})
    agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, [(address, len(memory), 0, "")]), [])
    return agent


class NixlOwner:
    """An agent with its memory registered."""

    def __init__(self, area_bytes: int) -> None:
        self._memory = Memory(1, area_bytes)
        self.view = self._memory.view
        self._agent = _agent("owner", self.view, self._memory.address, True)

    def offer(self) -> dict[str, Any]:
        return {"metadata": self._agent.getLocalMD().hex(), "base": self._memory.address}


class NixlMover:
    """One agent; each caller posts a transfer between prepared descriptors and polls it."""

    def __init__(self, memory: Memory, metadata: str, base: int) -> None:
        self._agent = _agent("mover", memory.view, memory.address, False)
        self._peer = self._agent.loadRemoteMD(bytes.fromhex(metadata))
        self._memory, self._base = memory, base
        self._prepared: dict[int, tuple[Any, Any]] = {}

    def caller(self, op: str, size: int) -> Move:
        from nixl_cu12 import _bindings as nixl

        agent = self._agent
        if size not in self._prepared:
            spots = range(len(self._memory.view) // size)
            here = nixl.nixlXferDList(nixl.DRAM_SEG, [(self._memory.address + n * size, size, 0) for n in spots])
            there = nixl.nixlXferDList(nixl.DRAM_SEG, [(self._base + n * size, size, 0) for n in spots])
            self._prepared[size] = (
                agent.prepXferDlist(nixl.NIXL_INIT_AGENT, here, []),
                agent.prepXferDlist(self._peer, there, []),
            )
        ours, theirs = self._prepared[size]
        opcode, pending = getattr(nixl, f"NIXL_{op}"), nixl.NIXL_IN_PROG

        def move(local: int, there: int) -> None:
            handle = agent.makeXferReq(opcode, ours, [local // size], theirs, [there // size], b"", [], False)
            state = agent.postXferReq(handle, b"")
            while state == pending:
                state = agent.getXferStatus(handle)
            agent.releaseXferReq(handle)
            if state != nixl.NIXL_SUCCESS:
                raise OSError(f"{op} ended as {state}")

        return move


# --- plain limits


class MemmoveOwner:
    """Nobody: the other area is in the mover's own process."""

    def __init__(self, area_bytes: int) -> None:
        self.view = memoryview(bytearray(1))

    def offer(self) -> dict[str, Any]:
        return {}


class MemmoveMover:
    """One memmove by the calling thread."""

    def __init__(self, memory: Memory) -> None:
        self._here, self._there = memory, Memory(1, len(memory.view))

    def caller(self, op: str, size: int) -> Move:
        here, there, copy = self._here.address, self._there.address, ctypes.memmove

        def read(local: int, remote: int) -> None:
            copy(here + local, there + remote, size)

        def write(local: int, remote: int) -> None:
            copy(there + remote, here + local, size)

        return read if op == READ else write


_HEAD = struct.Struct("<QQB")


def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fill ``view``."""
    got = 0
    while got < len(view):
        num = sock.recv_into(view[got:])
        if not num:
            raise ConnectionResetError("the other end hung up")
        got += num


class StreamOwner:
    """Blocking sockets, a thread for each."""

    def __init__(self, area_bytes: int) -> None:
        self.view = Memory(1, area_bytes).view
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def offer(self) -> dict[str, Any]:
        return {"port": self._listener.getsockname()[1]}

    def _accept(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            while head := sock.recv(_HEAD.size, socket.MSG_WAITALL):
                at, size, writes = _HEAD.unpack(head)
                if writes:
                    receive_into(sock, self.view[at : at + size])
                    sock.sendall(b"\1")
                else:
                    sock.sendall(self.view[at : at + size])


class StreamMover:
    """A head there, the payload back; or both there, and one byte of acknowledgement back."""

    def __init__(self, memory: Memory, port: int) -> None:
        self._view, self._port = memory.view, port

    def caller(self, op: str, size: int) -> Move:
        sock = socket.create_connection(("127.0.0.1", self._port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        view = self._view

        def read(local: int, remote: int) -> None:
            sock.sendall(_HEAD.pack(remote, size, 0))
            receive_into(sock, view[local : local + size])

        def write(local: int, remote: int) -> None:
            sock.sendall(_HEAD.pack(remote, size, 1))
            sock.sendall(view[local : local + size])
            if sock.recv(1) != b"\1":
                raise ConnectionResetError("no acknowledgement")

        return read if op == READ else write


OWNERS: dict[str, Callable[..., Owner]] = {
    "tanghulu": TanghuluOwner, "mooncake": MooncakeOwner, "nixl": NixlOwner, "memmove": MemmoveOwner,
    "stream": StreamOwner,
}  # fmt: skip
MOVERS: dict[str, Callable[..., Mover]] = {
    "tanghulu": TanghuluMover, "mooncake": MooncakeMover, "nixl": NixlMover, "memmove": MemmoveMover,
    "stream": StreamMover,
}  # fmt: skip
