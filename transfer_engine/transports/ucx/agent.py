"""The one file that touches NIXL: an agent with UCX behind it, and the messages by which two processes describe theirs.

Owns only the translation: into NIXL's bindings (package ``nixl-cu12`` or ``nixl-cu13``, the extra ``ucx``), and its
exceptions into typed errors. They are loaded on the first use of ucx. It uses the bindings and not NIXL's Python
wrapper, because the wrapper's progress thread spins (a whole core per agent) and it logs by itself.

UCX's shared-memory lanes (cma, xpmem, posix and their like) are switched off: a peer's kernel performs writes through
them by itself, whatever became of our agent, so nothing here could stop them. On one host ``shm`` serves. Through all
other lanes a closed agent neither sends nor lets anything land: its sockets and queue pairs are gone.

The CONNECT of a ucx connection (see ``onesided.wire``) has no payload; its answer's is

    segment's address u64 | the metadata of the owner's agent

Seen with NIXL 1.5.1: an agent takes 30 to 100 ms to make and 5 to 20 ms to close, some 15 descriptors, 5 MB and, where
it serves, one sleeping thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import struct
import threading
from types import ModuleType
from typing import Any

from tanghulu.errors import NodeUnavailable, TransferFailed
from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.transfer_engine.core.wire import MalformedMessage
from tanghulu.transfer_engine.transports.onesided.wire import Dialect

UCX = Dialect("ucx", 2, 0x7A6E6706, 0x7A6E6707)
_SEGMENT = struct.Struct("<Q")
_MODULES = ("nixl_cu13._bindings", "nixl_cu12._bindings")
#: UCX's own settings, as NIXL's backend takes them.
_LANES = "TLS=^sm"
#: Longest sleep of an idle progress thread; events wake it.
_PROGRESS_SLEEP_US = 1000
_lock = threading.Lock()
_bindings: list[ModuleType] = []


def pack_granted(address: int, metadata: bytes) -> bytes:
    """Pack the segment's address, and the data by which a peer reaches the agent."""
    return _SEGMENT.pack(address) + metadata


def parse_granted(payload: bytes) -> tuple[int, bytes]:
    """Invert ``pack_granted``; raises MalformedMessage."""
    if len(payload) < _SEGMENT.size:
        raise MalformedMessage(f"a ucx CONNECT was granted with {len(payload)} bytes")
    return _SEGMENT.unpack_from(payload)[0], payload[_SEGMENT.size :]


def probe() -> str:
    """Return why ucx cannot be used in this process; empty if it can."""
    try:
        _nixl()
    except NodeUnavailable as error:
        return error.message
    return ""


def _nixl() -> ModuleType:
    """Return the bindings; raises NodeUnavailable that names what is missing."""
    with _lock:
        if _bindings:
            return _bindings[0]
        with contextlib.suppress(OSError):
            # NIXL's wheel ships libnl. Where the system has one too (below its libibverbs, which UCX looks for), the
            # two conflict and the process ends by SIGSEGV after its last line, unless the system's was loaded first.
            ctypes.CDLL("libibverbs.so.1")
        reasons = []
        for name in _MODULES:
            try:
                _bindings.append(importlib.import_module(name))
                return _bindings[0]
            except ImportError as error:
                reasons.append(str(error))
        raise NodeUnavailable(f"NIXL cannot be imported ({'; '.join(reasons)}); run pip install --no-deps nixl-cu12")


class AgentRegistration:
    """Memory usable by one agent; ends by ``close``, or with this object."""

    def __init__(self, agent: Agent, described: Any) -> None:
        self.agent: Agent | None = agent
        self._described = described

    def close(self) -> None:
        """Deregister it: the agent will not touch the memory any more; nothing is under way in it."""
        agent, self.agent = self.agent, None
        if agent is not None:
            agent.deregister(self._described)

    def __del__(self) -> None:
        self.close()


class Agent:
    """One UCX worker. ``serves``: with a thread that answers peers; else ``AgentTransfer.done`` moves it.

    Every method may be called from any thread. Raises NodeUnavailable if NIXL or its UCX is not here.
    """

    def __init__(self, name: str, *, serves: bool) -> None:
        nixl = self._nixl = _nixl()
        self._errors = tuple(getattr(nixl, each) for each in dir(nixl) if each.endswith("Error"))
        config = nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = serves, _PROGRESS_SLEEP_US
        config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
        self._agent: Any = None
        self._offered: AgentRegistration | None = None
        try:
            self._agent = nixl.nixlAgent(name, config)
            self._agent.createBackend("UCX", {"engine_config": _LANES})
        except self._errors as error:
            self._agent = None
            raise NodeUnavailable(f"NIXL cannot make an agent with UCX: {error}") from None

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._agent is None

    def register(self, address: int, num_bytes: int) -> AgentRegistration:
        """Let the agent, and holders of its metadata, use the memory. Raises TransferFailed."""
        described = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address, num_bytes, 0, "")])
        try:
            self._agent.registerMem(described, [])
        except self._errors as error:
            raise TransferFailed(f"UCX cannot register {num_bytes} bytes: {error}") from None
        return AgentRegistration(self, described)

    def deregister(self, described: Any) -> None:
        """Deregister for AgentRegistration; a closed agent has released its memory already."""
        if self._agent is not None:
            self._agent.deregisterMem(described, [])

    def offer(self, address: int, num_bytes: int) -> bytes:
        """Register the memory until the agent is closed; return data for peers' ``connect``. Raises TransferFailed."""
        self._offered = self.register(address, num_bytes)
        return bytes(self._agent.getLocalMD())

    def connect(self, metadata: bytes) -> str:
        """Return the peer's name for ``post``. Raises TransferFailed if these are not an agent's metadata."""
        try:
            name = self._agent.loadRemoteMD(metadata)
        except self._errors as error:
            raise TransferFailed(f"UCX cannot use the owner's metadata: {error}") from None
        return name if isinstance(name, str) else name.decode()

    def post(self, opcode: Opcode, peer: str, local: int, remote: int, num_bytes: int) -> AgentTransfer:
        """Begin to move ``num_bytes`` between two addresses, both registered. Raises as ``AgentTransfer.done``."""
        nixl = self._nixl
        operation = nixl.NIXL_READ if opcode is Opcode.READ else nixl.NIXL_WRITE
        here = nixl.nixlXferDList(nixl.DRAM_SEG, [(local, num_bytes, 0)])
        there = nixl.nixlXferDList(nixl.DRAM_SEG, [(remote, num_bytes, 0)])
        try:
            number = self._agent.createXferReq(operation, here, there, peer, "", [])
            return AgentTransfer(self, number, self._agent.postXferReq(number, "") == nixl.NIXL_SUCCESS)
        except self._errors as error:
            raise self._failure(error) from None

    def finished(self, number: int) -> bool:
        """See AgentTransfer.done."""
        try:
            state = self._agent.getXferStatus(number)
        except self._errors as error:
            raise self._failure(error) from None
        if state == self._nixl.NIXL_IN_PROG:
            return False
        if state != self._nixl.NIXL_SUCCESS:
            raise TransferFailed(f"UCX ended a transfer as {state}")
        return True

    def release(self, number: int) -> None:
        """See AgentTransfer.release."""
        if self._agent is not None:
            try:
                self._agent.releaseXferReq(number)
            except self._errors as error:
                raise self._failure(error) from None

    def close(self) -> None:
        """Disconnect all peers: nothing is sent any more, and nothing lands, here or there, through this agent."""
        self._agent = None  # the bindings' destructor closes it, and this was the only reference
        self._offered = None

    def _failure(self, error: Exception) -> NodeUnavailable | TransferFailed:
        if isinstance(error, self._nixl.nixlRemoteDisconnectError):
            return NodeUnavailable("UCX lost the connection to the owner")
        return TransferFailed(f"UCX: {error}")


class AgentTransfer:
    """One operation under way."""

    def __init__(self, agent: Agent, number: int, done: bool) -> None:
        self._agent = agent
        self._number = number
        self._done = done

    def done(self) -> bool:
        """Return whether all bytes are in place; advances the transfer.

        Raises NodeUnavailable if the peer is gone, TransferFailed for every other error of UCX.
        """
        self._done = self._done or self._agent.finished(self._number)
        return self._done

    def release(self) -> None:
        """Forget it. A transfer under way is certain to have ended only when its agent is closed."""
        self._agent.release(self._number)
