"""A worker that is real on the wire (fast lane behind a FastPort, real sockets) and a script behind it.

It says ``script`` token by token, one token of every request a step. A request that already has generated tokens
goes on at the right place, so a moved request must give the same text as an unmoved one.
"""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tanghulu.discovery.base import Instance
from tanghulu.errors import NodeUnavailable
from tanghulu.hashing import TokenSequence, root_hash
from tanghulu.rpc.fast_port import FastPort
from tanghulu.rpc.fast_server import NO_ANSWER, AnswerStream, FastService, Later, Peer
from tanghulu.rpc.wire import Failure
from tanghulu.session import messages as m
from tanghulu.session.load import WorkerLoad
from tanghulu.session.model_card import ModelCard
from tanghulu.session.outputs import FinishReason, KvChange, KvSource, Output, PhaseTimes, PromptScores, TokenLogprobs
from tanghulu.types import InstanceId, Role
from tests.discovery.memory import MemoryDiscovery

MODEL = "tiny"
BLOCK_TOKENS = 4
CONTEXT = 512
FINGERPRINT = bytes(range(16))
TEMPLATE = (
    "{% for message in messages %}\n<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}\n{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    """Every byte is a token, some pairs are merged; three special tokens at the end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "a"), ("l", "l"), ("Ã", "©")]
    vocab = {c: i for i, c in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    return tokenizer


TOKENIZER = byte_level_tokenizer()
EOS = TOKENIZER.token_to_id("<|endoftext|>")


@dataclass(eq=False)
class Running:
    """A request at the fake worker."""

    session: Session
    submit: m.Submit
    tokens: list[int]
    scored: bool = False

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.submit.num_prompt_tokens


@dataclass(eq=False)
class Session:
    stream: AnswerStream = field(default_factory=lambda: AnswerStream(lambda: None))
    event_sequence: int = 1

    def say(self, message: m.SessionWelcome | m.StepOutput) -> None:
        self.stream.send(m.FromWorker(message))


class FakeWorker:
    """``hold()`` makes it wait before each step; ``step()`` then lets it do one."""

    def __init__(self, name: str, role: Role, run_dir: Path, script: str = "Hello, wörld! ") -> None:
        self.id = InstanceId(name)
        self.role = role
        self.attributes: dict[str, str] = {}
        self.script = TOKENIZER.encode(script).ids
        self.model = MODEL
        self.fingerprint = FINGERPRINT
        #: Fields of its card that differ from other fake workers'.
        self.card: dict[str, Any] = {}
        self.submits: list[m.Submit] = []
        self.aborts: list[str] = []
        self.releases: list[int] = []
        self.dropped = 0
        self.load = WorkerLoad(blocks_total=1000, blocks_free=1000)
        self.cached: set[bytes] = set()
        self.sessions: list[Session] = []
        self.die_after_tokens: int | None = None
        self.fail_sources = False
        #: Whether it knows of log probabilities of prompts.
        self.scores = True
        self.fail_with: Failure | None = None
        self.skip_sequence = 0
        self.probes = 0
        #: What it promises of its engine's heartbeat; 0: nothing. It sends none in any case.
        self.beat_s = 0.0
        self.num_emitted = 0
        #: What it tells of where a request's time went; None: nothing.
        self.phases: PhaseTimes | None = None
        #: What its steps say of the submissions that their load holds; None: nothing.
        self.taken: int | None = None
        self.changed = asyncio.Condition()
        self._running: dict[str, Running] = {}
        self._go = asyncio.Event()
        self._permits: int | None = None
        self._exports = 100
        self._service = FastService()
        self._by_peer: dict[Peer, Session] = {}
        self._fast_port = FastPort(self._service, run_dir, name)
        self._engine: asyncio.Task[None] | None = None
        self._registration: Any = None
        self._dead = False

    async def start(self, discovery: MemoryDiscovery | None = None) -> None:
        self._service.register(m.SESSION, self._receive)
        self._service.register(m.DESCRIBE, self._describe)
        self._service.register(m.PROBE, self._probe)
        self._service.register(m.DROP_CACHE, self._drop_cache)
        await self._fast_port.start("127.0.0.1", 0)
        self._engine = asyncio.create_task(self._run())
        if discovery is not None:
            self._registration = await discovery.register(self.instance)

    @property
    def instance(self) -> Instance:
        return Instance(self.id, self.role, self._fast_port.address, attributes=self.attributes)

    async def stop(self) -> None:
        if self._registration is not None:
            await self._registration.close()
        self.die()
        assert self._engine is not None
        await asyncio.gather(self._engine, return_exceptions=True)
        await self._fast_port.close(grace_s=0)

    async def unregister(self) -> None:
        await self._registration.close()
        self._registration = None

    def die(self) -> None:
        """End all streams at once, without a word about the requests."""
        self._dead = True
        self.end_sessions()
        assert self._engine is not None
        self._engine.cancel()

    def end_sessions(self) -> None:
        self._running.clear()
        for session in self.sessions:
            session.stream.end()
        self.sessions.clear()

    def hold(self) -> None:
        self._permits = 0

    def step(self, count: int = 1) -> None:
        assert self._permits is not None
        self._permits += count
        self._go.set()

    def release(self) -> None:
        self._permits = None
        self._go.set()

    async def until(self, condition: Any) -> None:
        """Wait until ``condition()`` holds; looked at whenever something changed here."""
        async with self.changed:
            async with asyncio.timeout(30):
                await self.changed.wait_for(condition)

    @property
    def num_running(self) -> int:
        return len(self._running)

    # --- the service

    def _describe(self, peer: Peer, request: m.DescribeRequest, _: memoryview) -> ModelCard:
        card = ModelCard(
            model=self.model,
            fingerprint=self.fingerprint,
            block_hash="xxh3_128",
            block_tokens=BLOCK_TOKENS,
            context_length=CONTEXT,
            vocab_size=TOKENIZER.get_vocab_size(),
            eos_token_ids=(EOS,),
            tokenizer_json_zlib=zlib.compress(TOKENIZER.to_str().encode()),
            chat_template=TEMPLATE,
            bos_token="<|im_start|>",
            eos_token="<|endoftext|>",
            add_bos=False,
            block_bytes=1024,
        )
        return structs.replace(card, **self.card)

    async def _probe(self, peer: Peer, request: m.ProbeRequest, _: memoryview) -> m.ProbeReply:
        """A token comes when the engine runs; one that is held hangs."""
        self.probes += 1
        async with self.changed:
            self.changed.notify_all()
        while self._permits is not None:  # noqa: ASYNC110 - it has no hook
            await asyncio.sleep(0.001)
        return m.ProbeReply(0.001)

    def _drop_cache(self, peer: Peer, request: m.DropCacheRequest, _: memoryview) -> m.DropCacheReply:
        self.dropped += 1
        num_blocks = len(self.cached)
        self.cached.clear()
        for session in self.sessions:
            self._tell(session, kv_events=(KvChange(cleared=True),))
        return m.DropCacheReply(num_blocks)

    def _receive(self, peer: Peer, message: m.ToWorker, _: memoryview) -> AnswerStream | Later:
        session = self._by_peer.get(peer)
        asyncio.get_running_loop().create_task(self._notify())
        if session is not None:
            self._take(session, message.message)
            return NO_ANSWER
        if self._dead:
            raise NodeUnavailable("dead")
        assert isinstance(message.message, m.SessionHello)
        assert message.message.protocol_version == 1
        session = self._by_peer[peer] = Session()
        peer.on_close.append(lambda: self._left(session))
        self.sessions.append(session)
        asyncio.get_running_loop().call_soon(session.say, self._welcome(session))
        return session.stream

    def _left(self, session: Session) -> None:
        self._running = {k: r for k, r in self._running.items() if r.session is not session}
        if session in self.sessions:
            self.sessions.remove(session)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def _welcome(self, session: Session) -> m.SessionWelcome:
        return m.SessionWelcome(self.id, 0, tuple(sorted(self.cached)), session.event_sequence, self.load, self.beat_s)

    def _take(self, session: Session, message: Any) -> None:
        match message:
            case m.SessionHello():
                session.say(self._welcome(session))
            case m.Submit():
                self.submits.append(message)
                tokens = np.frombuffer(message.tokens, "<u4").tolist()
                self._running[message.request_id] = Running(session, message, tokens)
                self._go.set()
            case m.Abort():
                self.aborts.append(message.request_id)
                self._running.pop(message.request_id, None)
            case m.ReleaseExport():
                self.releases.append(message.export_id)

    # --- the engine

    async def _run(self) -> None:
        while True:
            await self._go.wait()
            self._go.clear()
            while self._running and (self._permits is None or self._permits > 0):
                if self._permits is not None:
                    self._permits -= 1
                self._step()
                async with self.changed:
                    self.changed.notify_all()
                await asyncio.sleep(0)

    def _step(self) -> None:
        by_session: dict[Session, list[Output]] = {}
        stored: list[bytes] = []
        for running in list(self._running.values()):
            if self.die_after_tokens is not None and self.num_emitted >= self.die_after_tokens:
                self.die()
                return
            self._score(running)
            by_session.setdefault(running.session, []).append(self._advance(running, stored))
        events = (KvChange(stored=tuple(stored)),) if stored else ()
        for session in self.sessions:
            self._tell(session, outputs=by_session.get(session, []), kv_events=events, load=self.load)

    def _tell(self, session: Session, **step: Any) -> None:
        if step.get("kv_events"):
            step["event_sequence"] = session.event_sequence + self.skip_sequence
            session.event_sequence += len(step["kv_events"]) + self.skip_sequence
            self.skip_sequence = 0
        session.say(m.StepOutput(**step, submits_taken=self.taken))

    def reports(self, **load: Any) -> None:
        """Have other figures in its load from now on."""
        self.load = structs.replace(self.load, **load)

    def report(self) -> None:
        """Tell every conductor the load, in a step of its own."""
        for session in self.sessions:
            self._tell(session, load=self.load)

    def _advance(self, running: Running, stored: list[bytes]) -> Output:
        submit = running.submit
        request_id = submit.request_id
        if self.fail_with is not None or (self.fail_sources and submit.source is not None):
            del self._running[request_id]
            failure = self.fail_with or Failure("TRANSFER_FAILED", "the KV did not come")
            return Output(request_id, finish=FinishReason.ERROR, failure=failure)
        cached = self._take_blocks(running, stored)
        at = running.num_generated
        token = self.script[at % len(self.script)]
        if at >= len(self.script) and not submit.stop.ignore_eos:
            token = EOS
        running.tokens.append(token)
        self.num_emitted += 1
        output = Output(request_id, [token], cached_tokens=cached, phases=self.phases)
        if submit.sampling.num_logprobs is not None:
            top = range(submit.sampling.num_logprobs)
            asked = submit.sampling.logprob_token_ids
            probabilities = (-0.5, *(-1.0 - t for t in top), *(-7.0 for _ in asked))
            output.logprobs.append(TokenLogprobs((token, *top, *asked), probabilities))
        self._finish(running, token, output)
        return output

    def _score(self, running: Running) -> None:
        """Tell the prompt's log probabilities that are wanted, two tokens at a time: -p/8 at position p."""
        submit = running.submit
        if submit.scoring is None or running.scored or not self.scores:
            return
        running.scored = True
        num_top, asked = submit.scoring.num_top, len(submit.sampling.logprob_token_ids)
        for start in range(submit.scoring.start, submit.num_prompt_tokens, 2):
            positions = np.arange(start, min(start + 2, submit.num_prompt_tokens))
            shape = (len(positions), num_top)
            part = PromptScores(
                request_id=submit.request_id,
                position=start,
                logprobs=(-positions / 8).astype("<f4").tobytes(),
                ranks=np.full(len(positions), 3, "<u4").tobytes(),
                top_ids=np.broadcast_to(np.arange(num_top, dtype="<u4"), shape).tobytes(),
                top_logprobs=np.broadcast_to(-np.arange(num_top, dtype="<f4") / 16, shape).tobytes(),
                named_logprobs=np.full((len(positions), asked), -7, "<f4").tobytes(),
            )
            self._tell(running.session, scores=[part])

    def _take_blocks(self, running: Running, stored: list[bytes]) -> int:
        block_hash = self.card.get("block_hash", "xxh3_128")
        root = root_hash(self.fingerprint, running.submit.salt, block_hash)
        hashes = TokenSequence(root, BLOCK_TOKENS, running.tokens, block_hash).block_hashes
        cached = 0
        for each in hashes:
            if each in self.cached:
                cached += BLOCK_TOKENS
            else:
                self.cached.add(each)
                stored.append(each)
        return min(cached, len(running.tokens) - 1)

    def _finish(self, running: Running, token: int, output: Output) -> None:
        stop = running.submit.stop
        if (token == EOS and not stop.ignore_eos) or token in stop.stop_token_ids:
            output.finish, output.stop_token = FinishReason.STOP, token
        elif running.num_generated >= stop.max_new_tokens:
            output.finish = FinishReason.LENGTH
        elif running.submit.hand_over:
            self._exports += 1
            output.finish = FinishReason.HANDED_OVER
            address = str(self._fast_port.address)
            output.source = KvSource(self.id, address, "", self._exports, len(running.tokens) - 1)
        if output.finish is not None:
            del self._running[running.submit.request_id]
