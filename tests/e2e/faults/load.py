"""Clients that ask one thing after the other, compare each answer with the undisturbed one, and keep count."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import httpx

from tests.e2e.faults.asking import APIS, Answer, Ask, objection_to_whole, read
from tests.e2e.faults.parts import Part

#: What a client is told by a conductor that ends.
_STOPPING = "the conductor is shutting down"
_PAUSE_S = 0.1
#: As long as a whole answer of the real model may take on a busy machine.
_READ_S = 900.0
ASKS = tuple(
    Ask(api, stream, greedy, number, max_tokens)
    for number, max_tokens in ((0, 40), (1, 120))
    for api in APIS
    for stream in (True, True, False)
    for greedy in (True, False)
)


class Load:
    """``num_clients`` clients of ``conductors``; ``lost`` says which requests did not end as they must.

    A request whose conductor died or ended under it is sent again under its id, to the next one, and counted in
    ``retried``; one that found nobody listening, in ``refused``.
    """

    def __init__(self, conductors: Callable[[], Sequence[Part]], num_clients: int, asks: Sequence[Ask] = ASKS) -> None:
        self._conductors = conductors
        self._num_clients, self._asks = num_clients, asks
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.http = httpx.AsyncClient(timeout=_READ_S, trust_env=False, limits=limits)
        self.wanted: dict[Ask, Answer] = {}
        self.counts: Counter[str] = Counter()
        self.lost: list[str] = []
        self._numbers = itertools.count()
        self._ending = False
        self._clients: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Learn the undisturbed answers, then start the clients."""
        url, at_once = self._conductors()[0].url, asyncio.Semaphore(self._num_clients)

        async def undisturbed(number: int, one: Ask) -> Answer:
            async with at_once:
                return await self._once(url, one, f"first-{number}", "")

        answers = await asyncio.gather(*(undisturbed(n, one) for n, one in enumerate(self._asks)))
        self.wanted = dict(zip(self._asks, answers, strict=True))
        for one, answer in self.wanted.items():
            assert answer.finishes == ["length"], (one, answer)
            assert answer.usage["completion_tokens"] == one.max_tokens, (one, answer)
        self._clients = [asyncio.create_task(self._client()) for _ in range(self._num_clients)]

    async def end(self) -> None:
        """Let every client finish what it has begun."""
        self._ending = True
        await asyncio.gather(*self._clients)
        await self.http.aclose()

    async def abandon(self) -> None:
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        await self.http.aclose()

    async def _client(self) -> None:
        while not self._ending:
            number = next(self._numbers)
            await self._ask_until_answered(number, self._asks[number % len(self._asks)])

    async def _ask_until_answered(self, number: int, one: Ask) -> None:
        """Ask conductor after conductor, until one answers that lives on."""
        for attempt in itertools.count():
            conductors = self._conductors()
            conductor = conductors[(number + attempt) % len(conductors)]
            popen = conductor.popen
            answer = await self._once(conductor.url, one, f"load-{number}", f"{number % 60}")
            if answer.cut.startswith("ConnectError"):
                self.counts["refused"] += 1
            elif answer.cut and popen is not None and await _has_ended(popen.poll):
                self.counts["cut with its conductor"] += 1
            elif any(_STOPPING in error["message"] for error in answer.errors):
                self.counts["told that its conductor stops"] += 1
            else:
                break
            await asyncio.sleep(_PAUSE_S)
        self.counts["answered"] += 1
        if objection := objection_to_whole(one, answer, self.wanted[one]):
            self.lost.append(f"load-{number}: {objection}")

    async def _once(self, url: str, one: Ask, name: str, salt: str) -> Answer:
        try:
            reply = await self.http.post(url + one.api, json=one.body(salt) | {"rid": name})
        except httpx.HTTPError as error:
            return Answer(cut=repr(error))
        return read(one, reply.status_code, reply.text)


async def _has_ended(poll: Callable[[], int | None]) -> bool:
    """Whether a process is ending that has just broken a connection."""
    for _ in range(100):
        if poll() is not None:
            return True
        await asyncio.sleep(_PAUSE_S)
    return False
