"""One engine server as a worker: the `AnySession` of the registry over the engine's HTTP API.

Submissions are HTTP streams; their tokens, the engine's KV events and its load leave as steps, like those of our own
workers. A look each second at the server's health and metrics is its beat: it counts while the engine makes progress
with our requests, or has none, so that a hung engine behind a living API is noticed. A server that refuses connections,
or states that its engine has ended, ends the session and all its requests with it, even where their streams stay open
(vLLM leaves them so at SIGTERM).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog
from msgspec import structs

from tanghulu.auth.cluster_secret import ClusterSecret
from tanghulu.auth.credentials import TlsFiles
from tanghulu.conductor.dispatch.lifecycle import SubmitTo
from tanghulu.conductor.engines.client import EngineClient, EngineGone
from tanghulu.conductor.engines.dialect import AnswerPiece, EngineCall, EngineDialect, served_models
from tanghulu.conductor.engines.events import VllmFollower
from tanghulu.conductor.engines.load import EngineBook
from tanghulu.conductor.engines.model import ModelFolders, ServerFacts, card_of
from tanghulu.conductor.engines.names import BlockNames, NamingDecoder
from tanghulu.conductor.engines.servers import EngineServer
from tanghulu.conductor.engines.sglang import SglangDialect
from tanghulu.conductor.engines.vllm import VllmDialect
from tanghulu.conductor.index.assumed import AssumedBlocks
from tanghulu.conductor.routing.requests import GenerationRequest
from tanghulu.errors import DeadlineExceeded, NodeUnavailable, Overloaded, TanghuluError
from tanghulu.hashing import Tokens, TokenSequence
from tanghulu.rpc.wire import Failure
from tanghulu.runtime.extras import install_command, missing_modules
from tanghulu.runtime.tasks import cancelled
from tanghulu.session.messages import SessionWelcome, StepOutput
from tanghulu.session.model_card import ModelCard
from tanghulu.session.outputs import FinishReason, KvChange, KvSource, Output, PrefixHolder
from tanghulu.types import RequestId

#: The engines' dialects by name.
DIALECTS: dict[str, EngineDialect] = {each.engine: each for each in (VllmDialect(), SglangDialect())}
_log = structlog.get_logger(__name__)
#: Seconds between two looks at a server, the longest of each call of one, and those within which a step comes.
LOOK_S, LOOK_DEADLINE_S, BEAT_S = 1.0, 4.0, 3.0
#: Looks between two readings of a server's adapters.
_ADAPTER_LOOKS = 5
#: Prompts held by prefill servers at a time; vLLM frees each after half a minute by itself.
MAX_EXPORTS = 4096
#: What vLLM's connectors want to know of a prompt whose KV goes to another server.
_PREFILL = {
    **{"do_remote_decode": True, "do_remote_prefill": False},
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}
#: Seconds for which a server without KV events is assumed to keep a prompt's blocks.
ASSUMED_S = 600.0


@dataclass
class EngineContext:
    """State shared by the sessions of one conductor. ``exports`` are vLLM's parameters of handed-over prompts."""

    secret: ClusterSecret
    tls: TlsFiles
    on_adapters: Callable[[EngineServer, Collection[str]], None] = lambda server, names: None
    folders: ModelFolders = field(default_factory=ModelFolders)
    exports: dict[int, dict[str, Any]] = field(default_factory=dict)
    num_exports: int = 0

    def export(self, parameters: dict[str, Any] | None) -> int:
        """Keep the parameters of a prompt for the decode server; return their number, 0 for none."""
        if parameters is None:
            return 0
        self.num_exports += 1
        self.exports[self.num_exports] = parameters
        while len(self.exports) > MAX_EXPORTS:
            del self.exports[next(iter(self.exports))]
        return self.num_exports


@dataclass(frozen=True, slots=True)
class _Described:
    """A server once it is described."""

    facts: ServerFacts
    card: ModelCard
    names: BlockNames


@dataclass(slots=True)
class _Running:
    """A request at the server."""

    call: EngineCall
    sequence: TokenSequence
    held_tokens: int  # of its prompt, in the server's cache when it was sent
    generated: list[int] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


class EngineSession:
    """The session with ``server``, of which ``dialect`` is the API."""

    counts_late = True

    def __init__(self, server: EngineServer, dialect: EngineDialect, context: EngineContext) -> None:
        """Open nothing yet. Raises ConfigError for an unreadable file with an API key."""
        self.server, self._dialect, self._context = server, dialect, context
        self._client = EngineClient(server, context.tls)
        self._loop = asyncio.get_running_loop()
        self._described: _Described | None = None
        self._book = EngineBook(0, 1)
        self._follower: VllmFollower | None = None
        self._assumed: AssumedBlocks | None = None
        self._running: dict[str, _Running] = {}
        self._outputs: list[Output] = []
        self._changes: list[KvChange] = []
        self._num_changes = 0
        self._snapshot = self._beat = False
        self._end: TanghuluError | None = None
        self._wake = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._progress: object = None
        self._tasks: set[asyncio.Task[None]] = set()

    # --- the registry's side

    async def describe(self) -> ModelCard:
        """Return the card of the model, read from its folder and checked against the server's own tokens.

        Raises NodeUnavailable, DeadlineExceeded, ModelUnsupported.
        """
        context = self._context
        facts = await self._dialect.facts(self._client)
        card = await card_of(self._client, facts, context.folders, context.secret)
        names = BlockNames(card, facts.num_blocks, context.secret.naming_key, self.server.adapter)
        self._described = _Described(facts, card, names)
        self._book = EngineBook(facts.num_blocks, card.block_tokens, facts.max_num_seqs)
        if not self.server.adapter:
            context.on_adapters(self.server, facts.adapters)
        return card

    @property
    def _known(self) -> _Described:
        assert self._described is not None, "describe comes first"
        return self._described

    async def connect(self) -> SessionWelcome:
        """Begin to look at the server and to follow its events; return its welcome. Raises NodeUnavailable."""
        facts, names = self._known.facts, self._known.names
        await self._look()
        if self._end is not None:
            raise self._end
        if facts.events and not missing_modules("vllm"):
            decoder = partial(NamingDecoder, names)
            self._follower = VllmFollower(self.server.id, facts.events, self._on_change, decoder)
            self._start(self._follower.run())
        elif facts.caches:
            hint = install_command("vllm") if facts.events else "start it with --kv-events-config"
            _log.info("engine.without_events", worker=self.server.id, hint=hint)
            self._assumed = AssumedBlocks(ASSUMED_S, max(facts.num_blocks, 1024))
        self._start(self._watch())
        return self._welcome()

    def request_snapshot(self) -> None:
        """Have a snapshot of the known cache come among the steps."""
        self._snapshot = True
        self._wake.set()

    async def steps(self) -> AsyncGenerator[StepOutput | SessionWelcome, None]:
        """Yield steps and requested snapshots; ends with the error that ended the session."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            outputs, self._outputs = self._outputs, []
            changes, self._changes = tuple(self._changes), []
            if outputs or changes or self._beat:
                self._beat = False
                first, self._num_changes = self._num_changes, self._num_changes + len(changes)
                yield StepOutput(outputs, first, changes, self._book.load(), self._book.num_submits)
            if self._snapshot:
                self._snapshot = False
                yield self._welcome()
            if self._end is not None:
                raise self._end

    def submit(
        self, request: GenerationRequest, to: SubmitTo, tokens: Tokens, holder: PrefixHolder | None, moved: bool
    ) -> int:
        """Send the request; return its number. A refusal comes among the steps."""
        names, num_generated = self._known.names, len(tokens) - len(request.prompt)
        most = self._known.facts.context_length - len(request.prompt)  # other servers of the model may have more room
        stop = structs.replace(request.stop, max_new_tokens=min(request.stop.max_new_tokens, most))
        call = EngineCall(
            structs.replace(request, stop=stop),
            to.wire_id,
            tokens,
            num_generated,
            names.cache_salt(request.salt),
            self._known.facts.name,
            self.server.adapter,
            full_report=self._follower is not None and not self._follower.is_complete,
            seeded=self.server.seeds == "always" or (self.server.seeds == "given" and request.seed_given),
            hand_over=to.hand_over,
            kv_transfer=_PREFILL if to.hand_over else self._imported(to.source),
        )
        sequence = names.sequence(tokens, request.salt)
        held = names.num_held(sequence.block_hashes) * sequence.block_tokens
        running = self._running[to.wire_id] = _Running(call, sequence, min(held, len(tokens) - 1))
        number = self._book.add(to.wire_id, len(tokens), len(tokens) - running.held_tokens, self._loop.time())
        running.task = self._start(self._serve(running))
        return number

    def pull(self, name: str, tokens: Tokens, salt: bytes, source: KvSource) -> None:
        """Do nothing: a server fetches what it is handed when it gets the request."""

    def abort(self, wire_id: str) -> None:
        """End a request by closing its connection."""
        running = self._running.get(wire_id)
        if running is not None and running.task is not None:
            self._forget(running)
            running.task.cancel()

    def release(self, export_id: int) -> None:
        """Forget an export that will not be fetched: its server frees it when its lease ends."""
        self._context.exports.pop(export_id, None)

    async def probe(self, deadline_s: float) -> float:
        """Return the seconds for one token. Raises NodeUnavailable, DeadlineExceeded."""
        began_s, path = self._loop.time(), self._dialect.generate_path
        await self._client.call(path, self._dialect.probe(self._known.facts.name), deadline_s=deadline_s)
        return self._loop.time() - began_s

    async def drop_cache(self) -> int:
        """Have the server drop its cache; return the number of its known blocks. Raises NodeUnavailable."""
        try:
            await self._client.call(self._dialect.drop_path, {})
        except TanghuluError as error:
            raise NodeUnavailable(
                f"{self.server.url} did not drop its cache ({error.message}); vLLM offers that with "
                "VLLM_SERVER_DEV_MODE=1 only, on a private network"
            ) from error
        num_blocks = len(self._known.names.held)
        self._on_change(KvChange(cleared=True))
        return num_blocks

    def exactness(self, request: GenerationRequest) -> str:
        """Return the label of the request's continuation here."""
        return self._dialect.exactness(request.sampling, self.server.seeds == "always")

    async def close(self) -> None:
        """End all requests and close all connections."""
        await cancelled(*self._tasks, *([self._looking] if self._looking is not None else []))
        await self._client.close()

    # --- looks at the server

    async def _watch(self) -> None:
        for number in range(1, 1 << 62):
            await asyncio.sleep(LOOK_S)
            await self._look()
            if self._end is None and number % _ADAPTER_LOOKS == 0 and not self.server.adapter:
                with contextlib.suppress(TanghuluError):  # the next look shows what is wrong
                    self._context.on_adapters(self.server, (await served_models(self._client))[-1])

    async def _look(self) -> None:
        """Look at the server once for all concurrent callers; sets ``_end`` if it is gone."""
        if self._looking is None or self._looking.done():
            self._looking = self._loop.create_task(self._look_once())
        await asyncio.shield(self._looking)

    async def _look_once(self) -> None:
        try:
            await self._client.call(self._dialect.health_path, deadline_s=LOOK_DEADLINE_S)
            page = await self._client.call("/metrics", deadline_s=LOOK_DEADLINE_S, optional=True)
            figures = self._dialect.figures(page.decode(errors="replace"))
        except EngineGone as error:
            self._finish(error)
        except DeadlineExceeded:
            return
        except TanghuluError as error:
            if isinstance(error, Overloaded) and self._dialect.ends_unhealthy:
                self._finish(NodeUnavailable(f"the engine of {self.server.url} has ended: {error.message}"))
        except ValueError as error:
            _log.warning("engine.metrics_unreadable", worker=self.server.id, error=str(error))
        else:
            self._book.figures(figures)
            moved = figures.progress is None or figures.progress != self._progress
            self._progress = figures.progress
            if moved or not self._running:
                self._beat = True
                self._wake.set()

    def _finish(self, error: TanghuluError) -> None:
        self._end = self._end or error
        self._wake.set()

    # --- one request

    async def _serve(self, running: _Running) -> None:
        """Run the request to its end; any failure is its last output."""
        call = running.call
        try:
            call.check(self.server)
            await self._stream(running)
        except TanghuluError as error:
            await self._fail(running, error)
        except Exception as error:  # noqa: BLE001 - the end of this request, not of the session
            _log.exception("engine.request_failed", worker=self.server.id, request=call.name)
            await self._fail(running, NodeUnavailable(f"worker {self.server.id} cannot be followed: {error!r}"))

    async def _stream(self, running: _Running) -> None:
        call = running.call
        last: AnswerPiece | None = None
        cached: int | None = None
        stream = self._dialect.stream(self.server.id, call.request.sampling.num_logprobs or 0)
        events = self._client.events(
            self._dialect.generate_path, self._dialect.body(call), _headers(call), call.hand_over
        )
        async with contextlib.aclosing(events):
            async for batch in events:
                piece = stream.read_all(batch)
                cached = piece.cached_tokens if piece.cached_tokens is not None else cached
                if last is not None:
                    continue
                if piece.finish is not None:  # the counts follow
                    last = piece
                elif piece.tokens:
                    self._deliver(running, piece)
        if last is None:
            raise NodeUnavailable(f"worker {self.server.id} broke off the answer after {len(running.generated)} tokens")
        last.cached_tokens = cached
        if call.hand_over and last.finish is FinishReason.LENGTH:
            self._hand_over(running, last)
        else:
            self._deliver(running, last)

    def _hand_over(self, running: _Running, last: AnswerPiece) -> None:
        """Report the prompt as ready; its one token is drawn again by the decode server, as in vLLM's own ways."""
        call, export_id = running.call, self._context.export(last.kv_transfer)
        if not export_id:
            _log.warning("engine.nothing_handed_over", worker=self.server.id, hint="start it with a KV connector")
        address = str(self.server.address)
        output = Output(RequestId(call.name), finish=FinishReason.HANDED_OVER)
        output.source = KvSource(self.server.id, address, "", export_id, len(call.tokens))
        output.cached_tokens = running.held_tokens if last.cached_tokens is None else last.cached_tokens
        self._assume(running)
        self._forget(running)
        self._put(output)

    def _imported(self, source: KvSource | None) -> dict[str, Any] | None:
        return self._context.exports.pop(source.export_id, None) if source is not None else None

    def _deliver(self, running: _Running, piece: AnswerPiece) -> None:
        call = running.call
        is_more = len(running.generated) + len(piece.tokens) > call.max_tokens
        if is_more or max(piece.tokens, default=0) >= self._known.card.vocab_size:
            raise NodeUnavailable(f"worker {self.server.id} sent tokens that were not asked for: {piece.tokens[:16]}")
        if not running.generated and piece.tokens:
            self._assume(running)
        running.generated += piece.tokens
        if piece.tokens:
            self._book.tokens(call.name, len(piece.tokens), self._loop.time())
        cached = running.held_tokens if piece.cached_tokens is None else piece.cached_tokens
        output = Output(RequestId(call.name), piece.tokens, piece.finish, logprobs=piece.logprobs)
        output.cached_tokens = min(cached, len(call.request.prompt))
        if piece.finish is FinishReason.STOP and running.generated:
            output.stop_token = running.generated[-1]
        if piece.finish is not None:
            self._assume(running)
            self._forget(running)
        self._put(output)

    async def _fail(self, running: _Running, error: TanghuluError) -> None:
        if error.retryable and not isinstance(error, Overloaded):
            await self._look()  # the server's end is the end of all its requests, and counts as such
            if self._end is not None:
                return
        self._forget(running)
        self._put(Output(RequestId(running.call.name), finish=FinishReason.ERROR, failure=Failure.of(error)))

    def _assume(self, running: _Running) -> None:
        """Without events: assume that the server keeps the blocks of the request so far."""
        if self._assumed is None:
            return
        num_new = len(running.call.tokens) + len(running.generated) - 1 - len(running.sequence)
        if running.generated and num_new > 0:
            running.sequence.append(running.generated[:-1][-num_new:])
        now_s, names = self._loop.time(), list(running.sequence.block_hashes)
        for _, change in self._assumed.sweep(now_s):
            self._on_change(change)
        self._on_change(self._assumed.used(self.server.id, names, now_s))

    def _forget(self, running: _Running) -> None:
        self._running.pop(running.call.name, None)
        self._book.end(running.call.name)

    def _put(self, output: Output) -> None:
        self._outputs.append(output)
        self._wake.set()

    def _on_change(self, change: KvChange) -> None:
        if change.cleared or change.stored or change.removed:
            self._changes.append(self._known.names.apply(change))
            self._wake.set()

    # --- helpers

    def _welcome(self) -> SessionWelcome:
        held = tuple(self._known.names.held)
        return SessionWelcome(self.server.id, 0, held, self._num_changes, self._book.load(), BEAT_S)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _headers(call: EngineCall) -> dict[str, str]:
    origin = call.request.origin
    given = origin.x_request_id if origin is not None else ""
    headers = {"x-request-id": f"{given}-{call.name}" if given else call.name}
    if origin is not None:
        headers["traceparent"] = origin.trace.header
    return headers
