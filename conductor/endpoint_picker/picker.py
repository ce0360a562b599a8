"""Which endpoints a gateway should try for a request, and where the request really went.

Pure: times go in. Endpoints are workers of the routing service, named ``ip:port``. A picked request counts at the first
of its endpoints until it ends. The gateway reports the endpoint that served it: if that is a later one of the list, the
request is moved there, and those before it are unreachable: they are not picked for ``REST_S``.

    picked -> served (at the head of the response) -> first_token -> end
       |________________________________________________^  the gateway or its client left
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from tanghulu.conductor.routing_service.service import RoutableWorker, RoutingQuery, RoutingService
from tanghulu.errors import NodeUnavailable, Overloaded
from tanghulu.types import Address, InstanceId, Role

#: Seconds for which an unreachable endpoint is not picked.
REST_S: Final = 2.0
#: Endpoints named for one request: the best, and others for the gateway's retries.
MAX_NAMED: Final = 3


@dataclass(eq=False)
class Pick:
    """The endpoints for one request, the best first, and the one at which it counts; None after its end."""

    query: RoutingQuery
    endpoints: tuple[str, ...]
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    counted_at: str | None = None

    def __str__(self) -> str:
        """Return the list as gateways read it: ``ip:port,ip:port``."""
        return ",".join(self.endpoints)


class EndpointPicker:
    """Picks among the workers of ``service`` that are ready, up to ``max_requests`` at each (0 disables the limit)."""

    def __init__(self, service: RoutingService, max_requests: int = 0) -> None:
        self.service = service
        self._max_requests = max_requests
        self._ready: set[str] = set()
        self._resting: dict[str, float] = {}
        self._adapters: dict[str, Mapping[str, str]] = {}
        self._num_requests: Counter[str] = Counter()

    @property
    def ready(self) -> Collection[str]:
        """The endpoints that pass their health checks."""
        return self._ready

    # --- endpoints

    def set_endpoints(self, endpoints: Collection[str]) -> None:
        """Replace all endpoints; new ones are picked once they are ready. Raises InvalidRequest, Overloaded."""
        known = {worker.id for worker in self.service.workers}
        for gone in known - set(endpoints):
            self.service.remove_worker(gone)
            self.set_ready(gone, False)
        for name in endpoints:
            if name not in known:
                self.service.put_worker(InstanceId(name), Role.BOTH, url=f"http://{name}")

    def set_ready(self, endpoint: str, ready: bool) -> None:
        """Record a health check."""
        if ready:
            self._ready.add(endpoint)
        else:
            self._ready.discard(endpoint)
            self._adapters.pop(endpoint, None)

    def set_adapters(self, endpoint: str, adapters: Mapping[str, str]) -> None:
        """Record the paths of the LoRA adapters that a ready endpoint serves, by their names."""
        if endpoint in self._ready:
            self._adapters[endpoint] = adapters

    def adapter_path(self, model: str) -> str | None:
        """Return the path of ``model`` if any endpoint serves it as a LoRA adapter, else None."""
        return next((served[model] for served in self._adapters.values() if model in served), None)

    def knows(self, endpoint: str) -> bool:
        """Return whether an ip:port, or an ip, is that of an endpoint."""
        return any(_is_in(worker.id, (endpoint,)) for worker in self.service.workers)

    # --- requests

    def pick(self, query: RoutingQuery, now_s: float, subset: Collection[str] | None = None, adapter: str = "") -> Pick:
        """Pick endpoints and count the request at the first; ``subset`` has the only ones allowed, as ip:port or ip.

        Those that serve ``adapter`` are preferred: an engine may load it when it is first used. Raises NodeUnavailable
        if nobody is eligible, Overloaded if all who are have ``max_requests``.
        """
        eligible = self._eligible(now_s, subset)
        having = [worker for worker in eligible if adapter and adapter in self._adapters.get(worker.id, ())]
        free = [worker for worker in having or eligible if not self._is_full(worker.id)]
        if not free:
            raise Overloaded(
                f"{len(having or eligible)} endpoints each have {self._max_requests} requests in progress "
                "(--max-requests-per-worker); retry in a moment"
            )
        named = self.service.ranked(free, query, now_s, MAX_NAMED)
        pick = Pick(query, tuple(worker.id for worker in named))
        self._count(pick, pick.endpoints[0], now_s)
        return pick

    def served(self, pick: Pick, endpoint: str, now_s: float, *, reached: bool = True) -> None:
        """Record the ``endpoint`` whose response began, or that was tried last and not ``reached``.

        It is "" if the gateway does not report it. One that was not picked says nothing about those that were.
        """
        if pick.counted_at is None or (endpoint in ("", pick.counted_at) and reached):
            return
        if endpoint in pick.endpoints:
            for each in pick.endpoints[: pick.endpoints.index(endpoint) + (not reached)]:
                self._resting[each] = now_s + REST_S
        self.end(pick)
        if reached and any(worker.id == endpoint for worker in self.service.workers):
            self._count(pick, endpoint, now_s)

    def first_token(self, pick: Pick, now_s: float) -> None:
        """Record the first bytes of the response's body. Its worker may have been removed meanwhile."""
        self.service.prefill_completed(pick.request_id, now_s, pick.query.caller)

    def end(self, pick: Pick) -> None:
        """Record the end of the response, or of the gateway's interest in it; no error if it has ended."""
        if pick.counted_at is not None:
            self._num_requests[pick.counted_at] -= 1
            self._num_requests += Counter()  # drops those without any
            pick.counted_at = None
            self.service.free(pick.request_id, pick.query.caller)

    def check(self) -> None:
        self.service.check()
        assert sum(self._num_requests.values()) >= self.service.num_requests
        assert self._adapters.keys() <= self._ready <= {worker.id for worker in self.service.workers}

    # --- helpers

    def _count(self, pick: Pick, endpoint: str, now_s: float) -> None:
        worker = InstanceId(endpoint)
        self.service.add_request(pick.request_id, pick.query, worker, worker, now_s)
        pick.counted_at = endpoint
        self._num_requests[endpoint] += 1

    def _is_full(self, endpoint: str) -> bool:
        return 0 < self._max_requests <= self._num_requests[endpoint]

    def _eligible(self, now_s: float, subset: Collection[str] | None) -> list[RoutableWorker]:
        self._resting = {name: until_s for name, until_s in self._resting.items() if until_s > now_s}
        ready = [w for w in self.service.workers if w.id in self._ready and w.id not in self._resting]
        eligible = [w for w in ready if subset is None or _is_in(w.id, subset)]
        if not eligible:
            within = "" if subset is None else f" of the {len(subset)} in the gateway's subset"
            raise NodeUnavailable(
                f"no endpoint{within} is ready: {len(self.service.workers)} known, {len(self._ready)} healthy, "
                f"{len(self._resting)} unreachable"
            )
        return eligible


def _is_in(endpoint: str, named: Collection[str]) -> bool:
    return endpoint in named or Address.parse(endpoint).host in named


def listed(value: object) -> Collection[str]:
    """Return the endpoints in a list, or in a text separated by commas, of metadata or of a header."""
    given = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
    return {each.strip() for each in given if isinstance(each, str) and each.strip()}


def subset_of(metadata: Mapping[str, Mapping[str, object]]) -> Collection[str] | None:
    """Return the endpoints to which the gateway's metadata limits a request; None for all."""
    hint = metadata.get("envoy.lb.subset_hint", {})
    name = "x-gateway-destination-endpoint-subset"
    return listed(hint[name]) if name in hint else None
