"""The Discovery of a process, as named by its option ``--discovery``."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tanghulu.discovery.base import Discovery, EventKind, Instance
from tanghulu.discovery.etcd import EtcdDiscovery
from tanghulu.discovery.file import FileDiscovery
from tanghulu.discovery.master import MasterDiscovery
from tanghulu.discovery.memory import MemoryDiscovery, MemoryRegistry
from tanghulu.errors import ConfigError, MasterUnavailable
from tanghulu.masters import Masters
from tanghulu.types import Address, InstanceId, Role

HELP = "where instances find each other: master (the default), etcd://host:port[,host:port], or file:DIR"

#: The Discovery of a process without others.
NONE = "none"


def open_discovery(spec: str, master: Masters | Address) -> Discovery:
    """Return the Discovery named by ``spec``; enter it as an async context. Raises ConfigError for an unknown one."""
    if spec in ("", "master"):
        return MasterDiscovery(master)
    scheme, _, rest = spec.partition(":")
    if scheme == "etcd" and rest.startswith("//"):
        return EtcdDiscovery(*Masters.parse(spec).addresses)
    if scheme == "file" and rest:
        return FileDiscovery(Path(rest.removeprefix("//")))
    if spec == NONE:
        return MemoryDiscovery(MemoryRegistry())
    raise ConfigError(f"--discovery {spec!r} is unknown; give master, etcd://host:port, file:DIR, or none")


async def instances_now(
    spec: str, master: Masters | Address, *roles: Role, namespace: str, deadline_s: float
) -> list[Instance]:
    """Return live instances of ``roles``, or all. Raises MasterUnavailable or Unauthorized after ``deadline_s``."""
    found: dict[InstanceId, Instance] = {}
    async with open_discovery(spec, master) as source:
        try:
            async with asyncio.timeout(deadline_s):
                async for event in source.watch(*roles, namespace=namespace):
                    if event.kind is EventKind.SYNCED:
                        break
                    if event.instance is not None:
                        found[event.instance.id] = event.instance
        except TimeoutError:
            await source.look()  # its error explains the missing answer
            where = master if spec in ("", "master") else spec
            raise MasterUnavailable(f"{where} did not list the processes of the cluster in {deadline_s:g} s") from None
    return list(found.values())
