"""The routing service over gRPC. Protobuf stays in this file."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from typing import Any, TypeAlias

import grpc.aio

from tanghulu.auth.api_keys import ApiKeysFile, KeyRight
from tanghulu.auth.credentials import from_metadata
from tanghulu.conductor.routing_service import types
from tanghulu.conductor.routing_service.generate import WORKER_HEADER, Generator
from tanghulu.conductor.routing_service.service import ANYBODY, RoutingClient, RoutingQuery, RoutingService
from tanghulu.errors import InvalidRequest, TanghuluError
from tanghulu.protos import router_pb2 as pb
from tanghulu.protos import router_pb2_grpc
from tanghulu.rpc import grpc_edge
from tanghulu.runtime.clock import Clock
from tanghulu.session.load import WorkerLoad
from tanghulu.types import InstanceId

#: Permission a key needs for a method; methods that report on or describe workers need admin.
RIGHTS = {
    f"/tanghulu.v1.Router/{name}": KeyRight.INFERENCE
    for name in ("BestWorker", "AddRequest", "PrefillCompleted", "Free", "Overlaps", "PotentialLoads", "Generate")
}

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Method = Callable[[Any, Any, Context], Awaitable[Any]]


def _typed(method: Callable[[Any, Any, RoutingClient], Any]) -> Method:
    """Wrap ``method`` as a servicer's, with its caller: typed errors become statuses."""

    @functools.wraps(method)
    async def call(self: Any, message: Any, context: Context) -> Any:
        try:
            return method(self, message, self.caller(context))
        except TanghuluError as error:
            await grpc_edge.abort(context, error)

    return call


class RouterServicer(router_pb2_grpc.RouterServicer):
    """See protos/router.proto. ``keys`` are those of the server's ``GrpcKeyAuthorizer``, if it has one."""

    def __init__(
        self,
        service: RoutingService,
        hasher: types.Hasher,
        clock: Clock,
        generator: Generator,
        keys: ApiKeysFile | None = None,
    ) -> None:
        self._service, self._hasher, self._clock, self._generator = service, hasher, clock, generator
        self._keys = keys

    def caller(self, context: Context) -> RoutingClient:
        """Return the caller by the presented key. Raises Unauthorized if the key was revoked meanwhile."""
        if self._keys is None:
            return ANYBODY
        shown = from_metadata(tuple(context.invocation_metadata() or ()))
        return RoutingClient.of(self._keys.table.authenticate(shown.token))

    @_typed
    def PutWorker(self, message: pb.RouterWorker, caller: RoutingClient) -> pb.RouterDone:
        role, place = types.role_of(message.role), types.place_of(message.place)
        self._service.put_worker(InstanceId(message.worker), role, place, message.url)
        return pb.RouterDone()

    @_typed
    def RemoveWorker(self, message: pb.RouterWorkerName, caller: RoutingClient) -> pb.RouterDone:
        self._service.remove_worker(InstanceId(message.worker))
        return pb.RouterDone()

    @_typed
    def ReportLoad(self, message: pb.RouterLoad, caller: RoutingClient) -> pb.RouterDone:
        load = WorkerLoad(
            message.num_running,
            message.num_waiting,
            message.blocks_total,
            message.blocks_free,
            message.prefill_tokens_waiting,
            message.prefill_tokens_per_s,
            message.decode_step_s,
            message.store_bytes_per_s,
        )
        self._service.report(InstanceId(message.worker), load)
        return pb.RouterDone()

    @_typed
    def PublishEvents(self, message: pb.RouterEvents, caller: RoutingClient) -> pb.RouterDone:
        self._service.kv_event(InstanceId(message.worker), types.change_of(message))
        return pb.RouterDone()

    @_typed
    def BestWorker(self, message: pb.RouterQuestion, caller: RoutingClient) -> pb.RouterBest:
        """Choose the workers for a request; with request_id it is added there."""
        best = self._service.best(
            self._query(message, caller), self._clock.now_s(), message.request_id, message.explain, caller
        )
        candidates = [
            pb.RouterCandidate(worker=c.worker, phase=c.phase, score=c.score, terms=dict(c.terms))
            for c in best.candidates
        ]
        return pb.RouterBest(
            prefill_worker=best.prefill,
            decode_worker=best.decode,
            overlap_blocks=best.overlap_blocks,
            candidates=candidates,
        )

    @_typed
    def AddRequest(self, message: pb.RouterAddRequest, caller: RoutingClient) -> pb.RouterDone:
        """Add a request that a gateway has already routed."""
        if not message.question.request_id:
            raise InvalidRequest("AddRequest needs a request_id")
        prefill, decode = message.prefill_worker, message.decode_worker or message.prefill_worker
        query, now_s = self._query(message.question, caller), self._clock.now_s()
        self._service.add_request(
            message.question.request_id, query, InstanceId(prefill), InstanceId(decode), now_s, caller
        )
        return pb.RouterDone()

    @_typed
    def PrefillCompleted(self, message: pb.RouterRequestName, caller: RoutingClient) -> pb.RouterDone:
        self._service.prefill_completed(message.request_id, self._clock.now_s(), caller)
        return pb.RouterDone()

    @_typed
    def Free(self, message: pb.RouterRequestName, caller: RoutingClient) -> pb.RouterDone:
        self._service.free(message.request_id, caller)
        return pb.RouterDone()

    @_typed
    def Overlaps(self, message: pb.RouterQuestion, caller: RoutingClient) -> pb.RouterOverlaps:
        """Return the number of leading blocks each worker has or is computing."""
        found = self._service.overlaps(self._query(message, caller).hashes, self._clock.now_s())
        return pb.RouterOverlaps(overlaps=[pb.RouterOverlap(worker=w, num_blocks=n) for w, n in found.items()])

    @_typed
    def PotentialLoads(self, message: pb.RouterQuestion, caller: RoutingClient) -> pb.RouterPotentialLoads:
        """Return the load each worker would have with the request."""
        loads = self._service.potential_loads(self._query(message, caller), self._clock.now_s())
        return pb.RouterPotentialLoads(loads=[pb.RouterPotentialLoad(**asdict(load)) for load in loads])

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
        for event in list(self._service.dump_events()):
            yield pb.RouterEvents(worker=event.holder, stored=list(event.blocks))

    def _query(self, question: pb.RouterQuestion, caller: RoutingClient) -> RoutingQuery:
        return types.query_of(self._hasher, question, caller)
