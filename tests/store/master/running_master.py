"""A master for tests: in this process, or as a process of its own that can be killed."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from tanghulu.discovery.base import Instance
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.methods import Method
from tanghulu.rpc.wire import Body
from tanghulu.runtime.process import Process, SupervisorLine
from tanghulu.store.directory_feed import DirectoryEvent, DirectoryEventKind, follow_directory
from tanghulu.store.master import main as master_main
from tanghulu.store.master.directory.ranges import RangeDirectories
from tanghulu.store.master.election.ownership import Ownership
from tanghulu.store.master.main import MasterConfig, serve
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.announcements import AnnounceReply, ChunkEntry, NodeAnnouncement, Removal, ReportPiece
from tanghulu.store.protocol.key_slots import NUM_RANGES, NUM_SLOTS, range_of
from tanghulu.store.protocol.messages import LocateRequest
from tanghulu.store.protocol.range_map import RangeMap
from tanghulu.store.protocol.terms import Signature
from tanghulu.types import Address, ChunkKey, InstanceId, Place, Role
from tests.free_ports import free_port

A = TypeVar("A", bound=Body)


class InProcess(Process):
    """A Process whose address the test may await."""

    def ready(self, instance_id: str, address: Address, busy: Any = None) -> None:
        self.address.set_result(address)

    address: asyncio.Future[Address]


class FixedOwnership(Ownership):
    """The ranges owned by one of several masters, as set by the test; callers accept it without a proof."""

    shares = True
    map = RangeMap.of_one(None)

    @property
    def signature(self) -> Signature:
        return Signature(self.map.newest_term)

    def __init__(self) -> None:
        self._owned: frozenset[int] = frozenset()
        self.map = RangeMap(1, 77, (None,) * NUM_RANGES, (0,) * NUM_RANGES)
        #: Called once, when this master is asked the next time what it owns: in the middle of a call.
        self.on_asked: Callable[[], Any] | None = None
        #: The master's; it forgets and begins ranges as they go and come.
        self.directory: RangeDirectories | None = None

    @property
    def owned(self) -> frozenset[int]:
        asked, self.on_asked = self.on_asked, None
        if asked is not None:
            asked()
        return self._owned

    @owned.setter
    def owned(self, numbers: frozenset[int]) -> None:
        self.own(numbers, again=frozenset())

    def own(self, numbers: frozenset[int], *, again: frozenset[int]) -> None:
        """Own these ranges; ``again``: those that this master had, and has lost meanwhile."""
        self._owned = numbers
        if self.directory is not None:
            for number in self.directory.owned - (numbers - again):
                self.directory.forget_range(number)
            for number in numbers - self.directory.owned:
                self.directory.begin_range(number)

    def __repr__(self) -> str:
        return f"FixedOwnership({len(self._owned)} ranges of {self.map})"


@contextmanager
def _forgetting(ownership: FixedOwnership) -> Iterator[None]:
    """Masters that are made meanwhile know of a range only what they were told since they own it."""
    original = master_main.Master

    def make(*arguments: Any, **options: Any) -> Any:
        master = original(*arguments, **options)
        ownership.directory = master.directory
        return master

    master_main.Master = make  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        master_main.Master = original  # type: ignore[misc]


@asynccontextmanager
async def master_here(ownership: FixedOwnership | None = None, **options: Any) -> AsyncIterator[InProcess]:
    """A master in this event loop."""
    with tempfile.TemporaryDirectory(prefix="th-master-") as run_dir:
        config = MasterConfig(port=0, **{"rebuild_s": 0.2, **options})
        process = InProcess(
            Role.MASTER,
            config,
            Path(run_dir),
            SupervisorLine(-1, lambda: None),
            CollectorRegistry(),
            "",
            secrets.randbits(48),
        )
        process.address = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(serve(process, config, ownership))
        await asyncio.wait({serving, process.address}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        try:
            yield process
        finally:
            process.stopping.set()
            await serving
        assert not os.listdir(run_dir)


class SeveralMasters:
    """Masters in this event loop that share the ranges as the test says. The first leads."""

    def __init__(self, masters: Sequence[InProcess], ownerships: Sequence[FixedOwnership]) -> None:
        self.addresses = [master.address.result() for master in masters]
        self.ownerships = ownerships
        self._version = 10

    def share(self, owner_of: Callable[[int], int | None], *, told: Sequence[int] | None = None) -> RangeMap:
        """Give range n to the master of that index, or to nobody; ``told`` of them hear it, None: all."""
        before, self._version = self.ownerships[0].map, self._version + 10
        indexes = [owner_of(number) for number in range(NUM_RANGES)]
        owners = tuple(None if each is None else self.addresses[each] for each in indexes)
        kept = [owner is None or owner == was for owner, was in zip(owners, before.owners, strict=True)]
        terms = tuple(t if same else self._version for t, same in zip(before.terms, kept, strict=True))
        known = RangeMap(self._version, before.cluster, owners, terms)
        for index, ownership in enumerate(self.ownerships):
            ownership.owned = frozenset(number for number, each in enumerate(indexes) if each == index)
            if told is None or index in told:
                ownership.map = known
        return known


@asynccontextmanager
async def several_masters_here(
    num_masters: int = 2, *, forget: bool = False, **options: Any
) -> AsyncIterator[SeveralMasters]:
    """Masters that own the ranges in turn: with two of them the first has the even ranges.

    ``forget``: who comes to own a range knows nothing of it until nodes have told it; else what it was told before.
    """
    async with AsyncExitStack() as stack:
        ownerships, masters = [FixedOwnership() for _ in range(num_masters)], []
        for each in ownerships:
            with _forgetting(each) if forget else nullcontext():
                masters.append(await stack.enter_async_context(master_here(each, **options)))
        several = SeveralMasters(masters, ownerships)
        several.share(lambda number: number % num_masters)
        yield several


class MasterProcess:
    """``tanghulu master`` as a process; ``start`` again on the same port after ``kill``."""

    def __init__(self, run_dir: Path, *options: str) -> None:
        self.run_dir = run_dir
        self._log = run_dir.with_name("master.log")
        self.address = Address("127.0.0.1", free_port())
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> Address:
        self._status = self._spawn()
        line = b""
        async with asyncio.timeout(60):
            while not line.endswith(b"\n"):
                got = await asyncio.get_running_loop().sock_recv(self._status, 4096)
                assert got, self.log()
                line += got
        status = json.loads(line)
        assert status["event"] == "ready", status
        self.address = Address.parse(status["address"])
        return self.address

    def _spawn(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        command = [
            *(sys.executable, "-W", "error", "-c", "from tanghulu.store.master.main import COMMAND; COMMAND()"),
            *("--port", str(self.address.port), "--status-fd", str(theirs.fileno())),
            *("--run-dir", str(self.run_dir), *self._options),
        ]
        with self._log.open("ab") as log, theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=log)
        ours.setblocking(False)
        return ours

    def log(self) -> str:
        return self._log.read_text()

    async def kill(self) -> None:
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        assert await self._end(signal.SIGTERM) == 0, self.log()

    async def _end(self, number: signal.Signals) -> int:
        assert self._process is not None
        process, self._process = self._process, None
        process.send_signal(number)
        self._status.close()
        return await asyncio.to_thread(process.wait, 30)

    async def close(self) -> None:
        if self._process is not None:
            await self.kill()


def keys_of_one_range(num_keys: int) -> list[str]:
    """Keys that belong to the same range."""
    return [key for n in range(200 * num_keys) if range_of(key := f"k{n}") == 0][:num_keys]


def instance(name: str = "n1", role: Role = Role.NODE, **values: Any) -> Instance:
    values = {"generation": 7, "place": Place("z", "r", f"host-{name}"), **values}
    return Instance(InstanceId(name), role, Address("127.0.0.1", 7410), **values)


async def ask(connection: AsyncFastConnection, method: Method[Any, A], request: Any) -> A:
    return (await connection.call(method.number, request, method.reply)).message


class FakeNode:
    """Announces over the fast lane, as a node does; registering is left to a Discovery."""

    def __init__(self, connection: AsyncFastConnection, instance: Instance) -> None:
        self.connection = connection
        self.instance = instance
        self.chunks: dict[str, tuple[int, int]] = {}
        self.num_reports = 0
        self.map_version = 0  # 0: the node takes the master for the owner of everything

    @classmethod
    async def connect(cls, address: Address, instance: Instance) -> FakeNode:
        return cls(await AsyncFastConnection.connect(address), instance)

    async def announce(
        self,
        *added: tuple[str, int, int],
        removed: Sequence[tuple[str, int]] = (),
        deleted: Sequence[tuple[str, int]] = (),
        report_id: int = 0,
        piece: ReportPiece | None = None,
        capacity: int = 1 << 30,
    ) -> AnnounceReply:
        request = NodeAnnouncement(
            self.instance.id,
            self.instance.generation,
            [ChunkEntry(ChunkKey(key), version, size) for key, version, size in added],
            [Removal(ChunkKey(key), version) for key, version in removed],
            [Removal(ChunkKey(key), version) for key, version in deleted],
            report_id=report_id,
            piece=piece,
            capacity_bytes=capacity,
            map_version=self.map_version,
            owned=1 if self.map_version else 0,
        )
        return await ask(self.connection, methods.ANNOUNCE, request)

    async def report(self, *chunks: tuple[str, int, int]) -> AnnounceReply:
        self.num_reports += 1
        await self.announce(report_id=self.num_reports, piece=ReportPiece(0, 0))
        entries = [(ChunkKey(key), version, size, False) for key, version, size in chunks]
        return await self.announce(report_id=self.num_reports, piece=ReportPiece(1, NUM_SLOTS, entries))

    async def holders(self, *keys: str) -> tuple[list[list[str]], bool]:
        reply = await ask(self.connection, methods.LOCATE, LocateRequest(keys, False))
        return [[] if each is None else list(each.node_ids) for each in reply.locations], reply.incomplete


@asynccontextmanager
async def asking(address: Address) -> AsyncIterator[Callable[[Method[Any, A], Any], Awaitable[A]]]:
    """Calls of the master there."""
    connection = await AsyncFastConnection.connect(address)
    try:
        yield partial(ask, connection)
    finally:
        await connection.close()


async def until(condition: Callable[[], Any], deadline_s: float = 30.0) -> None:
    """Poll a condition that no event tells of; it may be a coroutine function."""
    async with asyncio.timeout(deadline_s):
        while True:
            outcome = condition()
            if await outcome if asyncio.iscoroutine(outcome) else outcome:
                return
            await asyncio.sleep(0.005)


K = DirectoryEventKind


class Mirror:
    """What a follower knows, and the kinds of events it was told."""

    def __init__(self) -> None:
        self.kinds: list[DirectoryEventKind] = []
        self.pairs: set[tuple[str, str]] = set()
        self.last = 0

    def apply(self, event: DirectoryEvent) -> None:
        self.kinds.append(event.kind)
        pairs = {(event.node_id, key) for key in event.keys}
        if event.kind is K.STORED:
            self.pairs |= pairs
        elif event.kind is K.REMOVED:
            self.pairs -= pairs
        elif event.kind is K.NODE_GONE:
            self.pairs = {pair for pair in self.pairs if pair[0] != event.node_id}
        elif event.kind is K.RESET:
            self.pairs = set()
        assert event.sequence >= self.last or event.kind is K.RESET
        self.last = event.sequence


@asynccontextmanager
async def following(address: Address, prefix: str = "") -> AsyncIterator[Mirror]:
    mirror = Mirror()
    stream = follow_directory(address, prefix)

    async def pump() -> None:
        async for batch in stream:
            for event in batch:
                mirror.apply(event)

    task = asyncio.create_task(pump())
    try:
        yield mirror
        assert not task.done(), task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await stream.aclose()
