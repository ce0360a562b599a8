"""The Discovery of a process, as named by its option ``--discovery``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

from tanghulu.discovery.base import DEFAULT_TTL_S, Discovery, EventKind, Instance, InstanceEvent, Registration
from tanghulu.discovery.etcd import EtcdDiscovery
from tanghulu.discovery.file import FileDiscovery
from tanghulu.discovery.master import MasterDiscovery
from tanghulu.errors import ConfigError, MasterUnavailable
from tanghulu.masters import Masters
from tanghulu.types import Address, InstanceId, Role

HELP = "where instances find each other: master (the default), etcd://host:port[,host:port], or file:DIR"

#: The Discovery of a process without others.
NONE = "none"


class _NoRegistration:
    """The registration of an instance that nobody looks for."""

    async def update(self, instance: Instance) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


class NoDiscovery:
    """The Discovery of a process without others: it registers nowhere, and finds nobody."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def look(self) -> None:
        """Return at once."""

    async def require_role(self, instance: Instance) -> None:
        """Do nothing."""

    async def register(self, instance: Instance, ttl_s: float = DEFAULT_TTL_S) -> Registration:
        """Register ``instance`` nowhere."""
        return _NoRegistration()

    async def watch(self, *roles: Role, namespace: str = "default") -> AsyncIterator[InstanceEvent]:
        """Yield SYNCED alone."""
        yield InstanceEvent(EventKind.SYNCED)
        await asyncio.Event().wait()


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
        return NoDiscovery()
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
