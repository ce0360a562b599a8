"""The edge between a session's protobuf messages and the engine's types."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable

import xxhash

from tanghulu.errors import InvalidRequest, TanghuluError
from tanghulu.hashing import TokenSequence, as_tokens, root_hash
from tanghulu.protos import session_pb2
from tanghulu.rpc.wire import status_of
from tanghulu.types import BlockHash, Fingerprint, RequestId
from tanghulu.workers.engine.block_pool import KvEvent, KvEventKind
from tanghulu.workers.engine.grammar import Grammar, GrammarCompiler, GrammarKind
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.engine.probe import PRIORITY
from tanghulu.workers.engine.requests import (
    EngineFinishReason,
    EngineRequest,
    PeerExport,
    PeerPrefix,
    SamplingParams,
    StopParams,
)
from tanghulu.workers.engine.step_result import Logprobs, RequestOutput
from tanghulu.workers.engine.thread import EngineLoad
from tanghulu.workers.sessions.beats import BEAT_S
from tanghulu.workers.weights.tokenizer_assets import TokenizerAssets

_FINISH = {
    None: session_pb2.FINISH_NONE,
    EngineFinishReason.STOP: session_pb2.FINISH_STOP,
    EngineFinishReason.LENGTH: session_pb2.FINISH_LENGTH,
    EngineFinishReason.HANDED_OVER: session_pb2.FINISH_HANDED_OVER,
    EngineFinishReason.ABORTED: session_pb2.FINISH_ABORTED,
}


class RequestFactory:
    """Makes engine requests of this worker's model from Submit messages; without ``grammars`` none may be asked for."""

    def __init__(
        self,
        fingerprint: Fingerprint,
        block_tokens: int,
        block_hash: str,
        eos_ids: Iterable[int],
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._fingerprint = fingerprint
        self._block_tokens = block_tokens
        self._block_hash = block_hash
        self._eos_ids = frozenset(eos_ids)
        self._grammars = grammars

    def request(self, submit: session_pb2.Submit) -> EngineRequest:
        """Make the request that ``submit`` describes; raises InvalidRequest if it is not valid."""
        root = root_hash(self._fingerprint, submit.salt, self._block_hash)
        sequence = TokenSequence(root, self._block_tokens, as_tokens(submit.tokens), self._block_hash)
        source = submit.source if submit.HasField("source") else None
        return EngineRequest(
            request_id=RequestId(submit.request_id),
            sequence=sequence,
            num_prompt_tokens=submit.num_prompt_tokens or len(sequence),
            sampling=_sampling(submit.sampling, submit.request_id),
            stop=self._stop(submit.stop),
            hold_kv=submit.hand_over,
            priority=submit.priority,
            client=submit.client,
            moved=submit.moved,
            peer=peer_of(source) if source is not None else None,
            holder=_holder(submit.holder) if submit.HasField("holder") else None,
            grammar=self._grammar(submit.sampling),
        )

    def probe(self, request_id: RequestId) -> EngineRequest:
        """Make a request of one token that leaves nothing behind; see `EngineProbe`."""
        root = root_hash(self._fingerprint, b"probe", self._block_hash)
        return EngineRequest(
            request_id=request_id,
            sequence=TokenSequence(root, self._block_tokens, (0,), self._block_hash),
            num_prompt_tokens=1,
            sampling=SamplingParams(temperature=0.0),
            stop=StopParams(max_new_tokens=1, ignore_eos=True),
            priority=PRIORITY,
            fetch_blocks=0,
        )

    def _grammar(self, sampling: session_pb2.Sampling) -> Grammar | None:
        kind = sampling.WhichOneof("grammar")
        if kind is None:
            return None
        if self._grammars is None:
            raise InvalidRequest("this worker's engine computes no text, so it cannot keep to a grammar")
        return self._grammars.compile(GrammarKind(kind), getattr(sampling, kind))

    def _stop(self, stop: session_pb2.Stop) -> StopParams:
        return StopParams(
            max_new_tokens=stop.max_new_tokens,
            eos_ids=self._eos_ids,
            stop_token_ids=frozenset(stop.stop_token_ids),
            ignore_eos=stop.ignore_eos,
            min_tokens=stop.min_tokens,
        )


def _sampling(sampling: session_pb2.Sampling, request_id: str) -> SamplingParams:
    # A request without a seed still draws the same tokens wherever it goes on: its id is the seed.
    seed = sampling.seed if sampling.HasField("seed") else xxhash.xxh3_64_intdigest(request_id.encode())
    return SamplingParams(
        repetition_penalty=sampling.repetition_penalty or 1.0,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=tuple(sampling.logit_bias.items()),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p or 1.0,
        min_p=sampling.min_p,
        seed=seed,
        logprobs=sampling.num_logprobs if sampling.HasField("num_logprobs") else None,
    )


def peer_of(source: session_pb2.KvSource) -> PeerExport:
    """Read where the KV is, as the engine carries it: ``address|unix path`` and the export's number."""
    return PeerExport(f"{source.address}|{source.unix_path}", str(source.export_id), source.num_tokens)


def _holder(holder: session_pb2.PrefixHolder) -> PeerPrefix:
    return PeerPrefix(f"{holder.address}|{holder.unix_path}", holder.num_blocks)


def split_instance(instance: str) -> tuple[str, str]:
    """Split the ``instance`` of a peer or a holder into its address and its unix path."""
    address, _, unix_path = instance.partition("|")
    if not address:
        raise InvalidRequest("a KV source without an address")
    return address, unix_path


def output_message(output: RequestOutput, source: session_pb2.KvSource | None) -> session_pb2.RequestOutput:
    """Make the message of one request's output of a step."""
    message = session_pb2.RequestOutput(
        request_id=output.request_id,
        tokens=output.tokens,
        finish=_FINISH[output.finish_reason],
        cached_tokens=min(output.num_cached_tokens, output.num_prompt_tokens),
        source=source,
    )
    if output.finish_reason is EngineFinishReason.STOP:
        message.stop_token = output.tokens[-1]
    if output.logprobs is not None:
        message.logprobs.append(_logprobs(output.logprobs))
    return message


def _logprobs(logprobs: Logprobs) -> session_pb2.TokenLogprobs:
    entries = (logprobs.chosen, *logprobs.top)
    return session_pb2.TokenLogprobs(token_ids=[e.token for e in entries], logprobs=[e.logprob for e in entries])


def error_message(request_id: str, error: TanghuluError) -> session_pb2.RequestOutput:
    """Make the message of a request that ended with ``error``."""
    return session_pb2.RequestOutput(request_id=request_id, finish=session_pb2.FINISH_ERROR, error=status_of(error))


def event_messages(events: Iterable[KvEvent]) -> list[session_pb2.KvEvent]:
    """Make the messages of KV events, in order, with runs of one kind in one message."""
    messages: list[session_pb2.KvEvent] = []
    for event in events:
        stored = event.kind is KvEventKind.STORED
        if not messages or bool(messages[-1].stored) != stored:
            messages.append(session_pb2.KvEvent())
        (messages[-1].stored if stored else messages[-1].removed).append(event.block_hash)
    return messages


def load_message(load: EngineLoad) -> session_pb2.Load:
    """Make the message that says how busy the worker is."""
    message = session_pb2.Load(
        num_running=load.num_running,
        num_waiting=load.num_waiting + load.num_fetching,
        blocks_total=load.blocks_total,
        blocks_free=load.blocks_available,
        prefill_tokens_waiting=load.pending_tokens,
        prefill_pairs_waiting=load.pending_pairs,
        prefill_tokens_per_s=load.speeds.prefill_tokens_per_s,
        decode_step_s=load.speeds.decode_step_s,
        store_bytes_per_s=load.speeds.store_bytes_per_s,
        peer_bytes_per_s=load.speeds.peer_bytes_per_s,
    )
    for read in load.reads:
        message.reads.add(address=read.address, num_bytes=read.num_bytes, seconds=read.seconds)
    if load.speeds.costs is not None:
        message.costs.CopyFrom(session_pb2.StepCosts(**dataclasses.asdict(load.speeds.costs)))
    return message


def welcome_message(
    instance_id: str, generation: int, hashes: Iterable[BlockHash], sequence: int, load: EngineLoad
) -> session_pb2.SessionWelcome:
    """Make the snapshot of the cache with which a session begins; its events go on from there."""
    return session_pb2.SessionWelcome(
        instance_id=instance_id,
        generation=generation,
        cached_blocks=list(hashes),
        event_sequence=sequence,
        load=load_message(load),
        beat_s=BEAT_S,
    )


def model_card(
    layout: KvLayout,
    assets: TokenizerAssets,
    *,
    name: str,
    fingerprint: Fingerprint,
    block_hash: str,
    num_blocks: int,
    context_length: int,
    vocab_size: int,
) -> session_pb2.ModelCard:
    """Describe the model to conductors: tokenizer, layout of blocks, and bounds."""
    return session_pb2.ModelCard(
        model=name,
        fingerprint=fingerprint,
        block_hash=block_hash,
        block_tokens=layout.block_tokens,
        context_length=context_length,
        vocab_size=vocab_size,
        dtype=layout.dtype,
        eos_token_ids=assets.eos_ids,
        tokenizer_json_zlib=zlib.compress(assets.tokenizer_json, 6),
        chat_template=assets.chat_template or "",
        bos_token=assets.bos_token or "",
        eos_token=assets.eos_token or "",
        add_bos=assets.add_bos,
        block_bytes=layout.block_bytes,
        num_blocks=num_blocks,
        sampling_defaults=session_pb2.SamplingDefaults(**dataclasses.asdict(assets.defaults)),
    )
