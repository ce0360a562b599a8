"""What requests over gRPC hold of the node's memory: the message of a call is received only when there is room for it.

gRPC tells nobody how large a message is before it has all of it. So each message that is coming counts as the largest
one that is taken, until it is there; from then on it counts as what it is, until its call is over. Calls that find no
room wait in order, and gRPC's flow control keeps their messages with those who send them. For this every request is
read as if it were a stream of one message: on the wire there is no difference.

Example: room for four messages. Four callers send 60 MiB each and the fifth waits. The first of the four is there with
1 KiB: the fifth is received beside the three others and that 1 KiB.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from typing import Any, Final

import grpc
import grpc.aio

from tanghulu.errors import DeadlineExceeded, InvalidRequest, Overloaded
from tanghulu.rpc.grpc_edge import MESSAGE_BYTES, abort

#: Messages of all calls under way, those that are coming counted as the largest.
MAX_REQUEST_BYTES: Final = 256 << 20
#: How long a call may wait for room, and then how long its message may take to come.
REQUEST_S: Final = 30.0


class RequestRoom:
    """The room that calls' messages have, and who waits for it. Pure.

    ``enter``, then ``came``, then ``leave``; the last two return the calls whose turn has come by it.
    """

    def __init__(self, most_bytes: int = MAX_REQUEST_BYTES, message_bytes: int = MESSAGE_BYTES) -> None:
        assert message_bytes <= most_bytes, "one message has room at least"
        self._most_bytes, self._message_bytes = most_bytes, message_bytes
        self._held: dict[Hashable, int] = {}
        self._held_bytes = 0
        self._waiting: OrderedDict[Hashable, None] = OrderedDict()

    @property
    def num_held(self) -> int:
        """Calls that have room."""
        return len(self._held)

    @property
    def num_waiting(self) -> int:
        """Calls that wait for it."""
        return len(self._waiting)

    def enter(self, call: Hashable) -> bool:
        """Whether the call's message may come now; else it waits for its turn."""
        if not self._waiting and self._held_bytes + self._message_bytes <= self._most_bytes:
            self._hold(call, self._message_bytes)
            return True
        self._waiting[call] = None
        return False

    def came(self, call: Hashable, num_bytes: int) -> list[Hashable]:
        """The message is there, and so large."""
        self._hold(call, num_bytes)
        return self._next()

    def leave(self, call: Hashable) -> list[Hashable]:
        """The call is over, whether or not its turn had come."""
        self._waiting.pop(call, None)
        self._held_bytes -= self._held.pop(call, 0)
        return self._next()

    def _hold(self, call: Hashable, num_bytes: int) -> None:
        self._held_bytes += num_bytes - self._held.get(call, 0)
        self._held[call] = num_bytes

    def _next(self) -> list[Hashable]:
        served: list[Hashable] = []
        while self._waiting and self._held_bytes + self._message_bytes <= self._most_bytes:
            call, _ = self._waiting.popitem(last=False)
            self._hold(call, self._message_bytes)
            served.append(call)
        return served

    def check(self) -> None:
        """Assert that the sum is the sum, that it is bounded, and that nobody waits beside room."""
        assert self._held_bytes == sum(self._held.values())
        assert self._held_bytes <= self._most_bytes
        assert not self._waiting.keys() & self._held.keys()
        assert not self._waiting or self._held_bytes + self._message_bytes > self._most_bytes


class GrpcRequests(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc's own types are not strict
    """Receives the requests of all unary calls as ``RequestRoom`` has it; the first interceptor of its server."""

    def __init__(self, most_bytes: int = MAX_REQUEST_BYTES, request_s: float = REQUEST_S) -> None:
        self._request_s = request_s
        self._room = RequestRoom(most_bytes)
        self._turns: dict[Hashable, asyncio.Future[None]] = {}

    @property
    def num_held(self) -> int:
        """Calls whose request is coming, or has come."""
        return self._room.num_held

    @property
    def num_waiting(self) -> int:
        """Calls that wait for room."""
        return self._room.num_waiting

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The call's handler, which now receives its request itself."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler

        async def unary(_: Any, context: Any) -> Any:
            return await handler.unary_unary(await self._receive(context), context)

        async def stream(_: Any, context: Any) -> AsyncIterator[Any]:
            async for message in handler.unary_stream(await self._receive(context), context):
                yield message

        codec = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, *codec)
        return grpc.stream_unary_rpc_method_handler(unary, *codec)

    async def _receive(self, context: Any) -> Any:
        """The request, for which there is room until the call is over."""
        call = object()
        context.add_done_callback(lambda _: self._let_in(self._room.leave(call)))
        if not self._room.enter(call):
            await self._wait(call, context)
        try:
            async with asyncio.timeout(self._request_s):
                request = await context.read()
        except TimeoutError:
            await abort(context, DeadlineExceeded(f"the request did not come within {self._request_s:g} s"))
        if request is grpc.aio.EOF:
            await abort(context, InvalidRequest("the call ended without a request"))
        self._let_in(self._room.came(call, request.ByteSize()))
        return request

    async def _wait(self, call: Hashable, context: Any) -> None:
        turn = self._turns[call] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._request_s):
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
