"""The routing service over gRPC. Protobuf stays in this file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import grpc.aio

from tanghulu.auth.api_keys import ApiKeysFile, KeyRight
from tanghulu.auth.credentials import from_metadata
from tanghulu.conductor.routing_service.api import RouterApi
from tanghulu.conductor.routing_service.generate import WORKER_HEADER, Generator
from tanghulu.conductor.routing_service.service import ANYBODY, Best, PotentialLoad, RoutingClient
from tanghulu.errors import TanghuluError
from tanghulu.protos import router_pb2 as pb
from tanghulu.protos import router_pb2_grpc
from tanghulu.rpc import grpc_edge

#: Permission a key needs for a method; methods that report on or describe workers need admin.
RIGHTS = {
    f"/tanghulu.v1.Router/{name}": KeyRight.INFERENCE
    for name in ("BestWorker", "AddRequest", "PrefillCompleted", "Free", "Overlaps", "PotentialLoads", "Generate")
}

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Method = Callable[[Any, Any, Context], Awaitable[Any]]


def _unary(method: Callable[[RouterApi, Any, RoutingClient], Any], reply: Callable[[Any], Any] | None = None) -> Method:
    """Return the servicer's method that calls ``method`` for the caller, and makes a message of its result."""

    async def call(self: RouterServicer, message: Any, context: Context) -> Any:
        try:
            result = method(self.api, message, self.caller(context))
        except TanghuluError as error:
            await grpc_edge.abort(context, error)
        return pb.RouterDone() if reply is None else reply(result)

    return call


def _best(best: Best) -> pb.RouterBest:
    candidates = [
        pb.RouterCandidate(worker=c.worker, phase=c.phase, score=c.score, terms=dict(c.terms)) for c in best.candidates
    ]
    return pb.RouterBest(
        prefill_worker=best.prefill,
        decode_worker=best.decode,
        overlap_blocks=best.overlap_blocks,
        candidates=candidates,
    )


def _overlaps(found: Mapping[str, int]) -> pb.RouterOverlaps:
    return pb.RouterOverlaps(overlaps=[pb.RouterOverlap(worker=w, num_blocks=n) for w, n in found.items()])


def _loads(loads: Sequence[PotentialLoad]) -> pb.RouterPotentialLoads:
    return pb.RouterPotentialLoads(loads=[pb.RouterPotentialLoad(**asdict(load)) for load in loads])


def _add_request(api: RouterApi, message: pb.RouterAddRequest, caller: RoutingClient) -> None:
    question = message.question
    question.prefill_worker, question.decode_worker = message.prefill_worker, message.decode_worker
    api.add_request(question, caller)


def caller_of(keys: ApiKeysFile | None, context: Context) -> RoutingClient:
    """Return the caller by the presented key of ``keys``. Raises Unauthorized if the key was revoked meanwhile."""
    if keys is None:
        return ANYBODY
    shown = from_metadata(tuple(context.invocation_metadata() or ()))
    return RoutingClient.of(keys.table.authenticate(shown.token))


class RouterServicer(router_pb2_grpc.RouterServicer):
    """See protos/router.proto. ``keys`` are those of the server's ``GrpcKeyAuthorizer``, if it has one."""

    def __init__(self, api: RouterApi, generator: Generator, keys: ApiKeysFile | None = None) -> None:
        self.api, self._generator, self._keys = api, generator, keys

    def caller(self, context: Context) -> RoutingClient:
        return caller_of(self._keys, context)

    PutWorker = _unary(RouterApi.put_worker)
    RemoveWorker = _unary(RouterApi.remove_worker)
    ReportLoad = _unary(RouterApi.report_load)
    PublishEvents = _unary(RouterApi.publish_events)
    BestWorker = _unary(RouterApi.best_worker, _best)
    AddRequest = _unary(_add_request)
    PrefillCompleted = _unary(RouterApi.prefill_completed)
    Free = _unary(RouterApi.free)
    Overlaps = _unary(RouterApi.overlaps, _overlaps)
    PotentialLoads = _unary(RouterApi.potential_loads, _loads)

    async def Generate(self, message: pb.RouterGenerate, context: Context) -> AsyncIterator[pb.RouterPiece]:
        """Send the request to the best worker; stream its answer."""
        begun = None
        try:
            begun = await self._generator.generate(message.body, self.caller(context))
            yield pb.RouterPiece(status=begun.status, worker=begun.headers[WORKER_HEADER])
            async for piece in begun.pieces:
                yield pb.RouterPiece(data=piece)
        except TanghuluError as error:
            await grpc_edge.abort(context, error)
        finally:
            if begun is not None:
                begun.end()

    async def DumpEvents(self, message: pb.RouterDumpRequest, context: Context) -> AsyncIterator[pb.RouterEvents]:
        """Stream events that turn an empty index into this one, as of now."""
        for event in list(self.api.service.dump_events()):
            yield pb.RouterEvents(worker=event.holder, stored=list(event.blocks))
