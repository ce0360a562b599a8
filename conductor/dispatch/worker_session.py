"""The connection to one worker: its card, one Session stream, the cache command. Protobuf stays in this file.

Where a dataclass and a message have the same fields by name, the message is made of the dataclass as it is. A session
writes through one bounded queue (gRPC allows one write at a time), so sending is a plain call. It ends when the stream
ends, when the worker breaks the protocol, or when it is closed; it is never repaired, but replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

import grpc.aio

from tanghulu.conductor.routing.cost import DecodeProfile, PrefillProfile
from tanghulu.conductor.routing.requests import (
    GenerationRequest,
    KvChange,
    KvSource,
    MeasuredRead,
    ModelCard,
    Output,
    OutputKind,
    PrefixSource,
    SamplingDefaults,
    SessionWelcome,
    Step,
    TokenLogprobs,
    WorkerLoad,
)
from tanghulu.errors import DeadlineExceeded, NodeUnavailable, Overloaded
from tanghulu.hashing import Tokens
from tanghulu.protos import session_pb2 as pb
from tanghulu.protos import session_pb2_grpc
from tanghulu.rpc import grpc_edge
from tanghulu.rpc.wire import error_of
from tanghulu.types import Address, BlockHash, Fingerprint, InstanceId

PROTOCOL_VERSION = 1
MAX_UNSENT = 65536
#: A prompt of 128k tokens is half a megabyte.
MAX_UNSENT_BYTES = 256 << 20
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

    def __init__(self, address: Address, conductor_id: str) -> None:
        self.address = address
        self._conductor_id = conductor_id
        self._channel = grpc_edge.channel(address)
        self._stub: Any = session_pb2_grpc.WorkerStub(self._channel)
        self._unsent: asyncio.Queue[pb.ToWorker] = asyncio.Queue(MAX_UNSENT)
        self._unsent_bytes = 0
        self._num_submits = 0
        self._call: Any = None
        self._writer: asyncio.Task[None] | None = None

    async def describe(self) -> ModelCard:
        """The card of the model that the worker serves. Raises NodeUnavailable or DeadlineExceeded."""
        async with grpc_edge.typed_errors(f"worker {self.address}"):
            return _card(await self._stub.Describe(pb.DescribeRequest(), timeout=CALL_DEADLINE_S))

    async def connect(self) -> SessionWelcome:
        """Open the stream; returns the worker's welcome. Raises NodeUnavailable or DeadlineExceeded."""
        self._call = self._stub.Session()
        async with grpc_edge.typed_errors(f"worker {self.address}"):
            try:
                async with asyncio.timeout(CALL_DEADLINE_S):
                    await self._call.write(pb.ToWorker(hello=self._hello()))
                    first = await self._call.read()
            except asyncio.InvalidStateError as error:
                raise NodeUnavailable(f"worker {self.address} ended the session at once") from error
            except TimeoutError as error:
                raise DeadlineExceeded(f"worker {self.address} did not welcome the session in time") from error
        if first is grpc.aio.EOF or not first.HasField("welcome"):
            raise NodeUnavailable(f"worker {self.address} began the session without a welcome")
        self._writer = asyncio.create_task(self._write())
        return _welcome(first.welcome)

    def request_snapshot(self) -> None:
        """Ask for a snapshot of the worker's cache; it comes among the steps. Raises Overloaded."""
        self._send(pb.ToWorker(hello=self._hello()))

    async def steps(self) -> AsyncGenerator[Step | SessionWelcome, None]:
        """The worker's steps, and snapshots that were asked for; ends by NodeUnavailable, however the stream ends."""
        async with grpc_edge.typed_errors(f"worker {self.address}"):
            while (message := await self._call.read()) is not grpc.aio.EOF:
                if message.HasField("step"):
                    yield _step(message.step)
                elif message.HasField("welcome"):
                    yield _welcome(message.welcome)
        raise NodeUnavailable(f"worker {self.address} ended the session")

    def submit(
        self,
        request: GenerationRequest,
        wire_id: str,
        tokens: Tokens,
        hand_over: bool,
        source: KvSource | None,
        holder: PrefixSource | None = None,
        moved: bool = False,
    ) -> int:
        """Send the request with ``tokens`` (prompt and generated so far). Raises Overloaded.

        One that was ``moved`` goes ahead of new ones there.

        Returns the submission's number, by which the worker's steps say whether their load holds it.
        """
        message = _submit(request, wire_id, tokens, hand_over, source)
        message.moved = moved
        if holder is not None:
            message.holder.CopyFrom(pb.PrefixHolder(**asdict(holder)))
        self._send(pb.ToWorker(submit=message))
        self._num_submits += 1
        return self._num_submits

    def abort(self, wire_id: str) -> None:
        """Have the worker end ``wire_id``. Raises Overloaded."""
        self._send(pb.ToWorker(abort=pb.Abort(request_id=wire_id)))

    def release(self, export_id: int) -> None:
        """Tell the worker that nobody will fetch this export. Raises Overloaded."""
        self._send(pb.ToWorker(release=pb.ReleaseExport(export_id=export_id)))

    async def probe(self, deadline_s: float) -> float:
        """Seconds that the engine took for one token. Raises NodeUnavailable, DeadlineExceeded or its own refusal."""
        async with grpc_edge.typed_errors(f"worker {self.address}"):
            reply = await self._stub.Probe(pb.ProbeRequest(deadline_s=deadline_s), timeout=deadline_s + 1)
        return float(reply.seconds)

    async def drop_cache(self) -> int:
        """Make the worker forget its unreferenced blocks; returns how many. Raises NodeUnavailable."""
        async with grpc_edge.typed_errors(f"worker {self.address}"):
            reply = await self._stub.DropCache(pb.DropCacheRequest(), timeout=CALL_DEADLINE_S)
        return int(reply.num_blocks)

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._writer
        if self._call is not None:
            self._call.cancel()
        await self._channel.close()

    def _hello(self) -> pb.SessionHello:
        return pb.SessionHello(conductor_id=self._conductor_id, protocol_version=PROTOCOL_VERSION)

    def _send(self, message: pb.ToWorker) -> None:
        num_bytes = self._unsent_bytes + message.ByteSize()
        if self._unsent.full() or num_bytes > MAX_UNSENT_BYTES:
            unsent = f"{self._unsent.qsize()} with {self._unsent_bytes} bytes are unsent"
            raise Overloaded(f"worker {self.address} takes no messages: {unsent}")
        self._unsent_bytes = num_bytes
        self._unsent.put_nowait(message)

    async def _write(self) -> None:
        # A stream that ended is noticed, with its reason, by the reading side.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                message = await self._unsent.get()
                self._unsent_bytes -= message.ByteSize()
                await self._call.write(message)


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
        sampling_defaults=_defaults(card),
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
    )


def _step(step: pb.StepOutput) -> Step:
    return Step(
        [_output(output) for output in step.outputs],
        step.event_sequence,
        tuple(_change(event) for event in step.kv_events),
        _load(step.load) if step.HasField("load") else None,
        step.submits_taken if step.HasField("submits_taken") else None,
    )


def _output(output: pb.RequestOutput) -> Output:
    finish = output.finish
    if finish == pb.FINISH_NONE and not output.logprobs:  # the common case, kept short
        return Output(output.request_id, list(output.tokens), cached_tokens=output.cached_tokens)
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
    )


def _change(event: pb.KvEvent) -> KvChange:
    stored = tuple(BlockHash(h) for h in event.stored)
    return KvChange(stored, tuple(BlockHash(h) for h in event.removed), event.cleared)


def _source(source: pb.KvSource) -> KvSource:
    return KvSource(
        InstanceId(source.instance_id), source.address, source.unix_path, source.export_id, source.num_tokens
    )


def _submit(
    request: GenerationRequest, wire_id: str, tokens: Tokens, hand_over: bool, source: KvSource | None
) -> pb.Submit:
    message = pb.Submit(
        request_id=wire_id,
        tokens=tokens.astype("<u4", copy=False).tobytes(),
        num_prompt_tokens=len(request.prompt),
        sampling=pb.Sampling(**asdict(request.sampling)),
        stop=pb.Stop(**asdict(request.stop)),
        salt=request.salt,
        hand_over=hand_over,
        priority=request.priority,
        client=request.client,
    )
    if source is not None:
        message.source.CopyFrom(pb.KvSource(**asdict(source)))
    return message
