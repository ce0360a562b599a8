"""Who is let through to a process's methods, by the fast lane and by gRPC, where it was started with ``--tokens``.

An authorizer stands between the wire and the handlers: it learns from HELLO (or from a gRPC call's metadata) who asks,
looks up the rule of the method, refuses what the token does not allow, and puts the tenant's scope in front of the keys
of requests and takes it away from those of answers. Handlers know nothing of it, and a process without ``--tokens`` has
none, so it costs nothing there. A method without a rule is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from types import CoroutineType
from typing import Any

import grpc
import grpc.aio
import structlog

from tanghulu.auth.api_keys import ApiKey, ApiKeysFile, KeyRight
from tanghulu.auth.credentials import Credentials, from_metadata
from tanghulu.auth.places import Caller
from tanghulu.auth.tenants import Identity
from tanghulu.auth.tokens import Tokens, TokensFile
from tanghulu.errors import Forbidden, InvalidRequest, TanghuluError, Unauthorized
from tanghulu.rpc.fast_server import AnswerStream, FastService, Handler, Peer
from tanghulu.rpc.grpc_edge import abort, refusal
from tanghulu.rpc.methods import HELLO, Method, Rule

_log = structlog.get_logger(__name__)
REFRESH_S = 1.0
#: Who makes the gRPC call under way, for handlers whose answer depends on it; None where there are no tokens.
CALLER: ContextVar[Identity | None] = ContextVar("caller", default=None)


class Authorizer:
    """Authorises the fast lane's calls: ``authorize`` a service with all its methods registered; ``watch`` revokes."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def authorize(self, service: FastService) -> None:
        """Have every method of ``service`` ask this object first."""
        service.guarded = True
        for number, served in list(service.served.items()):
            method, handler = served.method, served.handler
            authorized = self._greeting(handler) if number == HELLO.number else _authorized(method, handler)
            service.served[number] = served._replace(handler=authorized)
            make = service.sinks.get(number)
            if make is not None:
                service.sinks[number] = _authorized(method, make)

    def _greeting(self, handler: Handler) -> Handler:
        def hello(peer: Peer, request: Any, attachment: memoryview) -> Any:
            if peer.identity is not None:
                raise InvalidRequest("HELLO comes once, in the first frame")
            peer.identity = self._tokens.authenticate(Credentials(request.tenant, request.token))
            return handler(peer, request, attachment)

        return hello

    async def watch(self, service: FastService) -> None:
        """Follow the tokens file, and hang up on peers whose token was revoked or has expired; until cancelled."""
        while True:
            await asyncio.sleep(REFRESH_S)
            await asyncio.to_thread(self._tokens.refresh)  # a disk that is busy takes its time
            now_unix_s = time.time()
            for peer in list(service.peers):
                identity = peer.identity
                if identity is not None and not self._tokens.table.still_stands(identity, now_unix_s):
                    _log.warning("authorizer.revoked", peer=peer.name, token=identity.token_name)
                    peer.hang_up()


def _authorized(method: Method[Any, Any], handler: Callable[[Peer, Any, Any], Any]) -> Callable[[Peer, Any, Any], Any]:
    """Authorize and scope each call of ``handler``, which may also be what makes a payload sink."""
    rule = method.rule

    def authorized(peer: Peer, request: Any, payload: Any) -> Any:
        identity = peer.identity
        if identity is None:
            raise Unauthorized("a token is needed here, in a HELLO that comes first; say token=..., --token")
        if rule is None:
            raise Forbidden(f"method {method.name} is open to nobody while this process has --tokens")
        answer = handler(peer, rule.admit(identity, request), payload)
        if isinstance(answer, AnswerStream):
            answer.view = partial(rule.answer, identity)
            return answer
        return _later(rule, identity, answer) if type(answer) is CoroutineType else rule.answer(identity, answer)

    return authorized


async def _later(rule: Rule, identity: Identity, answer: Coroutine[Any, Any, Any]) -> Any:
    return rule.answer(identity, await answer)


async def follow_tokens(tokens: TokensFile) -> None:
    """Read the file again when it changes, for a process whose only port is gRPC's; until cancelled."""
    while True:
        await asyncio.sleep(REFRESH_S)
        await asyncio.to_thread(tokens.refresh)


class GrpcAuthorizer(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc's own types are not strict
    """gRPC's side: an interceptor; ``rules`` by full method name (``/tanghulu.v1.Directory/Locate``)."""

    def __init__(self, tokens: TokensFile, rules: Mapping[str, Rule | None]) -> None:
        self._tokens = tokens
        self._rules = rules

    def _identity(self, metadata: Sequence[tuple[str, str | bytes]]) -> Identity:
        return self._tokens.authenticate(from_metadata(tuple(metadata)))

    def caller(self, metadata: Sequence[tuple[str, str | bytes]]) -> Caller:
        """Whose places a call takes. Raises Unauthorized."""
        return Caller.of(self._identity(metadata))

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Let the call through as far as its token allows."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        try:
            identity = self._identity(tuple(handler_call_details.invocation_metadata or ()))
            rule = self._rules.get(handler_call_details.method)
            if rule is None or handler.request_streaming:
                raise Forbidden(f"{handler_call_details.method} is open to nobody while this process has --tokens")
            rule.require_right(identity)
        except TanghuluError as error:
            return refusal(handler, error)
        return (
            self._guarded_stream(handler, rule, identity)
            if handler.response_streaming
            else _guarded_unary(handler, rule, identity)
        )

    def _guarded_stream(
        self, handler: grpc.RpcMethodHandler[Any, Any], rule: Rule, identity: Identity
    ) -> grpc.RpcMethodHandler[Any, Any]:
        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                request = rule.admit(identity, request)
            except TanghuluError as error:
                await abort(context, error)
            CALLER.set(identity)
            async for message in handler.unary_stream(request, context):
                if not self._tokens.table.still_stands(identity, time.time()):
                    await abort(context, Unauthorized(f"token {identity.token_name!r} was revoked"))
                yield rule.answer(identity, message)

        return grpc.unary_stream_rpc_method_handler(stream, handler.request_deserializer, handler.response_serializer)


class GrpcKeyAuthorizer(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # as above
    """Lets in callers that show an API key with the right that ``rights`` has for the method, by its full name.

    None there: any key will do. What is not there is for administrators.
    """

    def __init__(self, keys: ApiKeysFile, rights: Mapping[str, KeyRight | None]) -> None:
        self._keys, self._rights = keys, rights

    def _key(self, metadata: Sequence[tuple[str, str | bytes]]) -> ApiKey:
        return self._keys.table.authenticate(from_metadata(tuple(metadata)).token)

    def caller(self, metadata: Sequence[tuple[str, str | bytes]]) -> Caller:
        """Whose places a call takes. Raises Unauthorized."""
        return Caller.of_key(self._key(metadata))

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Let the call through as it is, or refuse it."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None:
            return handler
        try:
            key = self._key(tuple(handler_call_details.invocation_metadata or ()))
            right = self._rights.get(method, KeyRight.ADMIN)
            if right is not None:
                key.require(right, method)
        except TanghuluError as error:
            return refusal(handler, error)
        return handler


def _guarded_unary(
    handler: grpc.RpcMethodHandler[Any, Any], rule: Rule, identity: Identity
) -> grpc.RpcMethodHandler[Any, Any]:
    async def unary(request: Any, context: Any) -> Any:
        try:
            request = rule.admit(identity, request)
        except TanghuluError as error:
            await abort(context, error)
        CALLER.set(identity)
        return rule.answer(identity, await handler.unary_unary(request, context))

    return grpc.unary_unary_rpc_method_handler(unary, handler.request_deserializer, handler.response_serializer)
