"""The gRPC edge of a worker: the model card, and calls of administration. Sessions come by the fast lane."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc.aio
import structlog

from tanghulu.errors import TanghuluError
from tanghulu.protos import common_pb2, session_pb2, session_pb2_grpc
from tanghulu.rpc import grpc_edge

_log = structlog.get_logger(__name__)
_MAX_PROBE_S = 300.0


class WorkerServicer(session_pb2_grpc.WorkerServicer):
    """Serves the calls of ``Worker``.

    ``drop_cached`` gives how many blocks were forgotten, ``probe`` takes a deadline and gives the seconds to a token,
    both raise typed errors; ``end`` has the process end in order.
    """

    def __init__(
        self,
        card: session_pb2.ModelCard,
        drop_cached: Callable[[], Awaitable[int]],
        probe: Callable[[float], Awaitable[float]],
        end: Callable[[], common_pb2.EndReply],
    ) -> None:
        self._card = card
        self._drop_cached = drop_cached
        self._probe = probe
        self._end = end

    async def Describe(self, request: session_pb2.DescribeRequest, context: object) -> session_pb2.ModelCard:
        return self._card

    async def DropCache(
        self, request: session_pb2.DropCacheRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> session_pb2.DropCacheReply:
        try:
            return session_pb2.DropCacheReply(num_blocks=await self._drop_cached())
        except TanghuluError as error:
            await grpc_edge.abort(context, error)
            raise

    async def Drain(
        self, request: common_pb2.EndRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> common_pb2.EndReply:
        _log.info("worker.told_to_end")
        return self._end()

    async def Probe(
        self, request: session_pb2.ProbeRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> session_pb2.ProbeReply:
        """Send a request of one token through the engine and say how long it took."""
        try:
            return session_pb2.ProbeReply(seconds=await self._probe(min(request.deadline_s, _MAX_PROBE_S)))
        except TanghuluError as error:
            await grpc_edge.abort(context, error)
            raise
