"""The gateway's client: the asyncio one, and listings in pages that go on behind a key."""

from __future__ import annotations

from tanghulu.store.client.aio import AsyncClient
from tanghulu.store.client.logic import context, messages
from tanghulu.store.client.logic.effects import Logic
from tanghulu.store.client.model import KeyInfo
from tanghulu.store.protocol.types import validate_key

#: Keys that are asked for, or removed, in one call.
KEYS_PER_PAGE = 8192


class GatewayClient(AsyncClient):
    """A client of the store for one token."""

    async def key_page(self, prefix: str, after: str, limit: int = KEYS_PER_PAGE) -> tuple[list[KeyInfo], bool]:
        """Up to ``limit`` keys with ``prefix``, in order behind the key ``after``; whether there are more."""
        if after:
            validate_key(after)
        return await self._run(_key_page(prefix, after, limit), self._deadline(None))


def _key_page(prefix: str, after: str, limit: int) -> Logic[tuple[list[KeyInfo], bool]]:
    reply = yield from context.ask_master(messages.list_keys(prefix, after, limit))
    return messages.key_page(reply)
