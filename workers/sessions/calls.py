"""A worker's calls beside its sessions: its card, and administration."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from tanghulu.rpc.fast_server import FastService, Peer
from tanghulu.rpc.methods import END, EndReply, EndRequest
from tanghulu.session.messages import (
    DESCRIBE,
    DROP_CACHE,
    PROBE,
    DescribeRequest,
    DropCacheReply,
    DropCacheRequest,
    ProbeReply,
    ProbeRequest,
)
from tanghulu.session.model_card import ModelCard

_log = structlog.get_logger(__name__)
_MAX_PROBE_S = 300.0


class WorkerCalls:
    """Answers the calls.

    ``drop_cached`` returns the number of forgotten blocks, ``probe`` takes a deadline and returns the seconds to a
    token; both raise typed errors; ``end`` ends the process in order.
    """

    def __init__(
        self,
        card: ModelCard,
        drop_cached: Callable[[], Awaitable[int]],
        probe: Callable[[float], Awaitable[float]],
        end: Callable[[], EndReply],
    ) -> None:
        self._card = card
        self._drop_cached = drop_cached
        self._probe = probe
        self._end = end

    def serve(self, service: FastService) -> None:
        """Answer the calls arriving at ``service``."""
        service.register(DESCRIBE, self._describe)
        service.register(DROP_CACHE, self._drop)
        service.register(PROBE, self._probe_engine)
        service.register(END, self._end_process)

    def _describe(self, peer: Peer, request: DescribeRequest, _: memoryview) -> ModelCard:
        return self._card

    async def _drop(self, peer: Peer, request: DropCacheRequest, _: memoryview) -> DropCacheReply:
        return DropCacheReply(await self._drop_cached())

    async def _probe_engine(self, peer: Peer, request: ProbeRequest, _: memoryview) -> ProbeReply:
        return ProbeReply(await self._probe(min(request.deadline_s, _MAX_PROBE_S)))

    def _end_process(self, peer: Peer, request: EndRequest, _: memoryview) -> EndReply:
        _log.info("worker.end_requested")
        return self._end()
