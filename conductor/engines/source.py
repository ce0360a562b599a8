"""The engine servers as instances that come and go: of options, of a file, of names with several addresses.

A small Discovery: every address behind a host name is a server, looked up again every few seconds; the file is read
again when it changes. A lookup that fails, or a file that cannot be read, changes nothing, with one line in the log.

A server's id is its host and port as given while its name has one address; of several, that address keeps it and each
further one is known by its own address and port.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any

import structlog
from msgspec import structs

from tanghulu.auth.cluster_secret import ClusterSecret
from tanghulu.auth.credentials import TlsFiles
from tanghulu.conductor.dispatch.worker_session import AnySession
from tanghulu.conductor.engines.servers import EngineServer, distinct, parse_server, servers_file
from tanghulu.conductor.engines.session import DIALECTS, EngineContext, EngineSession
from tanghulu.discovery.base import WHOLE_REQUESTS, EventKind, Instance, InstanceEvent
from tanghulu.errors import NodeUnavailable
from tanghulu.rpc.sockets import look_up
from tanghulu.runtime.telemetry import RareLog
from tanghulu.types import Address, InstanceId, Place, Role

_log = structlog.get_logger(__name__)
#: Seconds between two looks at the file, and between two lookups of names.
FILE_S, LOOKUP_S = 1.0, 5.0


class EngineSource:
    """Follows the servers of ``given`` and of the file ``path``; ``servers`` are the current ones by instance.

    ``look`` returns the addresses of a host; those known stay where it raises NodeUnavailable.
    """

    def __init__(
        self,
        given: Sequence[EngineServer],
        path: Path | None,
        namespace: str,
        place: Place,
        look: Callable[[str], Coroutine[Any, Any, list[str]]] = look_up,
    ) -> None:
        """Read the file. Raises ConfigError."""
        self.servers: dict[InstanceId, EngineServer] = {}
        self._namespace, self._place = namespace, place
        self._look = look
        self._given = distinct(given)
        self._file = servers_file(path, given) if path is not None else None
        self._addresses: dict[EngineServer, dict[str, InstanceId]] = {}
        self._adapters: dict[InstanceId, list[EngineServer]] = {}
        self._apply: Callable[[InstanceEvent], None] = lambda event: None
        self._rare_log = RareLog(_log)

    async def follow(self, apply: Callable[[InstanceEvent], None]) -> None:
        """Pass arrivals and departures to ``apply`` until cancelled."""
        self._apply, looked_s = apply, -LOOKUP_S
        while True:
            now_s = asyncio.get_running_loop().time()
            if (self._file is not None and self._file.refresh()) or now_s - looked_s >= LOOKUP_S:
                looked_s = now_s
                await asyncio.gather(*(self._resolve(server) for server in self._listed))
                self._publish()
            await asyncio.sleep(FILE_S)

    @property
    def _listed(self) -> list[EngineServer]:
        return self._given if self._file is None else self._file.table

    def set_adapters(self, of: EngineServer, names: Collection[str]) -> None:
        """Have the LoRA adapters ``names`` of a server appear as servers of their own."""
        made = [structs.replace(of, adapter=name, id=InstanceId(f"{of.id}/{name}")) for name in names]
        if of.id in self.servers and self._adapters.get(of.id, []) != made:
            self._adapters[of.id] = made
            self._publish()

    async def _resolve(self, server: EngineServer) -> None:
        where, known = server.host_port, self._addresses.setdefault(server, {})
        try:
            ips = sorted(await self._look(where.host))
        except NodeUnavailable as error:
            self._rare_log.warning("engines.lookup_failed", host=where.host, error=error.message)
            return
        if where.host == "localhost":  # one server, whichever of its addresses it listens on
            ips = ips[:1] if "127.0.0.1" not in ips else ["127.0.0.1"]
        for gone in [ip for ip in known if ip not in ips]:
            del known[gone]
        for ip in ips:
            if ip not in known:
                taken = str(where) in known.values()
                known[ip] = InstanceId(str(Address(ip, where.port)) if taken else str(where))

    def _publish(self) -> None:
        listed = set(self._listed)
        self._addresses = {server: ips for server, ips in self._addresses.items() if server in listed}
        now: dict[InstanceId, EngineServer] = {}
        for server, ips in self._addresses.items():
            for ip, name in ips.items():
                now[name] = server.at(Address(ip, server.host_port.port), name)
        self._adapters = {name: made for name, made in self._adapters.items() if name in now}
        for made in self._adapters.values():
            now.update((each.id, each) for each in made)
        before, self.servers = self.servers, now
        for name, server in before.items():
            if now.get(name) != server:
                self._apply(InstanceEvent(EventKind.DELETE, self._instance(server)))
        for name, server in now.items():
            if before.get(name) != server:
                self._apply(InstanceEvent(EventKind.PUT, self._instance(server)))

    def _instance(self, server: EngineServer) -> Instance:
        whole = {WHOLE_REQUESTS: "yes"} if server.instance_role is Role.BOTH else {}
        return Instance(
            id=server.id,
            role=server.instance_role,
            address=server.address,
            namespace=self._namespace,
            place=self._place,
            attributes={**whole, "engine": server.engine, "url": server.url},
        )


class Engines:
    """Engine servers as workers. Only servers named by this conductor's own options are opened as such."""

    def __init__(
        self,
        given: Sequence[str],
        path: Path | None,
        namespace: str,
        place: Place,
        secret: ClusterSecret,
        tls: TlsFiles,
    ) -> None:
        """Parse the options. Raises ConfigError."""
        self.source = EngineSource([parse_server(text) for text in given], path, namespace, place)
        self._context = EngineContext(secret, tls, self.source.set_adapters)

    def open(self, instance: Instance) -> AnySession | None:
        """Return a session with the server that is ``instance``; None for a worker of ours."""
        server = self.source.servers.get(instance.id)
        if server is None:
            return None
        return EngineSession(server, DIALECTS[server.engine], self._context)
