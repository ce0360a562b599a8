"""A real SegmentServer in a process of its own, told what to do over a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
import xxhash

from tanghulu.auth.tls import ServerTls
from tanghulu.transfer_engine.core.access import AccessTable, Freed
from tanghulu.transfer_engine.core.config import ListenOptions
from tanghulu.transfer_engine.core.segment import MemorySegment, SegmentDescriptor, SessionKey
from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.transfer_engine.server import SegmentServer
from tests.virtual.clock import ManualClock

HOST_ID = "test-host"
SEGMENT_BYTES = 80 << 20
SEGMENT_NAME = "arena"
#: Children come from a server process that has imported what is slow to import: they start in milliseconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["numpy", "uvloop", "tanghulu.transfer_engine.server"])
# The folder of its socket outlives the tests' own TMPDIR, so it is made before that is set.
util.get_temp_dir()


def warm_up() -> None:
    """Start what multiprocessing keeps open for good, so that tests can count descriptors."""
    resource_tracker.ensure_running()
    forkserver.ensure_running()


class Owner:
    """What runs in the child: every method is a command, executed on the event loop."""

    def __init__(self, size_bytes: int, with_access: bool, options: dict[str, Any]) -> None:
        self.clock = ManualClock()
        self.access = AccessTable(self.clock, lease_ms=1000, max_quarantined_bytes_per_session=1 << 20)
        self.freed: list[Freed] = []
        self.changed = asyncio.Event()
        self.segment = MemorySegment.create(SEGMENT_NAME, size_bytes)
        self.notices: list[tuple[int, bytes, int]] = []
        self.watched = (0, 1)
        access = self.access if with_access else None
        on_notice = self._on_notice if options.pop("notices", True) else None
        if "tls" in options:
            options["tls"] = ServerTls(options["tls"], mutual=True).context
        generation = options.pop("generation")
        self.server = SegmentServer(
            self.segment,
            access,
            generation=generation,
            host_id=HOST_ID,
            listen=ListenOptions(**({"host": "127.0.0.1"} | options)),
            on_freed=self._on_freed,
            on_notice=on_notice,
        )

    def _on_notice(self, session_id: int, data: bytes) -> None:
        """Keep it with the checksum of what the watched range holds at this moment."""
        start, end = self.watched
        self.notices.append((session_id, data, xxhash.xxh3_64_intdigest(self.segment.view[start:end])))

    async def watch_notices(self, offset: int, length: int) -> None:
        self.notices, self.watched = [], (offset, offset + length)

    async def take_notices(self) -> list[tuple[int, bytes, int]]:
        return self.notices

    def _on_freed(self, freed: Any) -> None:
        self.freed += freed
        self.changed.set()

    async def descriptor(self) -> SegmentDescriptor:
        return self.server.descriptor()

    async def peek(self, offset: int, length: int) -> bytes:
        return bytes(self.segment.view[offset : offset + length])

    async def poke(self, offset: int, data: bytes) -> None:
        self.segment.view[offset : offset + len(data)] = data

    async def open_session(self, session_id: int, pid: int | None, may_write: bool = False) -> SessionKey:
        return self.access.open_session(session_id, pid, may_write=may_write)

    async def close_session(self, session_id: int) -> list[Freed]:
        return self.access.close_session(session_id)

    async def grant(self, session_id: int, offset: int, length: int, opcode: Opcode, shm: bool) -> int:
        return self.access.grant(session_id, offset, length, opcode, shm=shm)

    async def pass_time(self, seconds: float) -> list[Freed]:
        self.clock.advance(seconds)
        return self.access.expire(self.clock.now_s())

    async def busy(self, offset: int, length: int) -> bool:
        return self.access.busy(offset, length)

    async def next_freed(self) -> list[Freed]:
        async with asyncio.timeout(30):
            while not self.freed:
                self.changed.clear()
                await self.changed.wait()
        freed, self.freed = self.freed, []
        return freed

    async def hang_up_shm(self) -> None:
        await self.server._listeners["shm"].close()

    async def close_ucx(self) -> None:
        await self.server._listeners["ucx"].close()

    async def counters(self) -> dict[str, Any]:
        self.server.check()
        return {
            "read": self.server.bytes_read["tcp"],
            "written": self.server.bytes_written["tcp"],
            "refused": self.server.admission.num_refused,
            "connections": self.server.num_connections,
            "fenced": self.server.admission.num_fenced,
        }


async def _run(pipe: Connection, size_bytes: int, with_access: bool, options: dict[str, Any]) -> None:
    owner = Owner(size_bytes, with_access, options)
    await owner.server.start()
    pipe.send(owner.server.descriptor())
    while True:
        try:
            name, arguments = await asyncio.to_thread(pipe.recv)
        except EOFError:
            break
        if name == "stop":
            break
        try:
            pipe.send((True, await getattr(owner, name)(*arguments)))
        except Exception as error:  # noqa: BLE001 - it travels to the test
            pipe.send((False, error))
    await owner.server.close()
    owner.server.check()
    owner.segment.close()


def _main(pipe: Connection, size_bytes: int, with_access: bool, loop: str, options: dict[str, Any]) -> None:
    runner: Callable[[Any], Any] = uvloop.run if loop == "uvloop" else asyncio.run
    runner(_run(pipe, size_bytes, with_access, options))


class SegmentProcess:
    """The test's end: commands as method calls, and signals."""

    def __init__(
        self,
        *,
        size_bytes: int = SEGMENT_BYTES,
        access: bool = False,
        generation: int = 1,
        port: int = 0,
        folder: Path | None = None,
        loop: str = "uvloop",
        **options: Any,
    ) -> None:
        self._own_folder = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="th-"))
        self._pipe, theirs = CONTEXT.Pipe()
        options = {"transports": ("shm", "tcp")} | options
        options |= {"unix_path": str(self.folder / "listener"), "generation": generation, "port": port}
        self.process = CONTEXT.Process(target=_main, args=(theirs, size_bytes, access, loop, options))
        self.process.start()
        theirs.close()
        self.descriptor: SegmentDescriptor = self._pipe.recv()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def command(*arguments: Any) -> Any:
            self._pipe.send((name, arguments))
            ok, answer = self._pipe.recv()
            if not ok:
                raise answer
            return answer

        if name.startswith("_"):
            raise AttributeError(name)
        return command

    @property
    def tcp_port(self) -> int:
        return int(self.descriptor.endpoints_of("tcp")[0].address.rpartition(":")[2])

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError, BrokenPipeError):  # it may die, or have died, at any moment
            self.signal(signal.SIGCONT)
            self._pipe.send(("stop", ()))
        self.process.join(30)
        self._pipe.close()
        self.process.close()
        if self._own_folder:
            shutil.rmtree(self.folder)

    def __enter__(self) -> SegmentProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def random_bytes(length: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)
