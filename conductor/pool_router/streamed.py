"""An answer of a conductor on its way to the client: status, headers and bytes as they come.

When the client hangs up the connection to the conductor is closed, so that the conductor aborts the request. When the
conductor breaks off, a stream of events ends with an error event, and any other answer stays short of its length.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tanghulu.conductor.http.reply import DONE, dumps, event, hung_up
from tanghulu.conductor.pool_router.members import Member
from tanghulu.conductor.pool_router.relaying import answer_headers, reason
from tanghulu.errors import NodeUnavailable
from tanghulu.runtime.tasks import cancelled
from tanghulu.web.errors import body_of

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PoolAnswer:
    """An answer that has begun, and the conductor that gives it.

    ``pieces``: its bytes as they come, which may raise httpx.HTTPError. ``content``: all of it, where it was read
    already. ``more``: headers to add.
    """

    pool: str
    member: Member
    response: httpx.Response
    pieces: AsyncIterator[bytes]
    content: bytes | None = None
    more: Mapping[str, str] = field(default_factory=dict)


class Streamed(Response):
    """Waits for ``answering`` and passes the answer on; calls ``end`` when that is over, also after a failure.

    A typed error of ``answering`` is raised, to be answered as any other.
    """

    def __init__(
        self, answering: Coroutine[Any, Any, PoolAnswer], end: Callable[[PoolAnswer], Awaitable[None]]
    ) -> None:
        super().__init__()
        self._answering, self._end = answering, end
        self._answer: PoolAnswer | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(hung_up(receive))
        work = asyncio.create_task(self._work(send))
        try:
            await asyncio.wait({watch, work}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancelled(watch, work)
            if self._answer is not None:
                await self._end(self._answer)
        if not work.cancelled():
            work.result()

    async def _work(self, send: Send) -> None:
        answer = self._answer = await self._answering
        headers = {**answer_headers(answer.response), **answer.more}
        head = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()]
        await send({"type": "http.response.start", "status": answer.response.status_code, "headers": head})
        if answer.content is None:
            await self._pump(answer, send)
        await send({"type": "http.response.body", "body": answer.content or b"", "more_body": False})

    async def _pump(self, answer: PoolAnswer, send: Send) -> None:
        try:
            async for piece in answer.pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except httpx.HTTPError as error:
            _log.warning("pool.answer_broke", url=answer.member.url, error=reason(error))
            if answer.response.headers.get("content-type", "").startswith("text/event-stream"):
                await send({"type": "http.response.body", "body": _error_event(answer), "more_body": True})


def _error_event(answer: PoolAnswer) -> bytes:
    error = NodeUnavailable(f"the conductor of pool {answer.pool} broke off its answer")
    return event(dumps(body_of(error))) + DONE
