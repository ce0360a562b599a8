"""The gRPC methods of inference: the counterparts of the HTTP routes, on the same `Service`.

A call runs in one coroutine. When its client cancels it, hangs up or lets its deadline pass, that coroutine is
cancelled, and the request is aborted at its workers. Protobuf stays in this package.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import unquote

import grpc
import grpc.aio
import structlog

from tanghulu.auth.api_keys import ApiKey, ApiKeysFile, KeyRight
from tanghulu.auth.credentials import AUTHORIZATION, from_metadata
from tanghulu.auth.key_limits import RateLimitExceeded
from tanghulu.conductor.grpc_api.replies import ReplyWriter
from tanghulu.conductor.grpc_api.requests import body_of, num_marks
from tanghulu.conductor.inference.json_marks import MARK_BYTES
from tanghulu.conductor.inference.preprocess import ParsedRequest, parse_chat, parse_completion, tokenise
from tanghulu.conductor.inference.schema import ChatBody, CompletionBody, RoutedBody, TokenizeBody
from tanghulu.conductor.inference.service import Service
from tanghulu.conductor.metrics import ConductorMetrics
from tanghulu.conductor.stories.origin import Origin, Trace, sender_of, trace_of
from tanghulu.errors import DeadlineExceeded, NodeUnavailable, TanghuluError
from tanghulu.protos import inference_pb2 as pb
from tanghulu.protos import inference_pb2_grpc
from tanghulu.rpc import grpc_edge
from tanghulu.rpc.grpc_port import GrpcPort
from tanghulu.runtime.master_options import HttpOptions
from tanghulu.web.errors import log_failure
from tanghulu.web.server import READ_STALL_S, request_id_of

_log = structlog.get_logger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
R = TypeVar("R")

_PATH: Final = "/tanghulu.v1.Inference/"
#: Permission a key needs for a method; None: any key.
RIGHTS: Final = {
    f"{_PATH}Generate": KeyRight.INFERENCE,
    f"{_PATH}Tokenize": KeyRight.INFERENCE,
    f"{_PATH}Abort": KeyRight.INFERENCE,
    f"{_PATH}ListModels": None,
}
_COME_BACK: Final = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
_LONGEST_S: Final = 1e6


@dataclass(eq=False)
class _Caller:
    """The caller, and its names in logs and limits; ``model`` and ``request_id`` are set later."""

    key: ApiKey | None
    sender: str
    x_request_id: str
    trace: Trace
    began_s: float = field(default_factory=time.monotonic)
    model: str = ""
    request_id: str | None = None

    @classmethod
    def of(cls, context: Context, key: ApiKey | None) -> _Caller:
        given = [(name, value) for name, value in context.invocation_metadata() or () if isinstance(value, str)]
        values = dict(given)
        host = unquote(context.peer()).partition(":")[2].rpartition(":")[0].strip("[]")
        return cls(
            key,
            sender_of(values.get(AUTHORIZATION, ""), host),
            request_id_of([value for name, value in given if name == "x-request-id"]),
            trace_of([value for name, value in given if name == "traceparent"]),
        )

    @property
    def state(self) -> dict[str, Any]:
        """Fields that identify a request in logs."""
        return {"request_id": self.request_id, "x_request_id": self.x_request_id}


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """See protos/inference.proto. ``keys``: accepted keys; None admits every caller."""

    #: Seconds after which a client that reads nothing loses its request, as over HTTP.
    stall_s = READ_STALL_S

    def __init__(self, service: Service, metrics: ConductorMetrics, keys: ApiKeysFile | None) -> None:
        self._service, self._metrics, self._keys = service, metrics, keys
        self.stopping = False  # accepts no more requests

    async def Generate(self, message: pb.GenerateRequest, context: Context) -> None:
        """Continue a prompt."""
        await self._answered("Generate", context, lambda caller: self._generate(message, context, caller))

    async def Tokenize(self, message: pb.TokenizeRequest, context: Context) -> pb.TokenizeReply:
        """Convert a text or a chat to token ids."""
        return await self._answered("Tokenize", context, lambda caller: self._tokenize(message, caller))

    async def ListModels(self, message: pb.ListModelsRequest, context: Context) -> pb.ListModelsReply:
        """List the models currently served by workers."""

        async def models(_: _Caller) -> pb.ListModelsReply:
            cards = [model.card for model in self._service.dispatcher.registry.served()]
            return pb.ListModelsReply(
                models=[
                    pb.ServedModelInfo(
                        name=card.model,
                        max_model_len=card.context_length,
                        vocab_size=card.vocab_size,
                        eos_token_ids=card.eos_token_ids,
                    )
                    for card in cards
                ]
            )

        return await self._answered("ListModels", context, models)

    async def Abort(self, message: pb.AbortRequest, context: Context) -> pb.AbortReply:
        """End requests by id, or all of them."""

        async def abort(caller: _Caller) -> pb.AbortReply:
            request_id = None if message.all else message.request_id
            return pb.AbortReply(num_aborted=await self._service.abort(request_id, caller.key))

        return await self._answered("Abort", context, abort)

    # --- implementation of the methods

    async def _generate(self, message: pb.GenerateRequest, context: Context, caller: _Caller) -> None:
        if self.stopping:
            raise NodeUnavailable("the conductor is shutting down; send the request to another one or retry later")
        parsed = await self._parsed(message, context, caller)
        call = self._service.start(message.request_id or uuid.uuid4().hex, parsed)
        caller.request_id = call.id
        writer = ReplyWriter(call, parsed, message.echo)
        try:
            while not call.ended:
                for reply in writer.write(await call.read()):
                    await self._write(context, reply)
        finally:
            call.abort()
            self._service.forget(call)

    async def _parsed(self, message: pb.GenerateRequest, context: Context, caller: _Caller) -> ParsedRequest:
        """Parse ``message`` into sequences; meanwhile it has its place in the room for bodies."""
        service = self._service
        with self._held(message):
            body = await body_of(message)
            assert isinstance(body, RoutedBody)
            remaining_s = context.time_remaining()
            if remaining_s is not None:
                if remaining_s <= 0:
                    raise DeadlineExceeded("the call's deadline has passed; set a longer one")
                body.request_timeout = min(remaining_s, _LONGEST_S)
            origin = Origin(caller.x_request_id, caller.trace, caller.began_s, time.monotonic())
            body.came_from(caller.sender, caller.key, origin)
            model = await service.find_model(body.model)
            caller.model = model.card.model
            if isinstance(body, ChatBody):
                return await parse_chat(body, model, service.parsers)
            assert isinstance(body, CompletionBody)
            return await parse_completion(body, model)

    async def _tokenize(self, message: pb.TokenizeRequest, caller: _Caller) -> pb.TokenizeReply:
        with self._held(message):
            body = await body_of(message)
            assert isinstance(body, TokenizeBody)
            model = await self._service.find_model(body.model)
            caller.model = model.card.model
            (tokens,) = await tokenise(body, model, self._service.parsers)
        return pb.TokenizeReply(tokens=tokens.tolist(), max_model_len=model.card.context_length)

    @contextlib.contextmanager
    def _held(self, message: pb.GenerateRequest | pb.TokenizeRequest) -> Iterator[None]:
        """Reserve room for ``message`` and everything made from it. Raises BodiesFull."""
        service = self._service
        values_bytes = num_marks(message) * MARK_BYTES
        with service.bodies.holding(message.ByteSize()), service.values.holding(values_bytes):
            yield

    async def _write(self, context: Context, reply: pb.GenerateReply) -> None:
        """Send ``reply`` once the client has read enough of the earlier ones. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(self.stall_s):
                await context.write(reply)
        except TimeoutError:
            raise DeadlineExceeded(f"aborted: the client read nothing for {self.stall_s:g} s") from None

    # --- wrapper of each method

    async def _answered(self, name: str, context: Context, work: Callable[[_Caller], Awaitable[R]]) -> R:
        """Return the result of ``work`` for the caller; an error becomes the status of the call. Counted and logged."""
        caller, status = _Caller.of(context, None), grpc.StatusCode.CANCELLED
        try:
            with self._admitted(name, context, caller) as headers:
                own = (("x-request-id", caller.x_request_id), ("traceresponse", caller.trace.header))
                await context.send_initial_metadata((*own, *headers))
                result = await work(caller)
            status = grpc.StatusCode.OK
            return result
        except TanghuluError as raised:
            error = raised
            status = grpc_edge.status_of(error)
        except grpc.aio.BaseError:  # writing to a client that has left
            raise asyncio.CancelledError from None
        except Exception as bug:  # noqa: BLE001 - a bug ends only its own call, and is logged
            _log.error("grpc.bug", method=name, exc_info=bug)
            error = TanghuluError("internal error of the conductor; see the traceback in its log")
            status = grpc.StatusCode.INTERNAL
        finally:
            labels = (name, status.name, caller.model)
            self._metrics.grpc_requests.labels(*labels).inc()
            self._metrics.grpc_seconds.labels(*labels).observe(time.monotonic() - caller.began_s)
        log_failure(error, {"path": _PATH + name, "state": caller.state})
        await grpc_edge.abort(context, error, self._retry_after(error))
        raise AssertionError("a call that is aborted has no result")

    @contextlib.contextmanager
    def _admitted(self, name: str, context: Context, caller: _Caller) -> Iterator[list[tuple[str, str]]]:
        """Count the call against its key while the block runs; yield the limits to send to the client.

        Raises Unauthorized, RateLimitExceeded.
        """
        if self._keys is None:
            yield []
            return
        shown = from_metadata(tuple(context.invocation_metadata() or ()))
        key = caller.key = self._keys.table.authenticate(shown.token)
        if RIGHTS[_PATH + name] is not KeyRight.INFERENCE:
            yield []
            return
        now_s = time.monotonic()
        account = self._service.accounts.of(key, now_s)
        account.begin(now_s)
        try:
            yield [(header.decode(), value.decode()) for header, value in account.headers(now_s)]
        finally:
            account.end()

    def _retry_after(self, error: TanghuluError) -> tuple[tuple[str, str], ...]:
        """Return the metadata with the seconds after which a refused client should retry."""
        if grpc_edge.status_of(error) not in _COME_BACK:
            return ()
        if isinstance(error, RateLimitExceeded):
            return (("retry-after", str(max(1, round(error.retry_after_s + 0.5)))),)
        return (("retry-after", str(self._service.retry_after_s())),)


#: Longest message in bytes: the default limit of gRPC clients; a million token ids.
MESSAGE_BYTES: Final = 4 << 20
_REFUSING_S: Final = 0.2


class InferencePort(GrpcPort):
    """The port of ``servicer``."""

    def __init__(
        self, service: Service, metrics: ConductorMetrics, options: HttpOptions, keys: ApiKeysFile | None
    ) -> None:
        self.servicer = InferenceServicer(service, metrics, keys)
        add = partial(inference_pb2_grpc.add_InferenceServicer_to_server, self.servicer)
        super().__init__(options, add, keys, RIGHTS, message_bytes=MESSAGE_BYTES)

    async def stop(self, grace_s: float) -> None:
        """Stop accepting calls, and give calls in progress ``grace_s`` to finish. No error if it is not listening.

        When gRPC's server stops, it ends calls received but not started with CANCELLED, which clients do not retry: so
        calls are first refused with UNAVAILABLE for a moment, while clients learn of the shutdown.
        """
        if self.address.port and not self.servicer.stopping:
            self.servicer.stopping = True
            await asyncio.sleep(_REFUSING_S)
        await super().stop(grace_s)
