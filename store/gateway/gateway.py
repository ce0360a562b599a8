"""The state that all routes share: the callers' clients and the bounds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping

from tanghulu.auth.credentials import AUTHORIZATION, TENANT, Credentials
from tanghulu.auth.derived_tokens import hash_of, id_of
from tanghulu.auth.places import ANYBODY, Caller, Places
from tanghulu.errors import DeadlineExceeded, Unauthorized
from tanghulu.store.gateway.bounds import InFlight
from tanghulu.store.gateway.clients import Clients, GatewayClient
from tanghulu.store.gateway.config import GatewayConfig
from tanghulu.store.gateway.metrics import GatewayMetrics

_MAX_REMOVALS = 4
#: A token has at most one in this many of the requests in progress.
_REQUESTS_ONE_IN = 2


class Gateway:
    """The gateway's state, created in its event loop."""

    def __init__(self, config: GatewayConfig, metrics: GatewayMetrics, stopping: asyncio.Event) -> None:
        self.config = config
        self.metrics = metrics
        self.stopping = stopping
        self.clients = Clients(config.master, config.deadline_s, config.max_clients, config.idle_s)
        self.requests = Places("requests", _REQUESTS_ONE_IN)
        self.values = InFlight("values", config.max_in_flight_bytes)
        self.streams = InFlight("streams of events", config.max_streams)
        self.checks = InFlight("checks", 1)
        self.removals = InFlight("removals by prefix or pattern", _MAX_REMOVALS)
        metrics.gauge("requests_in_flight", "Requests under way", lambda: len(self.requests))
        metrics.gauge("values_in_flight_bytes", "Values under way", lambda: self.values.now)
        metrics.gauge("event_streams", "Followers of events", lambda: self.streams.now)
        metrics.gauge("clients", "Tokens that are connected to the store", lambda: len(self.clients))

    def credentials_of(self, headers: Mapping[str, str]) -> Credentials:
        """Return a request's credentials: those in its headers, or the gateway's own; raises Unauthorized."""
        own = self.config.master.credentials
        shown = headers.get(AUTHORIZATION)
        tenant = headers.get(TENANT, "")
        if shown is not None:
            scheme, _, token = shown.strip().partition(" ")
            if scheme.lower() != "bearer" or not token.strip():
                raise Unauthorized("the header Authorization is not of the form: Bearer TOKEN")
            return Credentials(tenant, token.strip(), own.tls)
        if self.config.require_token:
            raise Unauthorized("this gateway requires a token: send the header Authorization: Bearer TOKEN")
        if tenant:
            raise Unauthorized(f"the header {TENANT} requires an operator's token in Authorization")
        return own

    def caller_of(self, headers: Mapping[str, str]) -> Caller:
        """Return the owner of a request's place: its token, of whose tenant and rights the gateway knows nothing."""
        try:
            token = self.credentials_of(headers).token
        except Unauthorized:
            return ANYBODY
        return Caller(f"token {id_of(hash_of(token))}", has_share=True) if token else ANYBODY

    @contextlib.contextmanager
    def place(self, headers: Mapping[str, str]) -> Iterator[None]:
        """Count a request with ``headers`` inside the block; raises Overloaded, also beyond its token's share."""
        caller = self.caller_of(headers)
        self.requests.take(caller, self.config.max_requests)
        try:
            yield
        finally:
            self.requests.give_back(caller)

    @contextlib.asynccontextmanager
    async def store(self, headers: Mapping[str, str]) -> AsyncIterator[GatewayClient]:
        """Yield the store as seen by the caller of a request with ``headers``.

        Raises Unauthorized, MasterUnavailable, Overloaded.
        """
        async with self.clients.of(self.credentials_of(headers)) as client:
            yield client

    def time_limit(self) -> TimeLimit:
        """Return the time bound of a request that consists of many calls and begins now."""
        return TimeLimit(self.config.request_s)

    def check(self) -> None:
        """Assert the bounds."""
        for each in (self.requests, self.values, self.streams, self.checks, self.removals):
            each.check()
        self.clients.check()


class TimeLimit:
    """The deadline of a request that consists of many calls, checked between them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until_s = time.monotonic() + seconds

    def left_s(self) -> float:
        """Return the seconds left; raises DeadlineExceeded if there are none."""
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded(f"not finished after {self._seconds:g} s; changes made so far remain")
        return left_s
