"""The servers behind a gateway: where they are, whether they are healthy, what their caches hold.

A name with an address for each server (in Kubernetes a headless service) follows servers that come and go, as
`EngineSource` looks it up again. Each server is asked for its health, and now and then for its adapters.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

import structlog

from tanghulu.auth.credentials import NO_TLS
from tanghulu.conductor.endpoint_picker.picker import EndpointPicker
from tanghulu.conductor.engines.client import EngineClient
from tanghulu.conductor.engines.dialect import served_models
from tanghulu.conductor.engines.servers import EngineServer
from tanghulu.conductor.engines.source import LOOKUP_S, EngineSource
from tanghulu.conductor.engines.vllm import event_endpoints
from tanghulu.discovery.base import InstanceEvent
from tanghulu.errors import ConfigError, DeadlineExceeded, InvalidRequest, TanghuluError
from tanghulu.runtime.kv_endpoints import EventEndpoints
from tanghulu.runtime.tasks import cancelled
from tanghulu.runtime.telemetry import RareLog
from tanghulu.types import Address, InstanceId

_log = structlog.get_logger(__name__)
T = TypeVar("T")
ADAPTERS_S: Final = 10.0
#: Seconds for an answer, answers in a row that may be late (a busy machine's are), and servers asked at one time.
DEADLINE_S: Final = 2.0
MAX_LATE: Final = 2
_AT_ONCE: Final = 64


def parse_endpoints(text: str) -> list[EngineServer]:
    """Parse ``host:port,host:port,…``. Raises ConfigError."""
    try:
        found = dict.fromkeys(Address.parse(part.strip()) for part in text.split(",") if part.strip())
    except InvalidRequest as error:
        raise ConfigError(f"--endpoints: {error.message}") from None
    if not found:
        raise ConfigError("--endpoints is empty; give the servers behind the gateway as host:port,host:port,…")
    return [EngineServer("vllm", f"http://{address}") for address in found]


class Endpoints:
    """Keeps ``picker`` up to date about the servers of ``source``.

    They are checked every ``interval_s`` (0: all are healthy) by GET ``path``. ``follow`` follows the KV events of one
    of them until cancelled; None leaves them out. ``on_change`` is called after each check.
    """

    def __init__(
        self,
        picker: EndpointPicker,
        source: EngineSource,
        health: tuple[str, float],
        follow: Callable[[InstanceId, EventEndpoints], Coroutine[Any, Any, None]] | None,
        on_change: Callable[[], None],
    ) -> None:
        self._picker, self._source, self._follow, self._on_change = picker, source, follow, on_change
        self._path, self._interval_s = health
        self._tasks, self._watches = asyncio.TaskGroup(), dict[str, asyncio.Task[None]]()
        self._turns, self._rare_log = asyncio.Semaphore(_AT_ONCE), RareLog(_log)

    async def run(self) -> None:
        """Follow the servers until cancelled."""
        async with self._tasks:
            await self._source.follow(self._apply)

    def _apply(self, _: InstanceEvent) -> None:
        servers = {str(each.address): each for each in self._source.servers.values()}
        self._picker.set_endpoints(servers)
        for gone in self._watches.keys() - servers.keys():
            self._watches.pop(gone).cancel()
        for name in servers.keys() - self._watches.keys():
            self._watches[name] = self._tasks.create_task(self._watch(name, servers[name]))
        self._on_change()

    async def _watch(self, name: str, server: EngineServer) -> None:
        """Check one server again and again; follow its events once it lists some."""
        client, every_s, was_ready, num_late = EngineClient(server, NO_TLS), self._interval_s or LOOKUP_S, False, 0
        follower: asyncio.Task[None] | None = None
        try:
            for turn in itertools.count():
                health = await self._health(client)
                num_late = 0 if health is not None else num_late + 1
                is_ready = health if health is not None else was_ready and num_late <= MAX_LATE
                if is_ready != was_ready:
                    _log.info("epp.endpoint", endpoint=name, ready=is_ready)
                self._picker.set_ready(name, is_ready)
                self._on_change()
                lists_models = turn % math.ceil(ADAPTERS_S / every_s) == 0 or not was_ready
                if self._interval_s and is_ready and lists_models:
                    models = await self._answer(lambda: served_models(client))
                    self._picker.set_adapters(name, models[-1] if models is not None else {})
                if is_ready and follower is None and self._follow is not None:
                    if events := await self._answer(lambda: event_endpoints(client)):
                        follower = self._tasks.create_task(self._follow(InstanceId(name), events))
                    else:
                        self._rare_log.warning("epp.no_kv_events", endpoint=name, path="/kv_event_sources")
                was_ready = is_ready
                await asyncio.sleep(every_s)
        finally:
            await cancelled(*filter(None, [follower]))
            await client.close()

    async def _health(self, client: EngineClient) -> bool | None:
        """Return whether a server is healthy; None if it does not answer in time."""
        try:
            async with self._turns:
                if self._interval_s:
                    await client.call(self._path, deadline_s=DEADLINE_S)
        except DeadlineExceeded:
            return None
        except TanghuluError:
            return False
        return True

    async def _answer(self, ask: Callable[[], Awaitable[T]]) -> T | None:
        """Return a server's answer; None unless it gives one in time."""
        try:
            async with self._turns, asyncio.timeout(DEADLINE_S):
                return await ask()
        except (TanghuluError, TimeoutError):
            return None
