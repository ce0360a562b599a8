"""The servers behind a gateway: where they are, whether they are healthy, what their caches hold.

Names are resolved again every RESOLVE_S, so a name with an address for each server (in Kubernetes a headless service)
follows servers that come and go. Each server is asked for its health, and now and then for its adapters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import structlog

from tanghulu.conductor.endpoint_picker.picker import EndpointPicker
from tanghulu.conductor.pool_router.relaying import UNREACHABLE, RelayClient
from tanghulu.errors import ConfigError, InvalidRequest, TanghuluError
from tanghulu.runtime.tasks import cancelled
from tanghulu.runtime.telemetry import RareLog
from tanghulu.types import Address

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
    events of one of them, if these are published. ``on_change`` is called after each check.
    """

    def __init__(
        self,
        picker: EndpointPicker,
        addresses: Sequence[Address],
        client: RelayClient,
        *,
        interval_s: float,
        path: str,
        follow: Callable[[str], asyncio.Task[None]] | None,
        on_change: Callable[[], None],
    ) -> None:
        self._picker, self._addresses, self._client = picker, addresses, client
        self._interval_s, self._path = interval_s, path
        self._follow, self._on_change = follow, on_change
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._found: dict[Address, list[str]] = {}
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._rare_log = RareLog(_log)

    async def run(self) -> None:
        """Follow the servers until cancelled."""
        loop = asyncio.get_running_loop()
        resolve_at_s = adapters_at_s = loop.time()
        try:
            while True:
                now_s = loop.time()
                if now_s >= resolve_at_s:
                    await self._resolve()
                    resolve_at_s = now_s + RESOLVE_S
                with_adapters = now_s >= adapters_at_s
                if with_adapters:
                    adapters_at_s = now_s + ADAPTERS_S
                names = [worker.id for worker in self._picker.service.workers]
                await asyncio.gather(*(self._check(name, with_adapters) for name in names))
                await asyncio.sleep(self._interval_s or RESOLVE_S)
        finally:
            await cancelled(*self._followers.values())

    async def _resolve(self) -> None:
        networks = self._picker.service.networks
        for address in self._addresses:
            try:
                hosts = await networks.addresses_of(address.host)
                self._found[address] = [str(Address(host, address.port)) for host in dict.fromkeys(hosts)]
            except TanghuluError as error:  # a name server's failure is no reason to forget the servers
                self._rare_log.warning("epp.unresolved", address=str(address), error=error.message)
        names = list(dict.fromkeys(name for found in self._found.values() for name in found))
        self._picker.set_endpoints(names)
        self._on_change()
        for gone in self._followers.keys() - set(names):
            await cancelled(self._followers.pop(gone))
        for name in names:
            if self._follow is not None and name not in self._followers:
                self._followers[name] = self._follow(name)

    async def _check(self, name: str, with_adapters: bool) -> None:
        was_ready = name in self._picker.ready
        is_ready = not self._interval_s or await self._get(name, self._path) is not None
        if is_ready != was_ready:
            _log.info("epp.endpoint", endpoint=name, ready=is_ready)
        self._picker.set_ready(name, is_ready)
        self._on_change()
        if is_ready and (with_adapters or not was_ready) and self._interval_s:
            self._picker.set_adapters(name, dict(_adapters_in(await self._get(name, "/v1/models"))))

    async def _get(self, name: str, path: str) -> Any:
        """Return the JSON of a server's answer, {} if it is none; None unless it answers 200 in time."""
        try:
            async with self._turns:
                answer = await self._client.exchange("GET", f"http://{name}{path}", b"", {}, DEADLINE_S)
        except UNREACHABLE:
            return None
        try:
            return answer.json() if answer.status_code == 200 else None
        except ValueError:  # /health of most engines is empty
            return {}


def _adapters_in(models: Any) -> Iterator[tuple[str, str]]:
    """Yield name and path of the LoRA adapters in a list of models: those with a parent."""
    listed = models.get("data") if isinstance(models, dict) else None
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, dict) and each.get("parent") and isinstance(each.get("id"), str):
            yield each["id"], str(each.get("root") or "")
