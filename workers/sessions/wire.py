"""The edge between a session's messages and the engine's types."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import xxhash
from msgspec import structs

from tanghulu.errors import InvalidRequest
from tanghulu.hashing import TokenSequence, as_tokens, root_hash
from tanghulu.model_files.assets import TokenizerAssets
from tanghulu.session.load import WorkerLoad
from tanghulu.session.messages import PullAhead, SessionWelcome, Submit
from tanghulu.session.model_card import ModelCard
from tanghulu.session.outputs import KvChange, KvSource, PromptScores
from tanghulu.session.sampling import Sampling, StopRule
from tanghulu.types import BlockHash, Fingerprint, InstanceId, RequestId
from tanghulu.workers.engine.block_pool import KvEvent, KvEventKind
from tanghulu.workers.engine.grammar import Grammar, GrammarCompiler, GrammarKind
from tanghulu.workers.engine.kv_layout import BlockShape
from tanghulu.workers.engine.requests import EngineRequest
from tanghulu.workers.engine.step import PromptScoreArrays
from tanghulu.workers.sessions.health import BEAT_S, PRIORITY

#: Of one message of a prompt's log probabilities.
MAX_SCORES_BYTES = 1 << 20
#: Of the hashes in a snapshot; a frame holds 16 MiB.
MAX_WELCOME_BYTES = 14 << 20
_HASH_HEAD_BYTES = 2


class RequestFactory:
    """Makes engine requests of this worker's model from Submit messages; without ``grammars`` none may have one."""

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

    def compiling(self, submit: Submit) -> Future[Any] | None:
        """See `MakesRequests`."""
        if submit.sampling.grammar is None or self._grammars is None:
            return None
        kind, text = submit.sampling.grammar
        return self._grammars.compiling(GrammarKind(kind), text)

    def request(self, submit: Submit) -> EngineRequest:
        """Make the request described by ``submit``; raises InvalidRequest if it is not valid."""
        sampling = submit.sampling
        if sampling.seed is None:  # its id is the seed, so it draws the same tokens wherever it continues
            sampling = structs.replace(sampling, seed=xxhash.xxh3_64_intdigest(submit.request_id.encode()))
        return EngineRequest(
            request_id=submit.request_id,
            sequence=self._sequence(submit.salt, submit.tokens),
            num_prompt_tokens=submit.num_prompt_tokens,
            sampling=sampling,
            stop=submit.stop,
            eos_ids=self._eos_ids,
            hold_kv=submit.hand_over,
            priority=submit.priority,
            client=submit.client,
            weight=submit.weight,
            moved=submit.moved,
            ahead=RequestId(submit.ahead) if submit.ahead else None,
            peer=submit.source,
            holder=submit.holder,
            grammar=self._grammar(sampling),
            scoring=submit.scoring,
        )

    def pulled(self, pull: PullAhead) -> tuple[TokenSequence, KvSource]:
        """Make the prompt named by ``pull``, and where its KV is computed."""
        return self._sequence(pull.salt, pull.tokens), pull.source

    def probe(self, request_id: RequestId) -> EngineRequest:
        """Make a request of one token that leaves nothing behind; see `EngineProbe`."""
        return EngineRequest(
            request_id=request_id,
            sequence=self._sequence(b"probe", (0,)),
            num_prompt_tokens=1,
            sampling=Sampling(temperature=0.0),
            stop=StopRule(1, ignore_eos=True),
            priority=PRIORITY,
            moved=True,
            fetch_blocks=0,
        )

    def root(self, salt: bytes = b"") -> BlockHash:
        """Return the root of the names of blocks with ``salt``."""
        return root_hash(self._fingerprint, salt, self._block_hash, self._naming_key)

    def _sequence(self, salt: bytes, tokens: bytes | Sequence[int]) -> TokenSequence:
        return TokenSequence(self.root(salt), self._block_tokens, as_tokens(tokens), self._block_hash)

    def _grammar(self, sampling: Sampling) -> Grammar | None:
        if sampling.grammar is None:
            return None
        if self._grammars is None:
            raise InvalidRequest("this worker's engine does not support grammars; use a worker with --engine torch")
        kind, text = sampling.grammar
        return self._grammars.compile(GrammarKind(kind), text)


def score_messages(scores: PromptScoreArrays) -> Iterator[PromptScores]:
    """Make the messages of a prompt's log probabilities, none of more than about `MAX_SCORES_BYTES`."""
    each = 8 + 8 * scores.num_top + 4 * len(scores.named)
    most = max(1, MAX_SCORES_BYTES // each)
    for start in range(0, len(scores.targets), most):
        part = scores.part(start, start + most)
        yield PromptScores(
            part.request_id,
            part.position,
            part.logprobs.astype("<f4").tobytes(),
            part.ranks.astype("<u4").tobytes(),
            part.top_ids.astype("<u4").tobytes(),
            part.top_logprobs.astype("<f4").tobytes(),
            part.named_logprobs.astype("<f4").tobytes(),
        )


def event_messages(events: Iterable[KvEvent]) -> list[KvChange]:
    """Make the messages of KV events, in order, with runs of one kind in one message."""
    messages = []
    for kind, run in itertools.groupby(events, key=lambda event: event.kind):
        hashes = tuple(event.block_hash for event in run)
        messages.append(KvChange(stored=hashes) if kind is KvEventKind.STORED else KvChange(removed=hashes))
    return messages


def welcome_message(
    instance_id: InstanceId, generation: int, hashes: Iterable[BlockHash], sequence: int, load: WorkerLoad
) -> SessionWelcome:
    """Make the snapshot of the cache with which a session begins; its events continue from there.

    If the hashes exceed ``MAX_WELCOME_BYTES``, only the first are sent: requests are not routed by the others.
    """
    sent, num_bytes = list[BlockHash](), 0
    for each in hashes:
        num_bytes += len(each) + _HASH_HEAD_BYTES
        if num_bytes > MAX_WELCOME_BYTES:
            break
        sent.append(each)
    return SessionWelcome(instance_id, generation, tuple(sent), sequence, load, BEAT_S)


def model_card(layout: BlockShape, assets: TokenizerAssets, **more: Any) -> ModelCard:
    """Describe the model to conductors: tokenizer, layout of blocks, and ``more`` fields, such as bounds."""
    shape = {"block_tokens": layout.block_tokens, "block_bytes": layout.block_bytes, "kv_dtype": layout.dtype}
    return assets.card(**shape, **more)
