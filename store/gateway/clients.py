"""The gateway's connections to the store: a client for each token, opened when the token is first presented.

The store itself authenticates each caller by the caller's own token: the gateway knows no tokens and no rights. A token
is presented to the master again every second while it is used, so a revoked one ends here as soon as there; otherwise
the client's mapped memory of nodes would continue to answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from tanghulu.auth.credentials import Credentials
from tanghulu.errors import Overloaded, TanghuluError, Unauthorized
from tanghulu.masters import Masters
from tanghulu.store.client.aio import AsyncClient
from tanghulu.store.client.logic import query
from tanghulu.store.client.model import KeyInfo, NodeView
from tanghulu.store.client.settings import Settings
from tanghulu.store.protocol.types import validate_key

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_log = structlog.get_logger(__name__)
#: Keys requested, or removed, in one call.
KEYS_PER_PAGE = 8192
#: Interval at which a token in use is presented to the master.
VERIFY_S = 1.0
_VERIFY_DEADLINE_S = 1.0
_SWEEP_S = 5.0


class GatewayClient(AsyncClient):
    """A client of the store for one token."""

    async def key_page(self, prefix: str, after: str, limit: int = KEYS_PER_PAGE) -> tuple[list[KeyInfo], bool]:
        """Return up to ``limit`` keys with ``prefix``, in order behind ``after``, and whether there are more."""
        if after:
            validate_key(after)
        return await self._perform(None, query.key_page, prefix, after, limit)

    async def nodes_now(self, deadline_s: float) -> list[NodeView]:
        """Return all store nodes from a master that answers now, without waiting for an absent one."""
        return await self._perform(deadline_s, query.nodes, waits=False)


@dataclass(slots=True)
class _Entry(Generic[V]):
    value: V
    used_s: float
    verified_s: float
    num_uses: int = 0
    dropped: bool = False


class ClientCache(Generic[K, V]):
    """The clients to keep: one for each token, evicting the least recently used. Pure.

    An entry in use is never closed. A method that makes values superfluous returns those to close.

    Example with two places: A and B are entered and given back, C is entered: A is evicted. If A and B were in use, C
    would be refused, since waiting for a place is the caller's business.
    """

    def __init__(self, max_entries: int, idle_s: float, verify_s: float) -> None:
        self._max_entries = max_entries
        self._idle_s = idle_s
        self._verify_s = verify_s
        self._entries: OrderedDict[K, _Entry[V]] = OrderedDict()  # least recently used first
        self._leaving: dict[int, _Entry[V]] = {}  # dropped, and still in use

    def take(self, key: K, now_s: float) -> V | None:
        """Return the value of ``key``, in use from now on; None if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        entry.used_s = now_s
        entry.num_uses += 1
        return entry.value

    def enter(self, key: K, value: V, now_s: float) -> list[V]:
        """Add ``value``, not in use, just verified. Raises Overloaded if all places are in use."""
        assert key not in self._entries
        closing: list[V] = []
        if len(self._entries) >= self._max_entries:
            oldest = next((key for key, entry in self._entries.items() if not entry.num_uses), None)
            if oldest is None:
                raise Overloaded(f"{self._max_entries} tokens are in use at this gateway, its limit; retry in a moment")
            closing.append(self._entries.pop(oldest).value)
        self._entries[key] = _Entry(value, now_s, now_s)
        return closing

    def give_back(self, key: K, value: V, now_s: float) -> list[V]:
        """Record that a user of ``value`` is done with it."""
        entry = self._leaving.get(id(value)) or self._entries[key]
        assert entry.value is value
        entry.num_uses -= 1
        entry.used_s = now_s
        if entry.dropped and not entry.num_uses:
            del self._leaving[id(value)]
            return [value]
        return []

    def drop(self, key: K, value: V) -> list[V]:
        """Withdraw ``value`` from further use; it is to be closed when its last user gives it back."""
        entry = self._entries.get(key)
        if entry is None or entry.value is not value:
            return []
        del self._entries[key]
        if not entry.num_uses:
            return [value]
        entry.dropped = True
        self._leaving[id(value)] = entry
        return []

    def is_due(self, key: K, value: V, now_s: float) -> bool:
        """Return whether to verify the key again now; counts as done, so that only one caller does it.

        That applies to a dropped value, too, while it is used: the key may no longer be valid.
        """
        entry = self._leaving.get(id(value)) or self._entries.get(key)
        if entry is None or entry.value is not value or now_s - entry.verified_s < self._verify_s:
            return False
        entry.verified_s = now_s
        return True

    def expire(self, now_s: float) -> list[V]:
        """Remove and return values unused for a while."""
        gone = [k for k, e in self._entries.items() if not e.num_uses and now_s - e.used_s >= self._idle_s]
        return [self._entries.pop(key).value for key in gone]

    def clear(self) -> list[V]:
        """Remove and return all values, in use or not."""
        every = [entry.value for entry in (*self._entries.values(), *self._leaving.values())]
        self._entries.clear()
        self._leaving.clear()
        return every

    def __len__(self) -> int:
        return len(self._entries)

    def check(self) -> None:
        """Assert the bound, and that leaving values are in use and in one place only."""
        assert len(self._entries) <= self._max_entries
        assert all(entry.num_uses >= 0 and not entry.dropped for entry in self._entries.values())
        assert all(entry.num_uses > 0 and entry.dropped for entry in self._leaving.values())
        assert not {id(entry.value) for entry in self._entries.values()} & set(self._leaving)

    def __repr__(self) -> str:
        return f"ClientCache({len(self._entries)} of {self._max_entries}, {len(self._leaving)} leaving)"


class Clients:
    """Clients by credentials. Belongs to one event loop."""

    def __init__(self, masters: Masters, deadline_s: float, max_clients: int, idle_s: float) -> None:
        self.masters = masters
        self._deadline_s = deadline_s
        self._cache: ClientCache[Credentials, GatewayClient] = ClientCache(max_clients, idle_s, VERIFY_S)
        self._opening: dict[Credentials, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def of(self, credentials: Credentials) -> AsyncIterator[GatewayClient]:
        """Yield the client that acts for ``credentials``, kept open inside the block.

        Raises Unauthorized for a token that the store does not accept (any more), MasterUnavailable, Overloaded.
        """
        client = await self._taken(credentials)
        try:
            await self.verify(credentials, client)
            yield client
        finally:
            self._close(self._cache.give_back(credentials, client, time.monotonic()))

    async def verify(self, credentials: Credentials, client: GatewayClient) -> None:
        """Raise Unauthorized if the token is no longer valid, according to a master that answers."""
        if not self._cache.is_due(credentials, client, time.monotonic()):
            return
        try:
            await client.nodes_now(min(_VERIFY_DEADLINE_S, self._deadline_s))
        except Unauthorized:
            self._close(self._cache.drop(credentials, client))
            raise
        except TanghuluError as error:  # reads of known keys continue without a master
            _log.debug("gateway.not_verified", error=error.message)

    async def _taken(self, credentials: Credentials) -> GatewayClient:
        """Take a client into use. The first caller has it opened, others wait; only an accepted client is kept."""
        while True:
            client = self._cache.take(credentials, time.monotonic())
            if client is not None:
                return client
            opening = self._opening.get(credentials)
            if opening is None:
                opening = self._opening[credentials] = asyncio.create_task(self._open(credentials))
                opening.add_done_callback(lambda task: self._opened(credentials, task))
            await asyncio.shield(opening)  # a client that disconnects meanwhile does not end it for the others

    def _opened(self, credentials: Credentials, opening: asyncio.Task[None]) -> None:
        del self._opening[credentials]
        if not opening.cancelled():
            opening.exception()  # waiters raise it; there may be none left

    async def _open(self, credentials: Credentials) -> None:
        client = GatewayClient(Settings(master=self.masters.showing(credentials), deadline_s=self._deadline_s))
        try:
            await client._meet()
            self._close(self._cache.enter(credentials, client, time.monotonic()))
        except (TanghuluError, asyncio.CancelledError):
            self._close([client])
            raise

    def _close(self, clients: list[GatewayClient]) -> None:
        for client in clients:
            task = asyncio.create_task(client.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def sweep(self) -> None:
        """Close idle clients, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            self._close(self._cache.expire(time.monotonic()))

    async def aclose(self) -> None:
        """Close every client."""
        for opening in list(self._opening.values()):
            opening.cancel()
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        self._close(self._cache.clear())
        await asyncio.gather(*self._closing)

    def __len__(self) -> int:
        return len(self._cache)

    def check(self) -> None:
        """See ClientCache.check."""
        self._cache.check()
