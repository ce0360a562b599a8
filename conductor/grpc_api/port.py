"""The port of inference over gRPC: who may connect to it and how, and its orderly end."""

from __future__ import annotations

import asyncio
from typing import Final

import grpc.aio
import structlog

from tanghulu.auth.api_keys import ApiKeysFile
from tanghulu.conductor.grpc_api.servicer import RIGHTS, InferenceServicer
from tanghulu.conductor.inference.service import Service
from tanghulu.conductor.metrics import ConductorMetrics
from tanghulu.protos import inference_pb2_grpc
from tanghulu.rpc.grpc_edge import KEYS, MOST_CONNECTIONS, GrpcKeyAuthorizer, guarded_server, listen
from tanghulu.runtime.master_options import HttpOptions
from tanghulu.types import Address

_log = structlog.get_logger(__name__)

#: The longest message: what gRPC's clients send at most, unless they are told otherwise; a million token ids.
MESSAGE_BYTES: Final = 4 << 20
_REFUSING_S: Final = 0.2


class InferencePort:
    """A gRPC server beside the HTTP port, with the same keys and certificates."""

    def __init__(
        self, service: Service, metrics: ConductorMetrics, options: HttpOptions, keys: ApiKeysFile | None
    ) -> None:
        self.servicer = InferenceServicer(service, metrics, keys)
        self.address = Address("", 0)
        self._options, self._keys = options, keys
        self._server: grpc.aio.Server | None = None

    async def start(self, where: Address, *, reuse_port: bool) -> None:
        """Listen at ``where``, whose port may be 0. Raises ConfigError if it is taken."""
        options = {
            "grpc.max_receive_message_length": MESSAGE_BYTES,
            "grpc.so_reuseport": int(reuse_port),
            MOST_CONNECTIONS: self._options.max_connections,
        }
        authorizer = None if self._keys is None else GrpcKeyAuthorizer(self._keys, RIGHTS)
        server = guarded_server(
            self._options.max_connections, authorizer, options, message_bytes=MESSAGE_BYTES, shares=KEYS
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(self.servicer, server)
        tls = self._options.tls if self._options.tls.cert else None
        self.address = listen(server, where, tls, mutual=self._options.tls_mutual, flag="--grpc-port")
        await server.start()
        self._server = server
        _log.info("grpc.listening", address=str(self.address))

    async def stop(self, grace_s: float) -> None:
        """Accept no more calls, and let those under way go on for ``grace_s``. No error if it does not listen.

        gRPC's server tells a call that it has received and not begun when it ends CANCELLED, which nobody sends again:
        so for a moment calls are refused with UNAVAILABLE first, while clients hear that this one ends.
        """
        if self._server is None:
            return
        if not self.servicer.stopping:
            self.servicer.stopping = True
            await asyncio.sleep(_REFUSING_S)
        await self._server.stop(grace_s)
