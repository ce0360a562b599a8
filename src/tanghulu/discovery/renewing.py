"""The common part of registrations that a task of their process renews: they differ in where they write."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any, Self

from tanghulu.discovery.base import Instance
from tanghulu.runtime.tasks import cancelled


class RenewedRegistration(ABC):
    """A registration until it is closed; one of ``registrations``, those of its Discovery."""

    def __init__(self, registrations: set[Any], instance: Instance, ttl_s: float) -> None:
        self._registrations, self._instance, self._ttl_s = registrations, instance, ttl_s
        self._lock = asyncio.Lock()  # of writes
        self._renewing: asyncio.Task[None] | None = None

    async def open(self) -> Self:
        """Register for the first time. Raises MasterUnavailable."""
        await self._enter()
        self._renewing = asyncio.create_task(self._renew_forever())
        self._registrations.add(self)
        return self

    async def close(self) -> None:
        """Unregister now; if that cannot be written, the lease expires by itself."""
        if self._renewing is None:
            return
        renewing, self._renewing = self._renewing, None
        await cancelled(renewing)
        self._registrations.discard(self)
        await self._leave()

    @abstractmethod
    async def _enter(self) -> None:
        """Write the instance."""

    @abstractmethod
    async def _renew_forever(self) -> None:
        """Renew the lease, until cancelled."""

    @abstractmethod
    async def _leave(self) -> None:
        """Remove the instance."""
