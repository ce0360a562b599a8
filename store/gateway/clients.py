"""The gateway's connections to the store: a client for each token, opened when it is first shown.

Whoever asks is somebody at the store itself, by his own token: the gateway knows no tokens and no rights. A token is
shown to the master again every second while it is used, so one that is revoked ends here as soon as there; what the
client has mapped of a node's memory would go on answering otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import structlog

from tanghulu.auth.credentials import Credentials
from tanghulu.errors import TanghuluError, Unauthorized
from tanghulu.masters import Masters
from tanghulu.store.client.settings import Settings
from tanghulu.store.gateway.client import GatewayClient
from tanghulu.store.gateway.client_book import ClientBook

_log = structlog.get_logger(__name__)
_VERIFY_S = 1.0
_VERIFY_DEADLINE_S = 1.0
_SWEEP_S = 5.0


class Clients:
    """Clients by credentials. Belongs to one event loop."""

    def __init__(self, masters: Masters, deadline_s: float, max_clients: int, idle_s: float) -> None:
        self.masters = masters
        self._deadline_s = deadline_s
        self._book: ClientBook[Credentials, GatewayClient] = ClientBook(max_clients, idle_s, _VERIFY_S)
        self._opening: dict[Credentials, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def of(self, credentials: Credentials) -> AsyncIterator[GatewayClient]:
        """The client that acts for ``credentials``, kept open inside the block.

        Raises Unauthorized for a token that the store does not know (any more), MasterUnavailable, Overloaded.
        """
        client = await self._taken(credentials)
        try:
            await self.verify(credentials, client)
            yield client
        finally:
            self._close(self._book.give_back(credentials, client, time.monotonic()))

    async def verify(self, credentials: Credentials, client: GatewayClient) -> None:
        """Raise Unauthorized if the token does not stand any more, as far as a master that answers knows."""
        if not self._book.is_due(credentials, client, time.monotonic()):
            return
        try:
            await client.nodes(deadline_s=min(_VERIFY_DEADLINE_S, self._deadline_s))
        except Unauthorized:
            self._close(self._book.drop(credentials, client))
            raise
        except TanghuluError as error:  # reads of what is known where go on without a master
            _log.debug("gateway.not_verified", error=error.message)

    async def _taken(self, credentials: Credentials) -> GatewayClient:
        """A client in use. The first who needs it has it opened while others wait; only who is let in has a place."""
        while True:
            client = self._book.take(credentials, time.monotonic())
            if client is not None:
                return client
            opening = self._opening.get(credentials)
            if opening is None:
                opening = self._opening[credentials] = asyncio.create_task(self._open(credentials))
                opening.add_done_callback(lambda task: self._opened(credentials, task))
            await asyncio.shield(opening)  # who hangs up meanwhile does not end it for the others

    def _opened(self, credentials: Credentials, opening: asyncio.Task[None]) -> None:
        del self._opening[credentials]
        if not opening.cancelled():
            opening.exception()  # those who wait for it raise it; there may be none left

    async def _open(self, credentials: Credentials) -> None:
        client = GatewayClient(Settings(master=self.masters.showing(credentials), deadline_s=self._deadline_s))
        try:
            await client.nodes()
            self._close(self._book.enter(credentials, client, time.monotonic()))
        except (TanghuluError, asyncio.CancelledError):
            self._close([client])
            raise

    def _close(self, clients: list[GatewayClient]) -> None:
        for client in clients:
            task = asyncio.create_task(client.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def sweep(self) -> None:
        """Close what is idle, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            self._close(self._book.expire(time.monotonic()))

    async def close(self) -> None:
        """Close every client."""
        for opening in list(self._opening.values()):
            opening.cancel()
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        self._close(self._book.clear())
        await asyncio.gather(*self._closing)

    def __len__(self) -> int:
        return len(self._book)

    def check(self) -> None:
        """See ClientBook.check."""
        self._book.check()
