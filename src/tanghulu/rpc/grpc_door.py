"""The door of a gRPC server: how many calls each caller has under way, and what their requests hold of memory.

gRPC tells nobody how large a message is before it has all of it. So each message that is coming counts as the largest
one that is taken, until it is there; from then on it counts as what it is, until its call is over. Calls that find no
room wait, callers take turns, and gRPC's flow control keeps their messages with those who send them. For this every
request is read as if it were a stream of one message: on the wire there is no difference. A tenant has at most half of
the room, and operators have a room of their own: no one holds up the others by calls whose message does not come.

Example: room for four messages. Four callers send 60 MiB each and the fifth waits. The first of the four is there with
1 KiB: the fifth is received beside the three others and that 1 KiB.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import aclosing
from inspect import isasyncgen
from types import MappingProxyType
from typing import Any, Final, Protocol

import grpc
import grpc.aio

from tanghulu.auth.places import ANYBODY, Caller, Places
from tanghulu.errors import DeadlineExceeded, InvalidRequest, Overloaded, TanghuluError
from tanghulu.rpc.grpc_edge import MESSAGE_BYTES, SERVER_OPTIONS, abort

#: Messages of all calls under way, those that are coming counted as the largest; of operators, and of all others.
MAX_REQUEST_BYTES: Final = 256 << 20
#: How long a call may wait for room, and then how long its message may take to come: less, so that turns come in time.
WAIT_S: Final = 30.0
REQUEST_S: Final = 20.0
#: Calls of a tenant at one time, and those of them that answer until they are ended.
CALLS_SHARE: Final = 256
STREAMS_SHARE: Final = 16


class RequestRoom:
    """The room that calls' messages have, and the calls that wait for it. Pure.

    ``enter``, then ``came``, then ``leave``; the last two return the calls whose turn has come by it. Callers with a
    share have at most half of the room.
    """

    def __init__(self, most_bytes: int = MAX_REQUEST_BYTES, message_bytes: int = MESSAGE_BYTES) -> None:
        assert message_bytes <= most_bytes, "one message has room at least"
        self._most_bytes, self._message_bytes = most_bytes, message_bytes
        self._share_bytes = max(message_bytes, most_bytes // 2)
        self._held: dict[Hashable, tuple[Caller, int]] = {}
        self._held_bytes = 0
        self._bytes_of: Counter[Caller] = Counter()
        #: By caller, the one whose turn is next first.
        self._waiting: OrderedDict[Caller, OrderedDict[Hashable, None]] = OrderedDict()

    @property
    def num_held(self) -> int:
        """Calls that have room."""
        return len(self._held)

    @property
    def num_waiting(self) -> int:
        """Calls that wait for it."""
        return sum(map(len, self._waiting.values()))

    def enter(self, call: Hashable, caller: Caller = ANYBODY) -> bool:
        """Whether the call's message may come now; else it waits for its turn."""
        if caller not in self._waiting and self._next_caller() is None and self._may_come(caller):
            self._hold(call, caller, self._message_bytes)
            return True
        self._waiting.setdefault(caller, OrderedDict())[call] = None
        return False

    def came(self, call: Hashable, num_bytes: int) -> list[Hashable]:
        """The message is there, and so large."""
        caller = self._let_go(call)
        if caller is not None:
            self._hold(call, caller, num_bytes)
        return self._next()

    def leave(self, call: Hashable) -> list[Hashable]:
        """The call is over, whether or not its turn had come."""
        self._let_go(call)
        for caller, calls in self._waiting.items():
            if call in calls:
                self._remove(caller, call)
                break
        return self._next()

    def _may_come(self, caller: Caller) -> bool:
        if caller.has_share and self._bytes_of[caller] + self._message_bytes > self._share_bytes:
            return False
        return self._held_bytes + self._message_bytes <= self._most_bytes

    def _hold(self, call: Hashable, caller: Caller, num_bytes: int) -> None:
        self._held[call] = caller, num_bytes
        self._held_bytes += num_bytes
        self._bytes_of[caller] += num_bytes

    def _let_go(self, call: Hashable) -> Caller | None:
        caller, num_bytes = self._held.pop(call, (None, 0))
        if caller is not None:
            self._held_bytes -= num_bytes
            self._bytes_of[caller] -= num_bytes
            if not self._bytes_of[caller]:
                del self._bytes_of[caller]
        return caller

    def _remove(self, caller: Caller, call: Hashable) -> None:
        calls = self._waiting[caller]
        del calls[call]
        if not calls:
            del self._waiting[caller]

    def _next_caller(self) -> Caller | None:
        return next((caller for caller in self._waiting if self._may_come(caller)), None)

    def _next(self) -> list[Hashable]:
        served: list[Hashable] = []
        while (caller := self._next_caller()) is not None:
            self._waiting.move_to_end(caller)
            call = next(iter(self._waiting[caller]))
            self._remove(caller, call)
            self._hold(call, caller, self._message_bytes)
            served.append(call)
        return served

    def check(self) -> None:
        """Assert that the sums are the sums, that they are bounded, and that nobody waits beside room."""
        of_callers: Counter[Caller] = Counter()
        for caller, num_bytes in self._held.values():
            of_callers[caller] += num_bytes
        assert self._bytes_of == of_callers
        assert self._held_bytes == of_callers.total() <= self._most_bytes
        assert all(n <= self._share_bytes for caller, n in of_callers.items() if caller.has_share)
        assert all(calls and not calls.keys() & self._held.keys() for calls in self._waiting.values())
        assert self._next_caller() is None


class CallAuthorizer(Protocol):
    """Lets calls through, as an interceptor, and names their callers."""

    def caller(self, metadata: Sequence[tuple[str, str | bytes]]) -> Caller:
        """The caller of a call with ``metadata``. Raises Unauthorized."""
        ...


class GrpcDoor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc's own types are not strict
    """Counts calls and receives their requests; the first interceptor of its server, in front of ``authorizer``.

    ``on_call`` is called with the caller and the address of its connection, and may raise Overloaded. ``streams_share``
    None: streams are as many as calls.
    """

    def __init__(
        self,
        max_calls: int,
        authorizer: CallAuthorizer | None = None,
        *,
        message_bytes: int = MESSAGE_BYTES,
        most_bytes: int = MAX_REQUEST_BYTES,
        streams_share: int | None = None,
        on_call: Callable[[str, Caller], None] = lambda peer, caller: None,
        request_s: float = REQUEST_S,
        wait_s: float = WAIT_S,
    ) -> None:
        self._max_calls, self._authorizer, self._on_call = max_calls, authorizer, on_call
        self._request_s, self._wait_s = request_s, wait_s
        self._calls = Places("calls", CALLS_SHARE)
        self._streams = Places("streams", CALLS_SHARE if streams_share is None else streams_share)
        self._rooms = {is_operator: RequestRoom(most_bytes, message_bytes) for is_operator in (True, False)}
        self._turns: dict[Hashable, asyncio.Future[None]] = {}

    @property
    def num_held(self) -> int:
        """Calls whose request is coming, or has come."""
        return sum(room.num_held for room in self._rooms.values())

    @property
    def num_waiting(self) -> int:
        """Calls that wait for room."""
        return sum(room.num_waiting for room in self._rooms.values())

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The call's handler, which now receives its request itself. What the authorizer refuses is left as it is."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        caller = ANYBODY
        if self._authorizer is not None:
            try:
                caller = self._authorizer.caller(tuple(handler_call_details.invocation_metadata or ()))
            except TanghuluError as error:
                return refusal(handler, error)

        async def unary(_: Any, context: Any) -> Any:
            return await handler.unary_unary(await self._receive(context, caller, self._calls), context)

        async def stream(_: Any, context: Any) -> None:
            answers = handler.unary_stream(await self._receive(context, caller, self._calls, self._streams), context)
            if not isasyncgen(answers):
                await answers  # it writes by itself
                return
            async with aclosing(answers):
                async for message in answers:
                    await context.write(message)

        codec = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, *codec)
        return grpc.stream_unary_rpc_method_handler(unary, *codec)

    async def _receive(self, context: Any, caller: Caller, *places: Places) -> Any:
        """The request, for which there are a place and room until the call is over."""
        try:
            self._on_call(context.peer(), caller)
            for each in places:
                each.take(caller, self._max_calls)
                context.add_done_callback(lambda _, each=each: each.give_back(caller))
        except Overloaded as error:
            await abort(context, error)
        call, room = object(), self._rooms[caller.is_operator]
        context.add_done_callback(lambda _: self._let_in(room.leave(call)))
        if not room.enter(call, caller):
            await self._wait(call, context)
        try:
            async with asyncio.timeout(self._request_s):
                request = await context.read()
        except TimeoutError:
            await abort(context, DeadlineExceeded(f"the request did not come within {self._request_s:g} s"))
        if request is grpc.aio.EOF:
            await abort(context, InvalidRequest("the call ended without a request"))
        self._let_in(room.came(call, request.ByteSize()))
        return request

    async def _wait(self, call: Hashable, context: Any) -> None:
        turn = self._turns[call] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except TimeoutError:
            await abort(context, Overloaded("other requests over gRPC take all room that there is; try again"))
        finally:
            self._turns.pop(call, None)

    def _let_in(self, calls: list[Hashable]) -> None:
        for call in calls:
            turn = self._turns.get(call)
            if turn is not None and not turn.done():
                turn.set_result(None)


def guarded_server(
    max_calls: int,
    authorizer: CallAuthorizer | None,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    message_bytes: int = MESSAGE_BYTES,
    streams_share: int | None = None,
    on_call: Callable[[str, Caller], None] = lambda peer, caller: None,
) -> grpc.aio.Server:
    """A gRPC server behind a door, with ``options`` beside those that every server has."""
    door = GrpcDoor(max_calls, authorizer, message_bytes=message_bytes, streams_share=streams_share, on_call=on_call)
    return grpc.aio.server(
        options=list((dict(SERVER_OPTIONS) | dict(options)).items()),
        interceptors=[door] if authorizer is None else [door, authorizer],
        maximum_concurrent_rpcs=2 * max_calls,  # twice: what is refused is a call, too, for a moment
    )


def refusal(handler: grpc.RpcMethodHandler[Any, Any], error: TanghuluError) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler in place of ``handler`` that answers ``error``, without receiving a message."""

    async def unary(request: Any, context: Any) -> Any:
        await abort(context, error)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        await abort(context, error)
        yield

    # As streams, whatever the call is: then its message is not received before it is refused.
    if handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(stream)
    return grpc.stream_unary_rpc_method_handler(unary)
