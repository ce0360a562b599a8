"""The state shared by HTTP and gRPC: the dispatcher, calls in progress by client id, the limits."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from prometheus_client import CollectorRegistry

from tanghulu.auth.api_keys import ApiKey, KeyRight
from tanghulu.auth.key_limits import KeyAccounts
from tanghulu.conductor.dispatch.dispatcher import Dispatcher
from tanghulu.conductor.dispatch.registry import RegisteredWorker
from tanghulu.conductor.inference.generation import GenerationCall
from tanghulu.conductor.inference.preprocess import ParsedRequest
from tanghulu.conductor.text.served_model import ServedModel
from tanghulu.conductor.tools.choosing import ParserNames
from tanghulu.errors import TanghuluError
from tanghulu.web.bodies import Bodies
from tanghulu.web.errors import BadField

#: Shortest and longest retry delay given to a client, in seconds.
LEAST_S: Final = 1
MOST_S: Final = 60
#: Ends before that are no evidence of the current rate.
WINDOW_S: Final = 30.0
_MAX_ENDS: Final = 1024


class RetryAfter:
    """Counts the requests that end, and estimates from it how long a queue will take. Pure."""

    def __init__(self, now_s: float) -> None:
        self._began_s = now_s
        self._ends: deque[float] = deque(maxlen=_MAX_ENDS)

    def ended(self, now_s: float) -> None:
        """Record the end of a request, which makes room for another."""
        self._ends.append(now_s)

    def seconds(self, num_waiting: int, now_s: float) -> int:
        """Return seconds until ``num_waiting`` requests will have been started; MOST_S if none ends at all."""
        while self._ends and self._ends[0] < now_s - WINDOW_S:
            self._ends.popleft()
        if not num_waiting:
            return LEAST_S
        if not self._ends:
            return MOST_S
        since_s = self._ends[0] if len(self._ends) == _MAX_ENDS else max(self._began_s, now_s - WINDOW_S)
        rate = len(self._ends) / max(now_s - since_s, 1e-3)
        return min(MOST_S, max(LEAST_S, math.ceil(num_waiting / rate)))


DEFAULT_BODY_BYTES = 32 << 20
#: Most bytes per token of any text on average, even with all its characters escaped in JSON.
MAX_JSON_BYTES_PER_TOKEN = 64
#: Bytes of bodies in progress at one time, from their first piece until they are tokens.
ROOM_BYTES = 32 << 20
#: Memory of their parsed contents, until they are tokens.
VALUES_BYTES = 128 << 20


class UnknownFields(Enum):
    """Treatment of requests with a field that no API defines."""

    WARN = "warn"
    REFUSE = "refuse"


@dataclass(eq=False)
class Service:
    """The state behind all routes and methods."""

    dispatcher: Dispatcher
    metrics: CollectorRegistry
    bodies: Bodies = field(default_factory=lambda: Bodies(DEFAULT_BODY_BYTES, ROOM_BYTES))
    first_model_timeout_s: float = 30.0
    unknown_fields: UnknownFields = UnknownFields.WARN
    parsers: ParserNames = field(default_factory=ParserNames)
    accounts: KeyAccounts = field(default_factory=KeyAccounts)
    #: Calls and sequences in progress, by name and client: clients choose names, and may choose the same.
    calls: dict[str, dict[str, GenerationCall]] = field(default_factory=dict)
    values: Bodies = field(default_factory=lambda: Bodies(0, VALUES_BYTES))
    stopping: bool = False
    abort_at_peers: Callable[[str | None, str], Awaitable[int]] | None = None
    _retry_after: RetryAfter = field(default_factory=lambda: RetryAfter(time.monotonic()))

    async def find_model(self, name: str | None) -> ServedModel:
        """Return the model called ``name``; waits for the first worker. Raises ModelNotFound, NodeUnavailable."""
        registry = self.dispatcher.registry
        if not registry.models:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(registry.model_known.wait(), self.first_model_timeout_s)
        return registry.find_model(name)

    @property
    def most_string_bytes(self) -> float:
        """Longest string, in bytes of JSON, that may fit the context of any known model."""
        contexts = [model.card.context_length for model in self.dispatcher.registry.models.values()]
        return MAX_JSON_BYTES_PER_TOKEN * max(contexts) if contexts else math.inf

    def start(self, call_id: str, parsed: ParsedRequest, names: Sequence[str] = ()) -> GenerationCall:
        """Begin all sequences of ``parsed``, named ``names``, or after the call with a number.

        Raises Overloaded, in which case none is begun.
        """
        several = len(parsed.requests) > 1
        names = names or [f"{call_id}-{i}" if several else call_id for i in range(len(parsed.requests))]
        client = parsed.requests[0].client
        taken = next((name for name in (call_id, *names) if client in self.calls.get(name, ())), None)
        if taken is not None:
            raise BadField(f"the request id {taken!r} is in use; choose another", "rid")
        call = GenerationCall(call_id, parsed.model, parsed.num_choices)
        try:
            for request, rules, name in zip(parsed.requests, parsed.rules, names, strict=True):
                call.begin(self.dispatcher, request, rules, name, parsed.markers)
        except TanghuluError:
            call.abort()
            self._end_stories(call)
            raise
        for name in (call_id, *names):
            self.calls.setdefault(name, {})[client] = call
        self.accounts.spend(call.client, call.num_prompt_tokens, time.monotonic())
        return call

    def forget(self, call: GenerationCall) -> None:
        for name in (call.id, *(generation.name for generation in call.generations)):
            named = self.calls.get(name, {})
            named.pop(call.client, None)
            if not named:
                self.calls.pop(name, None)
        self._end_stories(call)
        for _ in call.generations:
            self._retry_after.ended(time.monotonic())
        self.accounts.spend(call.client, call.num_generated, time.monotonic())

    def _end_stories(self, call: GenerationCall) -> None:
        """End the stories of a call's sequences: its answer has been sent, or its client has left."""
        for generation in call.generations:
            self.dispatcher.stories.over(generation.stream.story, time.monotonic())

    def retry_after_s(self) -> int:
        """Return seconds after which a refused client should retry: once the waiting requests have been started."""
        return self._retry_after.seconds(self.dispatcher.num_waiting, time.monotonic())

    async def abort(self, call_id: str | None, key: ApiKey | None = None) -> int:
        """End a call, or the one of its sequences with that name (None: all), on whichever conductor has it.

        Returns the number ended. A ``key`` without administrator rights ends only its own calls; others do not exist
        for it.
        """
        client = "" if key is None or key.may(KeyRight.ADMIN) else key.client
        ended = self.abort_here(call_id, client)
        if (ended and call_id is not None) or self.abort_at_peers is None:
            return ended
        return ended + await self.abort_at_peers(call_id, client)

    def abort_here(self, call_id: str | None, client: str) -> int:
        """Like ``abort``, for this conductor's calls, if they are ``client``'s ("": any client's)."""
        if call_id is None:
            ending = {call for calls in self.calls.values() for call in calls.values() if client in ("", call.client)}
            for call in ending:
                call.abort()
            return len(ending)
        ids = (call_id, f"chatcmpl-{call_id}", f"cmpl-{call_id}")  # the client's own has a prefix in the last two
        found = [(name, call) for name in ids for call in self.calls.get(name, {}).values()]
        found = [(name, call) for name, call in found if client in ("", call.client)]
        for name, call in found:
            for generation in call.generations:
                if name in (call.id, generation.name):
                    generation.abort()
        return len(found)

    async def probe(self, deadline_s: float) -> list[dict[str, Any]]:
        """Return each worker with its seconds for one token, or the reason for none."""
        return list(await asyncio.gather(*(_probed(w, deadline_s) for w in self.dispatcher.registry.workers.values())))

    def missing(self) -> list[str]:
        """Return the reasons why a request cannot be served yet; empty if it can."""
        registry = self.dispatcher.registry
        if self.stopping:
            return ["the conductor is shutting down"]
        if any(registry.usable(model) for model in registry.models.values()):
            return []
        if not registry.synced:
            return ["discovery has not sent the list of workers yet"]
        if not registry.workers:
            return ["no worker is registered"]
        return [
            f"{w.role.value} worker {w.id} at {w.instance.address} is not connected"
            + (f": {w.last_error}" * bool(w.last_error))
            for w in registry.workers.values()
        ]


async def _probed(worker: RegisteredWorker, deadline_s: float) -> dict[str, Any]:
    named = {"id": worker.id, "role": worker.role.value}
    if worker.session is None:
        return named | {"healthy": False, "error": worker.last_error or "not connected"}
    try:
        return named | {"healthy": True, "seconds": await worker.session.probe(deadline_s)}
    except TanghuluError as error:
        return named | {"healthy": False, "error": error.message}
