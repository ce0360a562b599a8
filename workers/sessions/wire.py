"""The edge between a session's protobuf messages and the engine's types."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Iterator

import xxhash
from msgspec import structs

from tanghulu.errors import InvalidRequest, TanghuluError
from tanghulu.hashing import TokenSequence, as_tokens, root_hash
from tanghulu.protos import session_pb2
from tanghulu.rpc.wire import status_of
from tanghulu.runtime.process import host_id
from tanghulu.types import BlockHash, Fingerprint, RequestId
from tanghulu.workers.engine.block_pool import KvEvent, KvEventKind
from tanghulu.workers.engine.grammar import Grammar, GrammarCompiler, GrammarKind
from tanghulu.workers.engine.kv_layout import BlockShape
from tanghulu.workers.engine.phase_times import PhaseTimes
from tanghulu.workers.engine.probe import PRIORITY
from tanghulu.workers.engine.prompt_scores import PromptScores
from tanghulu.workers.engine.requests import (
    EngineFinishReason,
    EngineRequest,
    PeerExport,
    PeerPrefix,
    PromptScoring,
    SamplingParams,
    StopParams,
)
from tanghulu.workers.engine.speed import PeerReadTotal
from tanghulu.workers.engine.step_result import Logprobs, RequestOutput
from tanghulu.workers.engine.thread import EngineLoad
from tanghulu.workers.sessions.beats import BEAT_S
from tanghulu.workers.weights.tokenizer_assets import TokenizerAssets

#: Of one message of a prompt's log probabilities.
MAX_SCORES_BYTES = 1 << 20
#: Of the hashes in a snapshot; a frame holds 16 MiB.
MAX_WELCOME_BYTES = 14 << 20
_HASH_HEAD_BYTES = 2

_FINISH = {
    EngineFinishReason.STOP: session_pb2.FINISH_STOP,
    EngineFinishReason.LENGTH: session_pb2.FINISH_LENGTH,
    EngineFinishReason.HANDED_OVER: session_pb2.FINISH_HANDED_OVER,
    EngineFinishReason.ABORTED: session_pb2.FINISH_ABORTED,
    EngineFinishReason.GRAMMAR_FAILED: session_pb2.FINISH_ERROR,
}
_GRAMMAR_FAILED = InvalidRequest(
    "the grammar that the request asks for cannot be kept: no text can go on under it where this one stands; "
    "does its schema refer to nothing but itself?"
)


class RequestFactory:
    """Makes engine requests of this worker's model from Submit messages; without ``grammars`` none may be asked for."""

    def __init__(
        self,
        fingerprint: Fingerprint,
        block_tokens: int,
        block_hash: str,
        eos_ids: Iterable[int],
        grammars: GrammarCompiler | None = None,
        naming_key: bytes = b"",
    ) -> None:
        self._fingerprint = fingerprint
        self._block_tokens = block_tokens
        self._block_hash = block_hash
        self._eos_ids = frozenset(eos_ids)
        self._grammars = grammars
        self._naming_key = naming_key

    def request(self, submit: session_pb2.Submit) -> EngineRequest:
        """Make the request that ``submit`` describes; raises InvalidRequest if it is not valid."""
        root = self._root(submit.salt)
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
            weight=submit.weight or 1.0,
            moved=submit.moved,
            ahead=RequestId(submit.ahead) if submit.ahead else None,
            peer=peer_of(source) if source is not None else None,
            holder=_holder(submit.holder) if submit.HasField("holder") else None,
            grammar=self._grammar(submit.sampling),
            scoring=_scoring(submit.scoring) if submit.HasField("scoring") else None,
        )

    def pulled(self, pull: session_pb2.PullAhead) -> tuple[TokenSequence, PeerExport]:
        """Make the prompt that ``pull`` names, and where its KV is computed."""
        root = self._root(pull.salt)
        sequence = TokenSequence(root, self._block_tokens, as_tokens(pull.tokens), self._block_hash)
        return sequence, peer_of(pull.source)

    def probe(self, request_id: RequestId) -> EngineRequest:
        """Make a request of one token that leaves nothing behind; see `EngineProbe`."""
        root = self._root(b"probe")
        return EngineRequest(
            request_id=request_id,
            sequence=TokenSequence(root, self._block_tokens, (0,), self._block_hash),
            num_prompt_tokens=1,
            sampling=SamplingParams(temperature=0.0),
            stop=StopParams(max_new_tokens=1, ignore_eos=True),
            priority=PRIORITY,
            fetch_blocks=0,
        )

    def _root(self, salt: bytes) -> BlockHash:
        return root_hash(self._fingerprint, salt, self._block_hash, self._naming_key)

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
        logprob_token_ids=tuple(sampling.logprob_token_ids),
    )


def _scoring(scoring: session_pb2.PromptScoring) -> PromptScoring:
    return PromptScoring(scoring.start, scoring.num_top)


def peer_of(source: session_pb2.KvSource) -> PeerExport:
    """Read where the KV is, as the engine carries it: ``address|unix path`` and the export's number."""
    return PeerExport(_instance(source), str(source.export_id), source.num_tokens)


def _holder(holder: session_pb2.PrefixHolder) -> PeerPrefix:
    return PeerPrefix(_instance(holder), holder.num_blocks)


def _instance(where: session_pb2.KvSource | session_pb2.PrefixHolder) -> str:
    """The worker as `split_instance` reads it; a Unix path of another host names somebody else's socket here."""
    return f"{where.address}|{where.unix_path if where.host_id == host_id() else ''}"


def split_instance(instance: str) -> tuple[str, str]:
    """Split the ``instance`` of a peer or a holder into its address and its unix path."""
    address, _, unix_path = instance.partition("|")
    if not address:
        raise InvalidRequest("a KV source without an address")
    return address, unix_path


def add_output(message: session_pb2.RequestOutput, output: RequestOutput, source: session_pb2.KvSource | None) -> None:
    """Add a step's output to the message of its request, which may hold those of earlier steps."""
    message.tokens.extend(output.tokens)
    message.cached_tokens = min(output.num_cached_tokens, output.num_prompt_tokens)
    if output.logprobs is not None:
        message.logprobs.append(_logprobs(output.logprobs))
    if output.phases is not None:
        message.phases.CopyFrom(phases_message(output.phases))
    if output.finish_reason is not None:
        message.finish = _FINISH[output.finish_reason]
        if output.finish_reason is EngineFinishReason.STOP:
            message.stop_token = output.tokens[-1]
        elif output.finish_reason is EngineFinishReason.GRAMMAR_FAILED:
            message.error.CopyFrom(status_of(_GRAMMAR_FAILED))
    if source is not None:
        message.source.CopyFrom(source)


def phases_message(phases: PhaseTimes) -> session_pb2.PhaseTimes:
    """Make the message of where a request's time went."""
    return session_pb2.PhaseTimes(
        queue_s=phases.queue_s,
        kv_load_s=phases.kv_load_s,
        prefill_s=phases.prefill_s,
        kv_store_s=phases.kv_store_s,
        decode_s=phases.decode_s,
    )


def _logprobs(logprobs: Logprobs) -> session_pb2.TokenLogprobs:
    entries = (logprobs.chosen, *logprobs.top, *logprobs.asked)
    return session_pb2.TokenLogprobs(token_ids=[e.token for e in entries], logprobs=[e.logprob for e in entries])


def score_messages(scores: PromptScores) -> Iterator[session_pb2.PromptScores]:
    """Make the messages of a prompt's log probabilities, none of more than about `MAX_SCORES_BYTES`."""
    each = 8 + 8 * scores.num_top + 4 * len(scores.asked)
    most = max(1, MAX_SCORES_BYTES // each)
    for start in range(0, len(scores.targets), most):
        part = scores.part(start, start + most)
        yield session_pb2.PromptScores(
            request_id=part.request_id,
            position=part.position,
            logprobs=part.logprobs.astype("<f4").tobytes(),
            ranks=part.ranks.astype("<u4").tobytes(),
            top_ids=part.top_ids.astype("<u4").tobytes(),
            top_logprobs=part.top_logprobs.astype("<f4").tobytes(),
            asked_logprobs=part.asked_logprobs.astype("<f4").tobytes(),
        )


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


def load_message(load: EngineLoad, reads: Iterable[PeerReadTotal] = ()) -> session_pb2.Load:
    """Make the message that says how busy the worker is, and its ``reads`` from others since the last one."""
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
        max_num_seqs=load.max_num_seqs,
    )
    for read in reads:
        message.reads.add(address=read.address, num_bytes=read.num_bytes, seconds=read.seconds)
    if load.speeds.costs is not None:
        message.costs.CopyFrom(session_pb2.StepCosts(**structs.asdict(load.speeds.costs)))
    return message


def welcome_message(
    instance_id: str, generation: int, hashes: Iterable[BlockHash], sequence: int, load: EngineLoad
) -> session_pb2.SessionWelcome:
    """Make the snapshot of the cache with which a session begins; its events go on from there.

    Of more than ``MAX_WELCOME_BYTES`` of hashes only the first are told: requests are not routed by the others.
    """
    told, num_bytes = list[BlockHash](), 0
    for each in hashes:
        num_bytes += len(each) + _HASH_HEAD_BYTES
        if num_bytes > MAX_WELCOME_BYTES:
            break
        told.append(each)
    return session_pb2.SessionWelcome(
        instance_id=instance_id,
        generation=generation,
        cached_blocks=told,
        event_sequence=sequence,
        load=load_message(load),
        beat_s=BEAT_S,
    )


def model_card(
    layout: BlockShape,
    assets: TokenizerAssets,
    *,
    name: str,
    fingerprint: Fingerprint,
    block_hash: str,
    num_blocks: int,
    context_length: int,
    vocab_size: int,
    secret_check: bytes = b"",
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
        secret_check=secret_check,
    )
