"""The endpoint picker over Envoy's external processing: one stream of messages for each request. Protobuf stays here.

The gateway sends the parts of a request, then those of its response, each answered by a message of its own kind:

    request_headers -> (request_body …) -> (request_trailers) -> response_headers -> (response_body …) -> …

The pick is in the answer to request_headers. In the mode FULL_DUPLEX_STREAMED that answer waits for the whole body;
without a body, and in the modes NONE and STREAMED, where Envoy sends the request on before its body is known here, the
load alone decides. In the mode BUFFERED the pick is in the answer to request_body, which Envoy awaits. The load is
freed when the response or the stream ends, whichever is first: a cancelled stream is a client that left.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio
import structlog
from google.protobuf.json_format import MessageToDict
from starlette.requests import ClientDisconnect

from tanghulu.auth.api_keys import ApiKeysFile
from tanghulu.conductor.endpoint_picker.metrics import PickerMetrics
from tanghulu.conductor.endpoint_picker.picker import EndpointPicker, Pick, listed, subset_of
from tanghulu.conductor.endpoint_picker.prompts import PromptReader, Unread
from tanghulu.conductor.routing_service.grpc_api import Context, caller_of
from tanghulu.conductor.routing_service.service import RoutingClient, RoutingQuery
from tanghulu.errors import TanghuluError
from tanghulu.protos import endpoint_picker_pb2 as pb
from tanghulu.rpc import grpc_edge
from tanghulu.runtime.clock import Clock
from tanghulu.web.bodies import Bodies
from tanghulu.web.errors import body_of, status_of

_log = structlog.get_logger(__name__)
SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
#: Header and metadata with the endpoints picked, and metadata with the one that served.
PICKED: Final = "x-gateway-destination-endpoint"
SERVED: Final = "x-gateway-destination-endpoint-served"
#: Headers of conformance tests: endpoints to pick from, and the one that served.
TEST_PICK: Final = "test-epp-endpoint-selection"
TEST_SERVED: Final = "x-conformance-test-served-endpoint"
REASON: Final = "x-tanghulu-request-dropped-reason"
_LB: Final = "envoy.lb"
#: Bytes of a body in one message; Envoy takes less than 64 KiB.
_PIECE_BYTES: Final = 62_000
#: Beginning of Envoy's reason for answering in the place of an endpoint that refused or broke the connection.
_NOT_REACHED: Final = "upstream_reset_before_response_started"


class ExtProc:
    """Serves the streams of gateways. ``keys`` are those of the port, if callers need one.

    With ``test_headers``, a client's header selects the endpoints, and the response names the one that served.
    """

    def __init__(
        self,
        picker: EndpointPicker,
        prompts: PromptReader,
        bodies: Bodies,
        clock: Clock,
        metrics: PickerMetrics,
        *,
        keys: ApiKeysFile | None = None,
        test_headers: bool = False,
    ) -> None:
        self.picker, self.prompts, self.bodies, self.clock, self.metrics = picker, prompts, bodies, clock, metrics
        self.test_headers, self._keys = test_headers, keys

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service under Envoy's name."""
        process = grpc.stream_stream_rpc_method_handler(
            self._process, pb.ProcessingRequest.FromString, pb.ProcessingResponse.SerializeToString
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),))

    async def _process(self, _: Any, context: Context) -> None:
        try:
            exchange = _Exchange(self, context, caller_of(self._keys, context))
        except TanghuluError as error:
            await grpc_edge.abort(context, error)
        try:
            await exchange.run()
        except ClientDisconnect:
            pass  # the gateway ended the stream
        except TanghuluError as error:
            self.metrics.refused.labels(error.code.lower()).inc()
            _log.info("epp.refused", code=error.code, error=error.message)
            await exchange.refuse(error)
        finally:
            exchange.close()


class _Exchange:
    """One request and its response."""

    def __init__(self, service: ExtProc, context: Context, caller: RoutingClient) -> None:
        self._service, self._context, self._caller = service, context, caller
        self._pick: Pick | None = None
        self._modes = pb.ProtocolConfiguration()

    async def run(self) -> None:
        """Answer all messages. Raises ClientDisconnect at the stream's end, and TanghuluError to refuse the request."""
        first = await self._read()
        if first.WhichOneof("request") != "request_headers":
            raise ClientDisconnect  # a filter that does not send requests
        self._modes = modes = first.protocol_config
        headers = _headers(first.request_headers.headers)
        choose = partial(self._choose, headers, first)
        in_pieces = first.HasField("protocol_config") and modes.request_body_mode in (pb.NONE, pb.STREAMED)
        if first.request_headers.end_of_stream or in_pieces:
            await self._write(await choose(b"", True), request_headers=pb.HeadersResponse())
        elif modes.request_body_mode in (pb.BUFFERED, pb.BUFFERED_PARTIAL):
            await self._write(None, request_headers=pb.HeadersResponse())
            await self._buffered(choose)
        else:
            await self._full_duplex(headers, choose)
        await self._response()

    async def refuse(self, error: TanghuluError) -> None:
        """Have the gateway answer with ``error``."""
        code, headers = error.code.lower(), {"retry-after": "1"} if error.retryable else {}
        refusal = pb.ImmediateResponse(
            status=pb.HttpStatus(code=status_of(error)),
            headers=_mutation({"content-type": "application/json", REASON: code, **headers}),
            body=json.dumps(body_of(error)).encode(),
            details=code,
        )
        await self._write(None, immediate_response=refusal)

    def close(self) -> None:
        """Free the request's load."""
        if self._pick is not None:
            self._service.picker.end(self._pick)

    # --- the request

    async def _full_duplex(self, headers: Mapping[str, str], choose: Callable[..., Any]) -> None:
        scope = {"headers": [(b"content-length", headers.get("content-length", "0").encode())]}
        trailers: list[pb.ProcessingRequest] = []
        async with self._service.bodies.reading(scope, partial(self._piece, trailers)) as body:
            data = bytes(body.view())
            body.clear()
            await self._write(await choose(data, True), request_headers=pb.HeadersResponse())
            for piece in _streamed(data, not trailers):
                await self._write(None, request_body=piece)
        if trailers:
            await self._write(None, request_trailers=pb.TrailersResponse())

    async def _piece(self, trailers: list[pb.ProcessingRequest]) -> dict[str, Any]:
        """Return the next piece of the request's body as an ASGI message."""
        message = await self._read()
        match message.WhichOneof("request"):
            case "request_body":
                part = message.request_body
                return {"type": "http.request", "body": part.body, "more_body": not part.end_of_stream}
            case "request_trailers":
                trailers.append(message)
                return {"type": "http.request", "body": b"", "more_body": False}
        return {"type": "http.disconnect"}  # the gateway answers by itself, and goes on without the picker

    async def _buffered(self, choose: Callable[..., Any]) -> None:
        message = await self._read()
        if message.WhichOneof("request") != "request_body":
            raise ClientDisconnect  # as above
        part = message.request_body
        with self._service.bodies.holding(len(part.body)):
            await self._write(await choose(part.body, part.end_of_stream), request_body=pb.BodyResponse())

    async def _choose(
        self, headers: Mapping[str, str], first: pb.ProcessingRequest, body: bytes, is_whole: bool
    ) -> Pick:
        service = self._service
        with service.metrics.pick_seconds.time():
            query, adapter = await self._query(headers, body, is_whole)
            metadata = {name: MessageToDict(each) for name, each in first.metadata_context.filter_metadata.items()}
            subset = subset_of(metadata)
            if service.test_headers and TEST_PICK in headers:
                subset = set(filter(service.picker.knows, listed(headers[TEST_PICK]))) or subset
            self._pick = service.picker.pick(query, service.clock.now_s(), subset, adapter)
        return self._pick

    async def _query(self, headers: Mapping[str, str], body: bytes, is_whole: bool) -> tuple[RoutingQuery, str]:
        try:
            if not body or not is_whole:
                raise Unread("no_body" if not body else "partial")
            return await self._service.prompts.query(headers.get(":path", ""), body, self._caller)
        except Unread as unread:
            self._service.metrics.unread.labels(str(unread)).inc()
            return RoutingQuery((), len(body) // 4, caller=self._caller), ""

    # --- the response

    async def _response(self) -> None:
        """Answer the rest until the response ends."""
        while True:
            message = await self._read()
            match kind := message.WhichOneof("request"):
                case "response_headers":
                    await self._response_headers(message)
                case "response_body":
                    await self._response_body(message.response_body)
                case "response_trailers" | "request_trailers":
                    if kind == "response_trailers":
                        self.close()
                    await self._write(None, **{kind: pb.TrailersResponse()})
                case "request_body" if self._modes.request_body_mode in (pb.STREAMED, pb.BUFFERED, pb.BUFFERED_PARTIAL):
                    # In full duplex all of it was sent; an empty end may follow.
                    await self._write(None, request_body=pb.BodyResponse())

    async def _response_headers(self, message: pb.ProcessingRequest) -> None:
        service, (served, reached) = self._service, _served(message)
        if self._pick is not None:
            service.picker.served(self._pick, served, service.clock.now_s(), reached=reached)
            if served != self._pick.endpoints[0]:
                (service.metrics.moved if served else service.metrics.unreported).inc()
        reply = pb.HeadersResponse()
        if service.test_headers and served:
            reply.response.header_mutation.CopyFrom(_mutation({TEST_SERVED: served}))
        if message.response_headers.end_of_stream:
            self.close()
        await self._write(None, response_headers=reply)

    async def _response_body(self, part: pb.HttpBody) -> None:
        if self._pick is not None and part.body:
            self._service.picker.first_token(self._pick, self._service.clock.now_s())
        if part.end_of_stream:
            self.close()
        is_echoed = self._modes.response_body_mode == pb.FULL_DUPLEX_STREAMED
        for piece in _streamed(part.body, part.end_of_stream) if is_echoed else (pb.BodyResponse(),):
            await self._write(None, response_body=piece)

    # --- messages

    async def _read(self) -> pb.ProcessingRequest:
        message = await self._context.read()
        if message is grpc.aio.EOF:
            raise ClientDisconnect
        assert isinstance(message, pb.ProcessingRequest)
        return message

    async def _write(self, pick: Pick | None, **answer: Any) -> None:
        """Send an answer, with the pick if it is the one that carries it."""
        response = pb.ProcessingResponse(**answer)
        if pick is not None:
            part = getattr(response, next(iter(answer))).response
            part.header_mutation.CopyFrom(_mutation({PICKED: str(pick)}))
            part.clear_route_cache = True
            response.dynamic_metadata.update({_LB: {PICKED: str(pick)}})
        await self._context.write(response)


def _headers(given: pb.HeaderMap) -> dict[str, str]:
    return {each.key: each.raw_value.decode("latin-1") or each.value for each in given.headers}


def _mutation(headers: Mapping[str, str]) -> pb.HeaderMutation:
    """Return a mutation that sets ``headers``, in place of the client's own of the same names."""
    options = [
        pb.HeaderValueOption(
            header=pb.HeaderValue(key=key, raw_value=value.encode()),
            append_action=pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
        )
        for key, value in headers.items()
    ]
    return pb.HeaderMutation(set_headers=options)


def _streamed(data: bytes, ends: bool) -> Iterator[pb.BodyResponse]:
    """Yield ``data`` in pieces as a body of full duplex; ``ends`` tells whether it is the last of the body."""
    for start in range(0, max(len(data), 1), _PIECE_BYTES):
        is_last = ends and start + _PIECE_BYTES >= len(data)
        piece = pb.StreamedBodyResponse(body=data[start : start + _PIECE_BYTES], end_of_stream=is_last)
        yield pb.BodyResponse(response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=piece)))


def _served(message: pb.ProcessingRequest) -> tuple[str, bool]:
    """Return the endpoint that served, "" if unreported, and whether it was reached.

    By the gateway's metadata, else by Envoy's attributes. Envoy reports the last endpoint tried in its own answer, too.
    """
    found, details = message.metadata_context.filter_metadata[_LB].fields[SERVED].string_value, ""
    for attributes in message.attributes.values():
        found = found or attributes.fields["upstream.address"].string_value
        details = details or attributes.fields["response.code_details"].string_value
    return found, not details.startswith(_NOT_REACHED)
