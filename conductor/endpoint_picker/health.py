"""gRPC's health checking protocol (grpc.health.v1), for gateways and Kubernetes.

Services: ``liveness`` is serving as long as the process; "" , ``readiness`` and the name of the picker's own service
while requests can be picked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import grpc.aio

from tanghulu.protos import endpoint_picker_pb2 as pb

SERVICE: Final = "grpc.health.v1.Health"
METHODS: Final = ("Check", "Watch")
_Status = pb.HealthCheckResponse


class Health:
    """Serves the status of ``service`` and of the process; ``set`` changes it."""

    def __init__(self, service: str) -> None:
        self._ready_names = ("", "readiness", service)
        self._is_ready = False
        self._changed = asyncio.Event()

    def set(self, is_ready: bool) -> None:
        """Change the status of all but ``liveness``."""
        if is_ready != self._is_ready:
            self._is_ready = is_ready
            self._changed.set()
            self._changed = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service under its name."""
        codec = pb.HealthCheckRequest.FromString, pb.HealthCheckResponse.SerializeToString
        handlers = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, *codec),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, *codec),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def _status(self, service: str) -> pb.HealthCheckResponse:
        if service == "liveness":
            return _Status(status=_Status.SERVING)
        if service not in self._ready_names:
            return _Status(status=_Status.SERVICE_UNKNOWN)
        return _Status(status=_Status.SERVING if self._is_ready else _Status.NOT_SERVING)

    async def _check(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        status = self._status(request.service)
        if status.status == _Status.SERVICE_UNKNOWN:
            known = ", ".join(filter(None, (*self._ready_names, "liveness")))
            await context.abort(grpc.StatusCode.NOT_FOUND, f"service {request.service!r:.100} is unknown; use {known}")
        return status

    async def _watch(self, request: pb.HealthCheckRequest, _: Any) -> AsyncIterator[pb.HealthCheckResponse]:
        while True:
            changed = self._changed
            yield self._status(request.service)
            await changed.wait()
