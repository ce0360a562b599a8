"""The connection to one worker: one fast-lane stream, plus calls for its card and commands.

Sending is synchronous and bounded by the bytes the worker has not read yet; messages from the worker are read only
while a listener takes them. A session ends when the connection does, when the worker breaks the protocol, or when it is
closed; it is never repaired, but replaced.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Protocol, TypeVar

from tanghulu.auth.certificate_roles import WORKER
from tanghulu.auth.credentials import NOTHING_TO_SHOW, Credentials
from tanghulu.conductor.dispatch.lifecycle import SubmitTo
from tanghulu.conductor.routing.requests import GenerationRequest
from tanghulu.discovery.base import Instance
from tanghulu.errors import DeadlineExceeded, NodeUnavailable, TanghuluError
from tanghulu.hashing import Tokens
from tanghulu.rpc import greeting
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.fast_client import Reply
from tanghulu.rpc.methods import PROTOCOL_VERSION, Method
from tanghulu.rpc.wire import Body
from tanghulu.session.messages import (
    DESCRIBE,
    DROP_CACHE,
    PROBE,
    SESSION,
    Abort,
    DescribeRequest,
    DropCacheRequest,
    FromWorker,
    ProbeRequest,
    PullAhead,
    ReleaseExport,
    SessionHello,
    SessionWelcome,
    StepOutput,
    Submit,
    ToWorker,
)
from tanghulu.session.model_card import ModelCard
from tanghulu.session.outputs import KvSource, PrefixHolder
from tanghulu.types import Address, RequestId

Q = TypeVar("Q", bound=Body)
A = TypeVar("A", bound=Body)

#: Bytes queued for a worker that does not read. A prompt of 128k tokens is half a megabyte.
MAX_UNSENT_BYTES = 256 << 20
#: Messages kept from a worker until a listener takes them; beyond that, reading pauses.
MAX_UNREAD = 256
CALL_DEADLINE_S = 10.0


class AnySession(Protocol):
    """A session with a worker: of ours (`WorkerSession`), or with another engine's server (`conductor.engines`).

    ``WorkerSession`` describes the calls. ``connect`` follows ``describe``; ``close`` ends it at any stage.
    """

    #: Whether cached tokens are known at a request's end only.
    counts_late: bool

    async def describe(self) -> ModelCard: ...

    async def connect(self) -> SessionWelcome: ...

    def request_snapshot(self) -> None: ...

    def steps(self) -> AsyncGenerator[StepOutput | SessionWelcome, None]: ...

    def submit(
        self, request: GenerationRequest, to: SubmitTo, tokens: Tokens, holder: PrefixHolder | None, moved: bool
    ) -> int: ...

    def pull(self, name: str, tokens: Tokens, salt: bytes, source: KvSource) -> None: ...

    def abort(self, wire_id: str) -> None: ...

    def release(self, export_id: int) -> None: ...

    async def probe(self, deadline_s: float) -> float: ...

    async def drop_cache(self) -> int: ...

    def exactness(self, request: GenerationRequest) -> str: ...

    async def close(self) -> None: ...


#: Opens the session with an instance that is another engine's server; None for workers of ours.
OpenEngine = Callable[[Instance], AnySession | None]


def no_engines(instance: Instance) -> AnySession | None:
    """Return None: all workers are ours."""
    return None


class WorkerSession:
    """One stream to one worker. ``connect`` opens it; iterate ``steps`` until it ends; then ``close``."""

    counts_late = False

    def __init__(self, address: Address, conductor_id: str, credentials: Credentials = NOTHING_TO_SHOW) -> None:
        self.address = address
        self._conductor_id = conductor_id
        self._credentials = credentials.to(address)
        self._num_submits = 0
        self._connection: AsyncFastConnection | None = None
        self._call_id = 0
        self._unread: deque[Reply[FromWorker] | TanghuluError] = deque()
        self._is_paused = False
        self._listener: asyncio.Future[None] | None = None

    async def describe(self) -> ModelCard:
        """Return the card of the worker's model. Raises NodeUnavailable, DeadlineExceeded or Unauthorized."""
        return await self._call(DESCRIBE, DescribeRequest(), CALL_DEADLINE_S)

    async def connect(self) -> SessionWelcome:
        """Open the stream; return the worker's welcome. Raises NodeUnavailable, DeadlineExceeded or Unauthorized."""
        try:
            async with asyncio.timeout(CALL_DEADLINE_S):
                connection = self._connection = await self._open()
                self._call_id = connection.stream(SESSION.number, ToWorker(self._hello()), FromWorker, self._on_message)
                first = await self._next()
        except TimeoutError as error:
            raise DeadlineExceeded(f"worker {self.address} did not welcome the session in time") from error
        if not isinstance(first, SessionWelcome):
            raise NodeUnavailable(f"worker {self.address} began the session without a welcome")
        return first

    async def _open(self) -> AsyncFastConnection:
        connection = await AsyncFastConnection.connect(
            self.address, shortcut=True, tls=self._credentials.tls.to(WORKER)
        )
        try:
            await greeting.show(connection, self._credentials, CALL_DEADLINE_S)
        except BaseException:  # including cancellation; re-raised
            connection.abort()
            raise
        return connection

    async def _call(self, method: Method[Q, A], request: Q, deadline_s: float) -> A:
        """Call on a separate connection: the session's own is not read while its steps are not taken."""
        connection = await self._open()
        try:
            reply = await connection.call(method.number, request, method.reply, deadline_s=deadline_s)
            return reply.message
        finally:
            await connection.close()

    def request_snapshot(self) -> None:
        """Request a snapshot of the worker's cache; it arrives among the steps. Raises Overloaded."""
        self._send(ToWorker(self._hello()))

    async def steps(self) -> AsyncGenerator[StepOutput | SessionWelcome, None]:
        """Yield the worker's steps and requested snapshots; ends with what ended the stream, as NodeUnavailable."""
        while True:
            yield await self._next()

    def _on_message(self, received: Reply[FromWorker] | TanghuluError) -> None:
        """Keep the worker's message, or the reason for the end of its messages, for the listener."""
        self._unread.append(received)
        if self._listener is not None and not self._listener.done():
            self._listener.set_result(None)
        if len(self._unread) >= MAX_UNREAD and not self._is_paused and self._connection is not None:
            self._is_paused = True
            self._connection.pause_reading()

    async def _next(self) -> StepOutput | SessionWelcome:
        """Return the worker's next message. Raises the error that ended the stream."""
        if not self._unread:
            if self._is_paused:
                assert self._connection is not None, "it was paused"
                self._is_paused = False
                self._connection.resume_reading()
            self._listener = asyncio.get_running_loop().create_future()
            await self._listener
        received = self._unread.popleft()
        if isinstance(received, TanghuluError):
            self._unread.append(received)  # the error stays in place
            raise received
        return received.message.message

    def submit(
        self,
        request: GenerationRequest,
        to: SubmitTo,
        tokens: Tokens,
        holder: PrefixHolder | None = None,
        moved: bool = False,
    ) -> int:
        """Send the request with ``tokens`` (prompt and generated so far) as ``to`` specifies. Raises Overloaded.

        A ``moved`` request goes ahead of new ones there.

        Returns the submission's number, which tells from the worker's steps whether their load includes it.
        """
        origin = request.origin
        message = Submit(
            RequestId(to.wire_id),
            _bytes_of(tokens),
            len(request.prompt),
            request.sampling,
            request.stop,
            salt=request.salt,
            hand_over=to.hand_over,
            source=to.source,
            priority=request.priority,
            holder=holder,
            client=request.client,
            moved=moved,
            ahead=to.ahead,
            weight=request.weight,
            scoring=request.scoring,
            traceparent=origin.trace.header if origin is not None else "",
            x_request_id=origin.x_request_id if origin is not None else "",
        )
        self._send(ToWorker(message))
        self._num_submits += 1
        return self._num_submits

    def pull(self, name: str, tokens: Tokens, salt: bytes, source: KvSource) -> None:
        """Have the worker fetch the KV of ``tokens`` as ``name`` while another computes it. Raises Overloaded."""
        self._send(ToWorker(PullAhead(RequestId(name), _bytes_of(tokens), salt, source)))

    def abort(self, wire_id: str) -> None:
        """Have the worker end the request or the pull ``wire_id``. Raises Overloaded."""
        self._send(ToWorker(Abort(RequestId(wire_id))))

    def release(self, export_id: int) -> None:
        """Release an export that will not be fetched. Raises Overloaded."""
        self._send(ToWorker(ReleaseExport(export_id)))

    async def probe(self, deadline_s: float) -> float:
        """Return the engine's seconds for one token. Raises NodeUnavailable, DeadlineExceeded or its own refusal."""
        return (await self._call(PROBE, ProbeRequest(deadline_s), deadline_s + 1)).seconds

    async def drop_cache(self) -> int:
        """Have the worker drop its unreferenced blocks; return their number. Raises NodeUnavailable."""
        return (await self._call(DROP_CACHE, DropCacheRequest(), CALL_DEADLINE_S)).num_blocks

    def exactness(self, request: GenerationRequest) -> str:
        """Return the label of a request that continues here with the tokens of a lost worker."""
        return "by_worker"

    async def close(self) -> None:
        """Close the connection without waiting for unread messages: all requests of the session end with it."""
        if self._connection is not None:
            self._connection.abort()
            await self._connection.close()

    def _hello(self) -> SessionHello:
        return SessionHello(self._conductor_id, PROTOCOL_VERSION)

    def _send(self, message: ToWorker) -> None:
        assert self._connection is not None, "it is connected"
        self._connection.send_on(self._call_id, SESSION.number, message, MAX_UNSENT_BYTES)


def _bytes_of(tokens: Tokens) -> bytes:
    return tokens.astype("<u4", copy=False).tobytes()
