"""The sources of the contract suite: each makes discoveries, and instances whose process dies."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from tanghulu.discovery.base import Discovery, Instance
from tanghulu.discovery.etcd import EtcdDiscovery
from tanghulu.discovery.file import FileDiscovery
from tanghulu.discovery.master import MasterDiscovery
from tanghulu.errors import MasterUnavailable
from tanghulu.types import Address
from tests.discovery.memory import MemoryDiscovery, MemoryRegistry
from tests.free_ports import free_port
from tests.store.master.running_master import master_here

_DOOMED = """
import asyncio, sys
from pathlib import Path
from tanghulu.discovery.base import Instance
from tanghulu.discovery.etcd import EtcdDiscovery
from tanghulu.discovery.file import FileDiscovery
from tanghulu.discovery.master import MasterDiscovery
from tanghulu.types import Address, Place, Role

async def main():
    async with {discovery} as discovery:
        await discovery.register({instance}, {ttl_s})
        print("registered", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


class Source(Protocol):
    #: A lease ends at most so much later than it was asked to.
    late_s: float

    def open(self) -> Discovery: ...

    async def doomed(self, instance: Instance, ttl_s: float) -> Doomed: ...


class Doomed(Protocol):
    """A process that has registered an instance and keeps it alive, until it is killed."""

    async def kill(self) -> None: ...


class DoomedProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, discovery: str, instance: Instance, ttl_s: float) -> DoomedProcess:
        values = f"Instance({instance.id!r}, {instance.role}, {instance.address!r}, generation={instance.generation})"
        code = _DOOMED.format(discovery=discovery, instance=values, ttl_s=ttl_s)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code), stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
        )
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 20) == b"registered\n"
        return cls(process)

    async def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        await self._process.communicate()


class MemorySource:
    late_s = 0.0

    def __init__(self) -> None:
        self._registry = MemoryRegistry()

    def open(self) -> Discovery:
        return MemoryDiscovery(self._registry)

    async def doomed(self, instance: Instance, ttl_s: float) -> Doomed:
        discovery = MemoryDiscovery(self._registry)
        await discovery.register(instance, ttl_s)

        class Crash:
            async def kill(self) -> None:
                discovery.crash()

        return Crash()


class FileSource:
    late_s = 0.0

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def open(self) -> Discovery:
        return FileDiscovery(self._directory, poll_s=0.02)

    async def doomed(self, instance: Instance, ttl_s: float) -> Doomed:
        return await DoomedProcess.start(f"FileDiscovery(Path({str(self._directory)!r}))", instance, ttl_s)


class MasterSource:
    late_s = 0.0

    def __init__(self, address: Address) -> None:
        self._address = address

    def open(self) -> Discovery:
        return MasterDiscovery(self._address)

    async def doomed(self, instance: Instance, ttl_s: float) -> Doomed:
        return await DoomedProcess.start(f"MasterDiscovery({self._address!r})", instance, ttl_s)


class EtcdSource:
    late_s = 2.0  # whole seconds, and expired ones are looked for twice a second

    def __init__(self, address: Address) -> None:
        self._address = address

    def open(self) -> Discovery:
        return EtcdDiscovery(self._address)

    async def doomed(self, instance: Instance, ttl_s: float) -> Doomed:
        return await DoomedProcess.start(f"EtcdDiscovery({self._address!r})", instance, ttl_s)


#: etcd grants no lease shorter than one and a half election time-outs.
_FAST_ELECTION = ("--heartbeat-interval", "20", "--election-timeout", "200")


@asynccontextmanager
async def etcd_here() -> AsyncIterator[Address]:
    """A real etcd of one member on free ports, its data in a directory that goes with it."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is missing: apt-get install etcd-server")
    client, peer = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="th-etcd-") as directory:
        urls = ["--listen-client-urls", f"http://127.0.0.1:{client}", "--listen-peer-urls", f"http://127.0.0.1:{peer}"]
        advertised = ["--advertise-client-urls", f"http://127.0.0.1:{client}"]
        process = await asyncio.create_subprocess_exec(
            *("etcd", "--data-dir", directory, *urls, *advertised, *_FAST_ELECTION, "--log-level", "error"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            await _answers(Address("127.0.0.1", client))
            yield Address("127.0.0.1", client)
        finally:
            process.terminate()
            await process.wait()


async def _answers(address: Address) -> None:
    async with asyncio.timeout(20), EtcdDiscovery(address) as discovery:
        while True:
            try:
                await discovery.client.revoke(await discovery.client.grant(2))
                return
            except MasterUnavailable:
                await asyncio.sleep(0.05)


@asynccontextmanager
async def source(kind: str) -> AsyncIterator[Any]:
    if kind == "memory":
        yield MemorySource()
    elif kind == "file":
        with tempfile.TemporaryDirectory(prefix="th-file-") as directory:
            yield FileSource(Path(directory) / "instances")
    elif kind == "etcd":
        async with etcd_here() as address:
            yield EtcdSource(address)
    else:
        async with master_here() as process:
            yield MasterSource(await process.address)
