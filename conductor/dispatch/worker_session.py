"""The connection to one worker: one stream of the fast lane, and by gRPC its card and commands. Protobuf stays here.

Where a record and a message have the same fields by name, the message is made of the record as it is. Sending is
a plain call, and bounded by what the worker has not taken; what the worker says is read only while it is listened to.
A session ends when the connection does, when the worker breaks the protocol, or when it is closed; it is never
repaired, but replaced.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tanghulu.auth.certificate_roles import WORKER
from tanghulu.auth.credentials import NOTHING_TO_SHOW, Credentials
from tanghulu.conductor.dispatch.lifecycle import SubmitTo
from tanghulu.conductor.routing.cost import DecodeProfile, PrefillProfile
from tanghulu.conductor.routing.requests import (
    BegunExport,
    GenerationRequest,
    KvChange,
    KvSource,
    MeasuredRead,
    ModelCard,
    Output,
    OutputKind,
    PrefixSource,
    PromptLogprobs,
    SamplingDefaults,
    SessionWelcome,
    Step,
    TokenLogprobs,
    WorkerLoad,
)
from tanghulu.conductor.stories.story import WorkerPhases
from tanghulu.errors import DeadlineExceeded, NodeUnavailable, TanghuluError
from tanghulu.hashing import Tokens
from tanghulu.protos import session_pb2 as pb
from tanghulu.protos import session_pb2_grpc
from tanghulu.rpc import greeting, grpc_edge
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.fast_client import Reply
from tanghulu.rpc.methods import SESSION
from tanghulu.rpc.versions import PROTOCOL_VERSION
from tanghulu.rpc.wire import error_of
from tanghulu.types import Address, BlockHash, Fingerprint, InstanceId

#: What waits for a worker that does not read. A prompt of 128k tokens is half a megabyte.
MAX_UNSENT_BYTES = 256 << 20
#: What a worker may say before it is listened to; then nothing more is read from it.
MAX_UNHEARD = 256
CALL_DEADLINE_S = 10.0

_KINDS = {
    pb.FINISH_NONE: OutputKind.TOKENS,
    pb.FINISH_STOP: OutputKind.STOP,
    pb.FINISH_LENGTH: OutputKind.LENGTH,
    pb.FINISH_HANDED_OVER: OutputKind.HANDED_OVER,
    pb.FINISH_ABORTED: OutputKind.ABORTED,
    pb.FINISH_ERROR: OutputKind.ERROR,
}


class WorkerSession:
    """One stream to one worker. ``connect`` opens it; iterate ``steps`` until it ends; then ``close``."""

    def __init__(self, address: Address, conductor_id: str, credentials: Credentials = NOTHING_TO_SHOW) -> None:
        self.address = address
        self._conductor_id = conductor_id
        self._channel = grpc_edge.channel(address, tls=credentials.tls.to(WORKER))
        self._credentials = credentials.to(address)
        self._shown = self._credentials.metadata
        self._stub: Any = session_pb2_grpc.WorkerStub(self._channel)
        self._num_submits = 0
        self._connection: AsyncFastConnection | None = None
        self._call_id = 0
        self._unheard: deque[Reply[pb.FromWorker] | TanghuluError] = deque()
        self._is_paused = False
        self._listener: asyncio.Future[None] | None = None

    async def describe(self) -> ModelCard:
        """The card of the model that the worker serves. Raises NodeUnavailable or DeadlineExceeded."""
        async with grpc_edge.typed_errors(f"worker {self.address}"):
            return _card(await self._stub.Describe(pb.DescribeRequest(), timeout=CALL_DEADLINE_S, metadata=self._shown))

    async def connect(self) -> SessionWelcome:
        """Open the stream; returns the worker's welcome. Raises NodeUnavailable, DeadlineExceeded or Unauthorized."""
        connection = self._connection = await AsyncFastConnection.connect(
            self.address, shortcut=True, tls=self._credentials.tls.to(WORKER)
        )
        try:
            async with asyncio.timeout(CALL_DEADLINE_S):
                await greeting.show(connection, self._credentials, CALL_DEADLINE_S)
                hello = pb.ToWorker(hello=self._hello())
                self._call_id = connection.stream(SESSION.number, hello, pb.FromWorker, self._hear)
                first = await self._next()
        except TimeoutError as error:
            raise DeadlineExceeded(f"worker {self.address} did not welcome the session in time") from error
        if not first.HasField("welcome"):
            raise NodeUnavailable(f"worker {self.address} began the session without a welcome")
        return _welcome(first.welcome)

    def request_snapshot(self) -> None:
        """Ask for a snapshot of the worker's cache; it comes among the steps. Raises Overloaded."""
        self._send(pb.ToWorker(hello=self._hello()))

    async def steps(self) -> AsyncGenerator[Step | SessionWelcome, None]:
        """The worker's steps, and snapshots that were asked for; ends by what ended the stream, as NodeUnavailable."""
        while True:
            message = await self._next()
            if message.HasField("step"):
                yield _step(message.step)
            elif message.HasField("welcome"):
                yield _welcome(message.welcome)

    def _hear(self, said: Reply[pb.FromWorker] | TanghuluError) -> None:
        """Keep what the worker says, or why it says nothing more, for the listener."""
        self._unheard.append(said)
        if self._listener is not None and not self._listener.done():
            self._listener.set_result(None)
        if len(self._unheard) >= MAX_UNHEARD and not self._is_paused and self._connection is not None:
            self._is_paused = True
            self._connection.pause_reading()

    async def _next(self) -> pb.FromWorker:
        """The worker's next message. Raises what ended the stream."""
        if not self._unheard:
            if self._is_paused:
                assert self._connection is not None, "it was paused"
                self._is_paused = False
                self._connection.resume_reading()
            self._listener = asyncio.get_running_loop().create_future()
            await self._listener
        said = self._unheard.popleft()
        if isinstance(said, TanghuluError):
            self._unheard.append(said)  # it stays so
            raise said
        return said.message

    def submit(
        self,
        request: GenerationRequest,
        to: SubmitTo,
        tokens: Tokens,
        holder: PrefixSource | None = None,
        moved: bool = False,
    ) -> int:
        """Send the request with ``tokens`` (prompt and generated so far), as ``to`` says. Raises Overloaded.

        One that was ``moved`` goes ahead of new ones there.

        Returns the submission's number, by which the worker's steps say whether their load holds it.
        """
        message = _submit(request, to, tokens)
        message.moved, message.ahead = moved, to.ahead
        if holder is not None:
            message.holder.CopyFrom(pb.PrefixHolder(**_fields(holder)))
        self._send(pb.ToWorker(submit=message))
        self._num_submits += 1
        return self._num_submits

    def pull(self, name: str, tokens: Tokens, salt: bytes, source: KvSource) -> None:
        """Have the worker fetch the KV of ``tokens``, under ``name``, while another computes it. Raises Overloaded."""
        message = pb.PullAhead(name=name, tokens=_bytes_of(tokens), salt=salt, source=pb.KvSource(**_fields(source)))
        self._send(pb.ToWorker(pull=message))

    def abort(self, wire_id: str) -> None:
        """Have the worker end the request or the pull ``wire_id``. Raises Overloaded."""
        self._send(pb.ToWorker(abort=pb.Abort(request_id=wire_id)))

    def release(self, export_id: int) -> None:
        """Tell the worker that nobody will fetch this export. Raises Overloaded."""
        self._send(pb.ToWorker(release=pb.ReleaseExport(export_id=export_id)))

    async def probe(self, deadline_s: float) -> float:
        """Seconds that the engine took for one token. Raises NodeUnavailable, DeadlineExceeded or its own refusal."""
        async with grpc_edge.typed_errors(f"worker {self.address}"):
            asked = pb.ProbeRequest(deadline_s=deadline_s)
            reply = await self._stub.Probe(asked, timeout=deadline_s + 1, metadata=self._shown)
        return float(reply.seconds)

    async def drop_cache(self) -> int:
        """Make the worker forget its unreferenced blocks; returns how many. Raises NodeUnavailable."""
        async with grpc_edge.typed_errors(f"worker {self.address}"):
            asked = pb.DropCacheRequest()
            reply = await self._stub.DropCache(asked, timeout=CALL_DEADLINE_S, metadata=self._shown)
        return int(reply.num_blocks)

    async def close(self) -> None:
        """Hang up, whatever the worker has not taken: with the session all that it was asked for ends."""
        if self._connection is not None:
            self._connection.abort()
            await self._connection.close()
        await self._channel.close()

    def _hello(self) -> pb.SessionHello:
        return pb.SessionHello(conductor_id=self._conductor_id, protocol_version=PROTOCOL_VERSION)

    def _send(self, message: pb.ToWorker) -> None:
        assert self._connection is not None, "it is connected"
        self._connection.send_on(self._call_id, SESSION.number, message, MAX_UNSENT_BYTES)


def _card(card: pb.ModelCard) -> ModelCard:
    return ModelCard(
        model=card.model,
        fingerprint=Fingerprint(card.fingerprint),
        block_hash=card.block_hash or "xxh3_128",
        block_tokens=card.block_tokens,
        context_length=card.context_length,
        vocab_size=card.vocab_size,
        eos_token_ids=tuple(card.eos_token_ids),
        tokenizer_json_zlib=card.tokenizer_json_zlib,
        chat_template=card.chat_template,
        bos_token=card.bos_token,
        eos_token=card.eos_token,
        add_bos=card.add_bos,
        block_bytes=card.block_bytes,
        kv_dtype=card.dtype,
        sampling_defaults=_defaults(card),
        secret_check=card.secret_check,
    )


def _defaults(card: pb.ModelCard) -> SamplingDefaults:
    if not card.HasField("sampling_defaults"):
        return SamplingDefaults()
    defaults = card.sampling_defaults
    return SamplingDefaults(
        defaults.temperature, defaults.top_p, defaults.top_k, defaults.min_p, defaults.repetition_penalty
    )


def _welcome(welcome: pb.SessionWelcome) -> SessionWelcome:
    return SessionWelcome(
        InstanceId(welcome.instance_id),
        welcome.generation,
        tuple(BlockHash(h) for h in welcome.cached_blocks),
        welcome.event_sequence,
        _load(welcome.load),
        welcome.beat_s,
    )


def _load(load: pb.Load) -> WorkerLoad:
    costs = load.costs if load.HasField("costs") else None
    prefill = decode = None
    if costs is not None:
        prefill = PrefillProfile(costs.prefill_fixed_s, costs.prefill_token_s, costs.prefill_pair_s)
    if costs is not None and costs.decode_fixed_s:
        decode = DecodeProfile(costs.decode_fixed_s, costs.decode_sequence_s, costs.decode_context_s)
    return WorkerLoad(
        load.num_running,
        load.num_waiting,
        load.blocks_total,
        load.blocks_free,
        load.prefill_tokens_waiting,
        load.prefill_tokens_per_s,
        load.decode_step_s,
        load.store_bytes_per_s,
        load.peer_bytes_per_s,
        prefill,
        decode,
        tuple(MeasuredRead(r.address, r.num_bytes, r.seconds) for r in load.reads) if load.reads else (),
        load.prefill_pairs_waiting,
        load.max_num_seqs,
    )


def _step(step: pb.StepOutput) -> Step:
    return Step(
        [_output(output) for output in step.outputs],
        step.event_sequence,
        tuple(_change(event) for event in step.kv_events),
        _load(step.load) if step.HasField("load") else None,
        step.submits_taken if step.HasField("submits_taken") else None,
        tuple(BegunExport(b.request_id, _source(b.source)) for b in step.begun) if step.begun else (),
        [(scores.request_id, _scores(scores)) for scores in step.scores],
    )


def _scores(scores: pb.PromptScores) -> PromptLogprobs:
    """Read the numbers. Raises NodeUnavailable where they are no whole rows."""
    logprobs = np.frombuffer(scores.logprobs, "<f4")
    rows = len(logprobs)
    return PromptLogprobs(
        scores.position,
        logprobs,
        np.frombuffer(scores.ranks, "<u4"),
        _rows(scores.top_ids, "<u4", rows),
        _rows(scores.top_logprobs, "<f4", rows),
        _rows(scores.asked_logprobs, "<f4", rows),
    )


def _rows(data: bytes, kind: str, rows: int) -> npt.NDArray[Any]:
    values = np.frombuffer(data, kind)
    if rows == 0 or len(values) % rows:
        raise NodeUnavailable(f"the worker sent {len(values)} log probabilities for {rows} tokens")
    return values.reshape(rows, -1)


def _output(output: pb.RequestOutput) -> Output:
    finish = output.finish
    phases = _phases(output.phases) if output.HasField("phases") else None
    if finish == pb.FINISH_NONE and not output.logprobs:  # the common case, kept short
        return Output(output.request_id, list(output.tokens), cached_tokens=output.cached_tokens, phases=phases)
    kind = _KINDS.get(finish, OutputKind.ERROR)
    source = _source(output.source) if output.HasField("source") else None
    error = error_of(output.error) if output.HasField("error") else None
    if kind is OutputKind.HANDED_OVER and source is None:
        kind, error = OutputKind.ERROR, NodeUnavailable("the worker handed over without saying where the KV is")
    return Output(
        output.request_id,
        list(output.tokens),
        kind,
        error,
        source,
        output.cached_tokens,
        output.stop_token,
        tuple(TokenLogprobs(tuple(p.token_ids), tuple(p.logprobs)) for p in output.logprobs),
        phases,
    )


def _phases(told: pb.PhaseTimes) -> WorkerPhases:
    seconds = (told.queue_s, told.kv_load_s, told.prefill_s, told.kv_store_s, told.decode_s)
    return WorkerPhases(*(s if 0 <= s < math.inf else 0.0 for s in seconds))


def _change(event: pb.KvEvent) -> KvChange:
    stored = tuple(BlockHash(h) for h in event.stored)
    return KvChange(stored, tuple(BlockHash(h) for h in event.removed), event.cleared)


def _source(source: pb.KvSource) -> KvSource:
    return KvSource(
        InstanceId(source.instance_id),
        source.address,
        source.unix_path,
        source.export_id,
        source.num_tokens,
        source.host_id,
    )


def _bytes_of(tokens: Tokens) -> bytes:
    return tokens.astype("<u4", copy=False).tobytes()


def _fields(value: Struct) -> dict[str, Any]:
    """The fields of a flat record."""
    return {name: getattr(value, name) for name in value.__struct_fields__}


def _submit(request: GenerationRequest, to: SubmitTo, tokens: Tokens) -> pb.Submit:
    message = pb.Submit(
        request_id=to.wire_id,
        tokens=_bytes_of(tokens),
        num_prompt_tokens=len(request.prompt),
        sampling=pb.Sampling(**_fields(request.sampling)),
        stop=pb.Stop(**_fields(request.stop)),
        salt=request.salt,
        hand_over=to.hand_over,
        priority=request.priority,
        client=request.client,
        weight=request.weight,
    )
    if request.origin is not None:
        message.traceparent, message.x_request_id = request.origin.trace.header, request.origin.x_request_id
    if request.scoring is not None:
        message.scoring.CopyFrom(pb.PromptScoring(**_fields(request.scoring)))
    if to.source is not None:
        message.source.CopyFrom(pb.KvSource(**_fields(to.source)))
    return message
