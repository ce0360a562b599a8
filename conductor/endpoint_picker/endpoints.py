"""The servers behind a gateway: where they are, whether they are healthy, what their caches hold.

Names are resolved again every RESOLVE_S, so a name with an address for each server (in Kubernetes a headless service)
follows servers that come and go. Each server is asked for its health, and now and then for its adapters.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog

from tanghulu.conductor.endpoint_picker.picker import EndpointPicker
from tanghulu.conductor.engines.dialect import reached
from tanghulu.conductor.engines.events import EventSource
from tanghulu.conductor.engines.servers import EngineServer
from tanghulu.conductor.pool_router.relaying import UNREACHABLE, RelayClient
from tanghulu.errors import ConfigError, InvalidRequest, TanghuluError
from tanghulu.runtime.tasks import cancelled
from tanghulu.runtime.telemetry import RareLog
from tanghulu.types import Address, InstanceId

_log = structlog.get_logger(__name__)
RESOLVE_S: Final = 5.0
ADAPTERS_S: Final = 10.0
#: A server that does not answer for this long is not healthy; and servers asked at one time.
DEADLINE_S: Final = 2.0
_AT_ONCE: Final = 64


def parse_endpoints(text: str) -> tuple[Address, ...]:
    """Parse ``host:port,host:port,…``. Raises ConfigError."""
    try:
        found = tuple(Address.parse(part.strip()) for part in text.split(",") if part.strip())
    except InvalidRequest as error:
        raise ConfigError(f"--endpoints: {error.message}") from None
    if not found:
        raise ConfigError("--endpoints is empty; give the servers behind the gateway as host:port,host:port,…")
    return found


class Endpoints:
    """Keeps ``picker`` up to date about the servers at ``addresses``.

    They are checked every ``interval_s`` (0: all are healthy) by GET ``path``. ``follow`` starts following the KV
    events of one of them; None leaves them out. ``on_change`` is called after each check.
    """

    def __init__(
        self,
        picker: EndpointPicker,
        addresses: Sequence[Address],
        health: tuple[str, float],
        follow: Callable[[EventSource], asyncio.Task[None]] | None,
        on_change: Callable[[], None],
    ) -> None:
        self._picker, self._follow, self._on_change = picker, follow, on_change
        self._path, self._interval_s = health
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._found: dict[Address, list[str]] = {address: [] for address in addresses}
        self._client, self._turns, self._rare_log = RelayClient(), asyncio.Semaphore(_AT_ONCE), RareLog(_log)

    async def run(self) -> None:
        """Follow the servers until cancelled."""
        try:
            for turn in itertools.count():
                every_s = self._interval_s or RESOLVE_S
                if turn % math.ceil(RESOLVE_S / every_s) == 0:
                    await self._resolve()
                lists_models = turn % math.ceil(ADAPTERS_S / every_s) == 0
                await asyncio.gather(*(self._check(w.id, lists_models) for w in self._picker.service.workers))
                await asyncio.sleep(every_s)
        finally:
            await cancelled(*self._followers.values())
            await self._client.close()

    async def _resolve(self) -> None:
        for address in self._found:
            try:
                hosts = await self._picker.service.networks.addresses_of(address.host)
                self._found[address] = [str(Address(host, address.port)) for host in hosts]
            except TanghuluError as error:  # a name server's failure is no reason to forget the servers
                self._rare_log.warning("epp.unresolved", address=str(address), error=error.message)
        names = dict.fromkeys(itertools.chain(*self._found.values()))
        self._picker.set_endpoints(names)
        for gone in self._followers.keys() - names.keys():
            await cancelled(self._followers.pop(gone))
        self._on_change()

    async def _check(self, name: str, lists_models: bool) -> None:
        was_ready = name in self._picker.ready
        is_ready = not self._interval_s or await self._get(name, self._path) is not None
        if is_ready != was_ready:
            _log.info("epp.endpoint", endpoint=name, ready=is_ready)
        self._picker.set_ready(name, is_ready)
        self._on_change()
        if self._interval_s and is_ready and (lists_models or not was_ready):
            self._picker.set_adapters(name, _adapters_in(await self._get(name, "/v1/models")))
        if is_ready and self._follow is not None and name not in self._followers:
            source = _source_in(await self._get(name, "/kv_event_sources"), name)
            if source is not None:
                self._followers[name] = self._follow(source)
            else:
                self._rare_log.warning("epp.no_kv_events", endpoint=name, path="/kv_event_sources")

    async def _get(self, name: str, path: str) -> Any:
        """Return the JSON of a server's answer, {} if it is none; None unless it answers 200 in time."""
        try:
            async with self._turns:
                answer = await self._client.exchange("GET", f"http://{name}{path}", b"", {}, DEADLINE_S)
            return (answer.json() if answer.content else {}) if answer.status_code == 200 else None
        except UNREACHABLE:
            return None
        except ValueError:
            return {}


def _adapters_in(models: Any) -> dict[str, str]:
    """Return the paths of the LoRA adapters in a list of models, by name: those with a parent."""
    listed = models.get("data") if isinstance(models, dict) else None
    entries = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    return {str(each.get("id")): str(each.get("root") or "") for each in entries if each.get("parent")}


def _source_in(ranks: Any, name: str) -> EventSource | None:
    """Return the source in a vLLM server's list; None without exactly one, since ranks have caches of their own."""
    (rank,) = ranks.values() if isinstance(ranks, dict) and len(ranks) == 1 else (None,)
    if not isinstance(rank, dict) or not isinstance(rank.get("endpoint"), str):
        return None
    server = EngineServer("vllm", f"http://{name}", address=Address.parse(name))
    events, replay = (reached(str(rank.get(each) or ""), server) for each in ("endpoint", "replay_endpoint"))
    return EventSource(InstanceId(name), events, replay)
