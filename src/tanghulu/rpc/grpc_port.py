"""A gRPC port of a process, beside its HTTP port: the same certificates, keys and bound on connections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import grpc.aio
import structlog

from tanghulu.auth.api_keys import ApiKeysFile, KeyRight
from tanghulu.rpc.grpc_edge import MESSAGE_BYTES, CallAuthorizer, GrpcKeyAuthorizer, guarded_server, listen
from tanghulu.runtime.master_options import ServerOptions
from tanghulu.types import Address

_log = structlog.get_logger(__name__)
#: Connections beyond it are closed, to leave descriptors for other ports.
_MOST_CONNECTIONS: Final = "grpc.max_allowed_incoming_connections"
#: Interval of pings to a client with calls in progress; one whose host died is silent.
_PING_MS: Final = 10_000


class GrpcPort:
    """A port with the certificates and bounds of ``options``; ``add_servicer`` registers the methods at a server.

    With ``keys`` each call needs one, with the right that ``rights`` gives for its method; without them, ``authorizer``
    admits callers. ``flag`` sets the port.
    """

    def __init__(
        self,
        options: ServerOptions,
        add_servicer: Callable[[grpc.aio.Server], None],
        keys: ApiKeysFile | None = None,
        rights: Mapping[str, KeyRight | None] | None = None,
        *,
        authorizer: CallAuthorizer | None = None,
        max_calls: int | None = None,
        message_bytes: int = MESSAGE_BYTES,
        flag: str = "--grpc-port",
    ) -> None:
        self.address = Address("", 0)
        self._add_servicer = add_servicer
        self._options, self._max_calls = options, max_calls or options.max_connections
        self._authorizer = authorizer if keys is None else GrpcKeyAuthorizer(keys, rights or {})
        self._message_bytes, self._flag = message_bytes, flag
        self._server: grpc.aio.Server | None = None

    async def start(self, where: Address, *, reuse_port: bool = False) -> None:
        """Serve at ``where`` (port 0 picks one). Raises ConfigError if the port is taken."""
        options = {
            "grpc.max_receive_message_length": self._message_bytes,
            "grpc.so_reuseport": int(reuse_port),
            _MOST_CONNECTIONS: self._options.max_connections,
            "grpc.keepalive_time_ms": _PING_MS,
            "grpc.keepalive_timeout_ms": 2 * _PING_MS,
        }
        server = guarded_server(self._max_calls, self._authorizer, options, message_bytes=self._message_bytes)
        self._add_servicer(server)
        tls = self._options.tls if self._options.tls.cert else None
        self.address = listen(server, where, tls, mutual=self._options.tls_mutual, flag=self._flag)
        await server.start()
        self._server = server
        _log.info("grpc.listening", address=str(self.address))

    async def stop(self, grace_s: float) -> None:
        """Accept no more calls, and let current ones continue for ``grace_s``. No error if it does not serve."""
        if self._server is not None:
            await self._server.stop(grace_s)
