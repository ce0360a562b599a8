"""SegmentServer: one process's segment, offered to peers over the transports named in its options.

Owns the listeners, the sweep's timer and the watch over peers' processes. ``core.admission`` decides the answers to
peers, ``core.access`` what they may touch; the transports' listeners and the peers themselves move the bytes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

from tanghulu.runtime.clock import LEAST_BYTES_S
from tanghulu.transfer_engine.core.access import AccessTable, Freed
from tanghulu.transfer_engine.core.admission import OnNotice, PeerAdmission
from tanghulu.transfer_engine.core.config import ListenOptions, ServerLimits
from tanghulu.transfer_engine.core.segment import MemorySegment, SegmentDescriptor
from tanghulu.transfer_engine.core.transport import Listener, ServeContext
from tanghulu.transfer_engine.transports.registry import TRANSPORTS


def _soon(callback: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_soon(callback)


class SegmentServer:
    """Serves ``segment`` until ``close()``; everything happens on the event loop that called ``start()``.

    ``access`` decides about every range; None opens the whole segment to every peer that can connect (tests, benches).
    ``on_freed`` receives, on the loop, the ranges freed by the end of a transfer or of a peer's process. ``on_notice``
    receives, on the loop, the notices that clients send by ``TransferRequest.notify``; without it they are refused.
    ``bytes_read`` and ``bytes_written`` count by transport, from the client's point of view; shm traffic is invisible
    here, so the owner adds what its clients report. The segment remains the caller's; close the server first.
    """

    def __init__(
        self,
        segment: MemorySegment,
        access: AccessTable | None,
        *,
        generation: int,
        host_id: str,
        listen: ListenOptions,
        limits: ServerLimits | None = None,
        on_freed: Callable[[Sequence[Freed]], None] | None = None,
        on_notice: OnNotice | None = None,
    ) -> None:
        self._segment = segment
        self._access = access
        self._generation = generation
        self._host_id = host_id
        self._on_freed = on_freed
        self._limits = limits = limits or ServerLimits()
        self._watch = ProcessWatch(self._process_exited)
        self._sweeping: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._emptied = asyncio.Event()
        self._open = False
        self.admission = PeerAdmission(
            segment,
            access,
            generation=generation,
            max_connections=limits.max_connections,
            soon=_soon,
            on_freed=self._report_freed,
            on_emptied=self._emptied.set,
            on_notice=on_notice,
        )
        context = ServeContext(
            segment=segment,
            access=access,
            generation=generation,
            admission=self.admission,
            listen=listen,
            limits=limits,
            on_freed=self._report_freed,
            watch_process=self._watch.add,
            on_hang_up=self._process_exited if listen.shm_hang_up_frees else lambda _: None,
        )
        #: By transport, in the order of preference for peers.
        self._listeners: dict[str, Listener] = {
            name: transport.serve(context) for name, transport in TRANSPORTS.items() if name in listen.transports
        }

    # --- life

    async def start(self) -> None:
        """Listen on every transport; raises OSError if an address or the socket path is taken.

        Raises NodeUnavailable if a transport cannot work here: rdma without the requested devices, ucx without NIXL;
        TransferFailed if the memory cannot be registered.
        """
        assert not self._open, "a server starts once"
        self._open = self.admission.open = True
        try:
            for listener in self._listeners.values():
                await listener.start()
        except BaseException:  # including a cancel: the listeners would serve no segment; re-raised
            await self.close()
            raise
        self._sweeping = asyncio.get_running_loop().call_later(self._limits.stall_timeout_s, self._sweep)
        self._looking = asyncio.get_running_loop().call_later(self._limits.hello_s / 2, self._look)

    def descriptor(self) -> SegmentDescriptor:
        """Everything peers need to open this segment; valid after ``start()``."""
        assert self._open, "start the server first"
        endpoints = [each for listener in self._listeners.values() for each in listener.endpoints()]
        return SegmentDescriptor(
            self._segment.name, self._segment.size_bytes, self._host_id, self._generation, tuple(endpoints)
        )

    async def close(self) -> None:
        """Disconnect all peers; no transfer is open, and no socket file is left, when this returns."""
        if not self._open:
            return
        self._open = self.admission.open = False
        if self._sweeping is not None:
            self._sweeping.cancel()
        if self._looking is not None:
            self._looking.cancel()
        for listener in reversed(self._listeners.values()):
            await listener.close()
        self._watch.close()
        if self.admission.connections:
            await self._emptied.wait()
        await asyncio.sleep(0)  # READs end one turn behind their connection_lost

    def maps(self, session_id: int) -> bool:
        """Return whether the session's peer has mapped the segment and may still read it."""
        return session_id in self._watch.session_ids

    @property
    def num_connections(self) -> dict[str, int]:
        """Open connections by transport."""
        return {name: listener.num_connections for name, listener in self._listeners.items()}

    @property
    def bytes_read(self) -> dict[str, int]:
        """Payload bytes by transport, from the client's point of view."""
        return {"shm": 0, "tcp": self.admission.bytes_read}

    @property
    def bytes_written(self) -> dict[str, int]:
        """Payload bytes by transport, from the client's point of view."""
        return {"shm": 0, "tcp": self.admission.bytes_written}

    def check(self) -> None:
        """Assert the invariants."""
        self.admission.check()
        for listener in self._listeners.values():
            listener.check()

    def __repr__(self) -> str:
        return f"SegmentServer({self._segment!r}, generation={self._generation}, {self.num_connections})"

    # --- inside

    def _report_freed(self, freed: Sequence[Freed]) -> None:
        if freed and self._on_freed is not None:
            self._on_freed(freed)

    def _process_exited(self, session_id: int) -> None:
        self._watch.forget(session_id)
        if self._access is not None:
            self._report_freed(self._access.session_exited(session_id))

    def _sweep(self) -> None:
        """Cut connections that stall inside a slice; forget ended sessions."""
        self.admission.cut_stalled(round(LEAST_BYTES_S * self._limits.stall_timeout_s))
        for session_id in self._watch.session_ids:
            if self._access is None or not self._access.has_session(session_id):
                self._watch.forget(session_id)
        self._sweeping = asyncio.get_running_loop().call_later(self._limits.stall_timeout_s, self._sweep)

    def _look(self) -> None:
        """Cut connections that have sent no HELLO since the last look: at most ``hello_s`` after they connected."""
        self.admission.cut_unknown()
        self._looking = asyncio.get_running_loop().call_later(self._limits.hello_s / 2, self._look)


class ProcessWatch:
    """Reports, once per session, that a peer's process has exited."""

    def __init__(self, on_exit: Callable[[int], None]) -> None:
        self._on_exit = on_exit
        self._pidfds: dict[int, int] = {}

    def add(self, session_id: int, pidfd: int) -> None:
        """Watch ``pidfd`` for the session and own it; a second one for the same session is closed."""
        if session_id in self._pidfds:
            os.close(pidfd)
            return
        self._pidfds[session_id] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._exited, session_id)

    def forget(self, session_id: int) -> None:
        """Stop watching; unknown sessions are fine."""
        pidfd = self._pidfds.pop(session_id, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    @property
    def session_ids(self) -> list[int]:
        """The watched sessions."""
        return list(self._pidfds)

    def close(self) -> None:
        """Stop watching everything."""
        for session_id in self.session_ids:
            self.forget(session_id)

    def _exited(self, session_id: int) -> None:
        self.forget(session_id)
        self._on_exit(session_id)
