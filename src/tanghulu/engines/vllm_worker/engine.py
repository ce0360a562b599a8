"""``VllmEngine``: an ``AsyncLLM`` as the engine of sessions (``SessionEngine``).

Runs on the process's event loop; vLLM computes in its own process. The outputs of requests and the events of vLLM's
cache are gathered, and leave as one report after the loop's other work of that turn: the outputs of a step of vLLM are
one message to each conductor, like those of a step of our own engine.

vLLM may keep two blocks of one name, if two requests compute the same prompt at once, and its KV events report each
of them (`CachedNames`): a name is removed with its last block. Example: of stored a, stored a, removed a the conductor
receives "stored a" alone.

vLLM reports the number of running requests and the part of the cache in use, but not the number of waiting tokens
(`LoadBook`): a request's are those not cached on its arrival, until its first token shows that they are computed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from msgspec import structs

from tanghulu.engines.vllm_worker.requests import VllmRequest, output_of
from tanghulu.errors import Conflict, DeadlineExceeded, InvalidRequest, NodeUnavailable, Overloaded, TanghuluError
from tanghulu.hashing import TokenSequence
from tanghulu.runtime.tasks import cancelled
from tanghulu.session.outputs import FinishReason, KvChange, KvSource, Output
from tanghulu.session.speed import SpeedMeter
from tanghulu.types import BlockHash, RequestId
from tanghulu.workers.engine.block_pool import KvEvent, KvEventKind
from tanghulu.workers.engine.exports import KvExport
from tanghulu.workers.engine.step import StepResult
from tanghulu.workers.engine.thread import EngineLoad, StepReport
from tanghulu.workers.sessions.server import TakesSnapshot


class LoadBook:
    """Requests from their submission to their end, and the latest figures of a cache of ``num_blocks``.

    ``max_num_seqs`` is the maximum number of requests that vLLM runs in one step.
    """

    def __init__(self, num_blocks: int, max_num_seqs: int) -> None:
        self._num_blocks, self._max_num_seqs = num_blocks, max_num_seqs
        self._waiting: dict[RequestId, int] = {}  # tokens to compute, of requests without a token yet
        self._started: set[RequestId] = set()
        self._speed = SpeedMeter(reads_peers=False)
        self._num_running = 0
        self._share_in_use = 0.0
        self.num_added = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._started)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting or request_id in self._started

    def add(self, request_id: RequestId, num_tokens: int) -> None:
        """Add a request; ``num_tokens`` of its prompt are not cached."""
        assert request_id not in self, request_id
        self.num_added += 1
        self._waiting[request_id] = num_tokens

    def started(self, request_id: RequestId) -> None:
        """Note that the request has a token."""
        if self._waiting.pop(request_id, None) is not None:
            self._started.add(request_id)

    def ended(self, request_id: RequestId) -> None:
        """Note that the request has ended in any way."""
        self._waiting.pop(request_id, None)
        self._started.discard(request_id)

    def step(self, stats: Any) -> None:
        """Process vLLM's ``SchedulerStats`` of a step."""
        self._num_running = stats.num_running_reqs
        self._share_in_use = stats.kv_cache_usage
        details = stats.iteration_details
        if details is not None and not details.is_dummy and details.elapsed_ms > 0:
            num_tokens = details.num_ctx_tokens + details.num_generation_tokens
            num_requests = details.num_ctx_requests + details.num_generation_requests
            self._speed.step(num_tokens, num_requests, details.elapsed_ms / 1000)

    def load(self, num_cached: int) -> EngineLoad:
        """Return the current load; ``num_cached`` names are in the cache."""
        num_running = min(self._num_running, len(self))
        in_use = round(self._share_in_use * self._num_blocks) if len(self) else 0
        shared = structs.replace(
            self._speed.speeds,
            num_running=num_running,
            num_waiting=len(self) - num_running,
            blocks_total=self._num_blocks,
            blocks_free=self._num_blocks - in_use,
            prefill_tokens_waiting=sum(self._waiting.values()),
            max_num_seqs=self._max_num_seqs,
        )
        return EngineLoad(
            shared, blocks_cached=max(num_cached - in_use, 0), blocks_in_use=in_use, num_added=self.num_added
        )

    def check(self) -> None:
        assert not self._waiting.keys() & self._started
        assert len(self) <= self.num_added


_log = structlog.get_logger(__name__)
#: Interval of the health checks of vLLM's process.
LOOK_S = 0.5
#: Time limit for vLLM to drop its cache, and the interval of attempts: saves hold blocks for a moment.
DROP_S, DROP_AGAIN_S = 10.0, 0.1


@dataclass(frozen=True, slots=True)
class VllmSurface:
    """vLLM's engine, and the types of vLLM needed to use it."""

    llm: Any  # its AsyncLLM
    sampling: Callable[[VllmRequest], Any]  # makes SamplingParams
    dead: type[BaseException]
    invalid: tuple[type[BaseException], ...]  # raised for invalid requests


async def _not_waited(hashes: Sequence[BlockHash]) -> bool:
    return False


class VllmEngine:
    """Passes requests to vLLM; ``on_report`` and ``on_failure`` are called in the event loop.

    ``stored`` waits until blocks are in the store, before their request is handed over.
    """

    def __init__(
        self,
        surface: VllmSurface,
        book: LoadBook,
        block_tokens: int,
        on_report: Callable[[StepReport], None],
        on_failure: Callable[[BaseException], None],
        max_requests: int,
        stored: Callable[[Sequence[BlockHash]], Awaitable[bool]] = _not_waited,
    ) -> None:
        self._stored = stored
        self._surface = surface
        self._on_report = on_report
        self._on_failure = on_failure
        self._max_requests = max_requests
        self._block_tokens = block_tokens
        self._loop = asyncio.get_running_loop()
        self._mirror = CachedNames()
        self._book = book
        self._tasks: dict[RequestId, asyncio.Task[None]] = {}
        self._beating: asyncio.Task[None] | None = None
        self._outputs: list[Output] = []
        self._handed: list[KvExport] = []  # of the outputs above
        self._events: list[KvEvent] = []
        self._reporting = False
        self._failed = False
        self._probes = itertools.count(1)

    # --- for sessions

    def submit(
        self, request: VllmRequest, added: Callable[[int], None], refused: Callable[[TanghuluError], None]
    ) -> None:
        """Pass the request to vLLM."""
        if request.request_id in self._book:
            refused(Conflict(f"request {request.request_id} is already running here"))
            return
        if len(self._book) >= self._max_requests:
            refused(Overloaded(f"{len(self._book)} requests are here, the maximum; retry later or at another worker"))
            return
        num_cached = self._mirror.num_leading(request.block_hashes) * self._block_tokens
        self._book.add(request.request_id, max(len(request.tokens) - num_cached, 1))
        added(self._book.num_added)
        task = self._loop.create_task(self._serve(request, refused))
        self._tasks[request.request_id] = task
        task.add_done_callback(lambda _: self._ended(request.request_id))

    def pull_ahead(self, name: RequestId, sequence: TokenSequence, peer: KvSource) -> None:
        """Do nothing, as it is never called: the factory makes no pulls."""
        raise AssertionError(f"{name} was to be fetched")

    def abort(self, request_id: RequestId) -> None:
        """End a request; the outputs of an ended one are already under way."""
        if (task := self._tasks.get(request_id)) is not None:
            task.cancel()

    def snapshot(self, take: TakesSnapshot) -> None:
        """Pass the names of the cached blocks to ``take``, with their events that are in no report yet."""
        events, self._events = self._events, []
        take(self._mirror.names, self.load(), events)

    def beat(self) -> None:
        """Send a report once vLLM's process has answered."""
        if self._beating is None or self._beating.done():
            self._beating = self._loop.create_task(self._answered())

    # --- for the worker

    def load(self) -> EngineLoad:
        """Return the load of vLLM."""
        return self._book.load(len(self._mirror))

    def on_stats(self, stats: Any) -> None:
        """Process vLLM's ``SchedulerStats`` of a step."""
        if stats is not None:
            self._book.step(stats)
            self._report_soon()

    def on_change(self, change: KvChange) -> None:
        """Process an event of vLLM's cache."""
        if events := self._mirror.apply(change):
            self._events += events
            self._report_soon()

    async def probe(self, request: VllmRequest, deadline_s: float) -> float:
        """Return the seconds until vLLM made a token of ``request``; raises DeadlineExceeded, NodeUnavailable."""
        surface, began_s = self._surface, self._loop.time()
        name = f"{request.request_id}-{next(self._probes)}"
        try:
            async with asyncio.timeout(deadline_s):
                async for _ in surface.llm.generate(request.prompt, surface.sampling(request), name):
                    break
        except TimeoutError:
            raise DeadlineExceeded(f"vLLM computed no token within {deadline_s:g} s") from None
        except surface.dead as error:
            self._fail(error)
            raise NodeUnavailable("vLLM's engine has ended; see the worker's log") from error
        return self._loop.time() - began_s

    async def drop_cached(self) -> int:
        """Have vLLM drop its cache; returns the number of named blocks. Raises Conflict while requests use some."""
        num_cached, until_s = len(self._mirror), self._loop.time() + DROP_S
        while not await self._surface.llm.reset_prefix_cache():
            if self._book or self._loop.time() > until_s:
                raise Conflict("vLLM cannot drop its cache while requests use it; retry when they have ended")
            await asyncio.sleep(DROP_AGAIN_S)
        return num_cached

    async def watch(self) -> None:
        """Report vLLM's death; runs until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._surface.llm.check_health()
            except self._surface.dead as error:
                self._fail(error)
                return

    async def close(self) -> None:
        """Abort the requests in progress."""
        await cancelled(*self._tasks.values(), *([self._beating] if self._beating is not None else []))

    def check(self) -> None:
        self._book.check()
        self._mirror.check()
        assert len(self._book) == len(self._tasks)

    # --- one request

    async def _serve(self, request: VllmRequest, refused: Callable[[TanghuluError], None]) -> None:
        surface = self._surface
        try:
            sampling = surface.sampling(request)
            steps = surface.llm.generate(request.prompt, sampling, request.request_id, priority=request.priority)
            async for step in steps:
                output = output_of(request, step)
                self._book.started(request.request_id)
                if request.hand_over and output.finish is FinishReason.LENGTH:
                    output = await self._hand_over(request, output)
                self._outputs.append(output)
                self._report_soon()
        except surface.dead as error:
            self._fail(error)
        except surface.invalid as error:
            refused(InvalidRequest(f"vLLM rejected the request: {error}"))
        except TanghuluError as error:
            refused(error)
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises is this request's end, not the worker's
            _log.warning("vllm.request_failed", request=request.request_id, error=repr(error))
            refused(NodeUnavailable(f"vLLM failed to serve the request: {error!r}"))

    async def _hand_over(self, request: VllmRequest, last: Output) -> Output:
        """Wait until the prompt's blocks are in the store, so that another worker can continue.

        The token drawn by vLLM is dropped: the next worker draws it again, as the first of the whole answer, with its
        grammar, its seed and its penalties. vLLM's own ways of splitting the phases do the same.
        """
        await self._stored(request.block_hashes)
        name = request.request_id
        self._handed.append(KvExport(name, name, num_tokens=len(request.tokens)))
        return Output(name, finish=FinishReason.HANDED_OVER, cached_tokens=last.cached_tokens, loads=last.loads)

    def _ended(self, request_id: RequestId) -> None:
        self._tasks.pop(request_id, None)
        self._book.ended(request_id)
        self._report_soon()

    async def _answered(self) -> None:
        try:
            await self._surface.llm.is_sleeping()
        except self._surface.dead as error:
            self._fail(error)
        else:
            self._report_soon()

    def _fail(self, error: BaseException) -> None:
        if not self._failed:
            self._failed = True
            self._on_failure(error)

    # --- reports

    def _report_soon(self) -> None:
        if not self._reporting and not self._failed:
            self._reporting = True
            self._loop.call_soon(self._report)

    def _report(self) -> None:
        self._reporting = False
        outputs, self._outputs = self._outputs, []
        events, self._events = self._events, []
        handed, self._handed = tuple(self._handed), []
        self._on_report(StepReport(StepResult(tuple(outputs), kv_events=tuple(events)), self.load(), handed))


class CachedNames:
    """The names of the cached blocks, with the number of blocks of each."""

    def __init__(self) -> None:
        self._blocks: dict[BlockHash, int] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def names(self) -> list[BlockHash]:
        """The names of all cached blocks."""
        return list(self._blocks)

    def num_leading(self, names: Sequence[BlockHash]) -> int:
        """Return the number of leading ``names`` that are cached."""
        return next((i for i, name in enumerate(names) if name not in self._blocks), len(names))

    def apply(self, change: KvChange) -> list[KvEvent]:
        """Apply one of vLLM's events; returns the changes in the set of names."""
        events = []
        if change.cleared:
            events += [KvEvent(KvEventKind.REMOVED, name) for name in self._blocks]
            self._blocks.clear()
        for name in change.stored:
            count = self._blocks.get(name, 0)
            self._blocks[name] = count + 1
            if not count:
                events.append(KvEvent(KvEventKind.STORED, name))
        for name in change.removed:
            count = self._blocks.get(name, 0)
            if count > 1:
                self._blocks[name] = count - 1
            elif count:
                del self._blocks[name]
                events.append(KvEvent(KvEventKind.REMOVED, name))
        return events

    def check(self) -> None:
        assert all(count > 0 for count in self._blocks.values())
