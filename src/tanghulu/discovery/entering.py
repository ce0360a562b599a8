"""The entry of every process into its cluster: it looks for the others, starts, and then registers.

``meet`` is called before slow steps, such as loading a model, so that a wrong address is reported at once. ``enter`` is
called when the process serves. By then the address has proved right: an absent master is being replaced or restarted,
and the process waits for it, with one line in the log at the start of the wait and one at its end.
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from tanghulu.discovery.base import Discovery, Instance, Registration
from tanghulu.errors import MasterUnavailable, NotLeader, TanghuluError
from tanghulu.runtime.clock import Backoff, SystemClock
from tanghulu.runtime.process import Process
from tanghulu.types import Address

_log = structlog.get_logger(__name__)
#: Seconds that a starting process looks for any answer, and, after an answer, for a leading master: several masters
#: elect another when theirs has died.
MEET_S, LEADER_S = 5.0, 120.0
#: Pause between two attempts, initially and at most.
_RETRY_S, _RETRY_MOST_S = 0.1, 0.4


class _Waiting:
    """The pauses of one wait, and its two log lines: at its start and at its end."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._backoff = Backoff(_RETRY_S, _RETRY_MOST_S)
        self._clock = SystemClock()
        self._began_s = self._clock.now_s()
        self._has_logged = False

    @property
    def waited_s(self) -> float:
        return self._clock.now_s() - self._began_s

    async def pause(self, error: TanghuluError) -> None:
        """Wait until the next attempt is due, after one that failed with ``error``."""
        if not self._has_logged:
            _log.warning("discovery.waiting", to=self._what, code=error.code, error=error.message)
        self._has_logged = True
        await asyncio.sleep(self._backoff.pause_s())

    def over(self) -> None:
        if self._has_logged:
            _log.info("discovery.found", to=self._what, waited_s=round(self.waited_s, 3))


def instance_of(process: Process, address: Address, **more: Any) -> Instance:
    """Return ``process`` as others see it at ``address``; ``more`` are further fields of the instance."""
    return Instance(
        id=process.instance_id(address.port),
        role=process.role,
        address=address,
        namespace=process.config.namespace,
        metrics_address=process.metrics_address,
        place=process.config.place,
        generation=process.generation,
        **more,
    )


async def meet(discovery: Discovery) -> None:
    """Return when ``discovery`` has answered. Raises MasterUnavailable if it does not, Unauthorized if it refuses.

    Without any answer, that takes MEET_S; with answers that name no leader, LEADER_S.
    """
    waiting = _Waiting("start")
    while True:
        try:
            await discovery.look()
        except MasterUnavailable as error:
            if isinstance(error, NotLeader):
                limit_s, hint = LEADER_S, ""
            else:
                limit_s, hint = MEET_S, "; is it running, and is this its address?"
            if waiting.waited_s >= limit_s:
                raise MasterUnavailable(error.message + hint) from error
            await waiting.pause(error)
        else:
            waiting.over()
            return


async def enter(discovery: Discovery, instance: Instance) -> Registration:
    """Register ``instance``, retrying without limit. Raises at once an error that a retry would not change."""
    waiting = _Waiting("register")
    while True:
        try:
            await discovery.require_role(instance)
            registration = await discovery.register(instance)
        except TanghuluError as error:
            if not error.retryable:
                raise
            await waiting.pause(error)
        else:
            waiting.over()
            return registration
