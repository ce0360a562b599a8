"""Callers that want a proof of this master's lease, and the renewal that all of them wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class ProofWaiters:
    """Waits of callers until etcd has confirmed a renewal that was asked for behind their call; one serves all.

    ``num_asked`` and ``num_confirmed`` count the renewals of the lease; ``renew`` asks for one.
    """

    def __init__(
        self, renew: Callable[[], None], num_asked: Callable[[], int], num_confirmed: Callable[[], int]
    ) -> None:
        self._renew = renew
        self._num_asked = num_asked
        self._num_confirmed = num_confirmed
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []  # for a renewal behind that number
        self._is_renewing = False

    async def wait(self) -> int:
        """Wait for the proof, or until the lease is over; how many renewals were asked for before."""
        number, proven = self._num_asked(), asyncio.get_running_loop().create_future()
        self._waiting.append((number, proven))
        if not self._is_renewing:
            self._is_renewing = True
            self._renew()
        await proven
        return number

    def settle(self, holds: bool) -> None:
        """Let those go on whose renewal has been confirmed, all if the lease is over; ask for another for the rest."""
        self._is_renewing = False
        waiting, self._waiting = self._waiting, []
        for number, proven in waiting:
            if proven.done():
                continue
            if self._num_confirmed() > number or not holds:
                proven.set_result(None)
            else:
                self._waiting.append((number, proven))
        if self._waiting:
            self._is_renewing = True
            self._renew()

    def __repr__(self) -> str:
        return f"ProofWaiters({len(self._waiting)})"
