"""The engine servers of one conductor: their source, and the sessions with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tanghulu.auth.cluster_secret import ClusterSecret
from tanghulu.auth.credentials import TlsFiles
from tanghulu.conductor.dispatch.worker_session import Session
from tanghulu.conductor.engines.servers import parse_server
from tanghulu.conductor.engines.session import DIALECTS, EngineContext, EngineSession
from tanghulu.conductor.engines.source import EngineSource
from tanghulu.discovery.base import Instance
from tanghulu.types import Place


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

    def open(self, instance: Instance) -> Session | None:
        """Return a session with the server that is ``instance``; None for a worker of ours."""
        server = self.source.servers.get(instance.id)
        if server is None:
            return None
        return EngineSession(server, DIALECTS[server.engine], self._context)
