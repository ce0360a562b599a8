"""Conversion of session messages to vLLM's sampling parameters and back. Pure; imports nothing of vLLM.

A request lost by another worker comes with its tokens so far: vLLM takes all of it as the prompt, so that its bounds
are reduced by as many tokens, and a presence penalty counts these as the prompt's, which vLLM cannot distinguish. A
text under a grammar cannot be continued in the middle; the conductor receives an error and tries another worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from tanghulu.engines.common.requests import REPORT_LOADS
from tanghulu.errors import InvalidRequest, NodeUnavailable, TransferFailed
from tanghulu.hashing import VLLM_SHA256_CBOR, TokenSequence, as_tokens, root_hash, vllm_salt
from tanghulu.session.messages import PullAhead, Submit
from tanghulu.session.outputs import FinishReason, KvLoad, KvSource, Output, TokenLogprobs
from tanghulu.session.sampling import MAX_ENGINE_SEED, VLLM_GRAMMARS, Sampling, engine_terms
from tanghulu.types import BlockHash, Fingerprint, RequestId

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


@dataclass(frozen=True, slots=True)
class VllmRequest:
    """A request in vLLM's terms: ``sampling`` and ``grammar`` are fields of its parameters of these kinds."""

    request_id: RequestId
    tokens: list[int]
    num_prompt_tokens: int
    block_hashes: list[BlockHash]
    sampling: dict[str, Any]
    grammar: dict[str, str] | None = None
    cache_salt: str = ""
    priority: int = 0
    hand_over: bool = False  # prefill only; another worker continues from the store

    @property
    def prompt(self) -> dict[str, Any]:
        """The prompt argument of ``AsyncLLM.generate``."""
        salt = {"cache_salt": self.cache_salt} if self.cache_salt else {}
        return {"prompt_token_ids": self.tokens, **salt}


class VllmRequestFactory:
    """Makes requests from Submit messages.

    ``by_priority``: vLLM's scheduler uses priorities. Without ``keeps_seeds`` vLLM draws without seeds: its engine for
    CPUs (0.32) ends at a seed of a prompt that takes more than one step ("CPU Generator does not use offset").
    ``has_store``: prefill-only requests are accepted, and requests whose prompt another worker left in the store; a
    ``source`` names that worker, which is not contacted.
    """

    def __init__(
        self,
        block_tokens: int,
        *,
        by_priority: bool = False,
        keeps_seeds: bool = True,
        has_store: bool = False,
        naming_key: bytes = b"",
    ) -> None:
        self._block_tokens = block_tokens
        self._has_store = has_store
        self._naming_key = naming_key
        self._by_priority = by_priority
        self._always: dict[str, Any] = {} if keeps_seeds else {"seed": None}
        if has_store:
            self._always["extra_args"] = {"kv_transfer_params": {REPORT_LOADS: True}}

    def compiling(self, submit: Submit) -> None:
        """Return None: vLLM compiles grammars itself."""

    def request(self, submit: Submit) -> VllmRequest:
        """Make the request; raises InvalidRequest for one that vLLM does not support, NodeUnavailable for one that
        another worker could take."""
        if not self._has_store and (submit.hand_over or submit.source is not None):
            raise InvalidRequest("this vLLM worker has no store to hand prompts over; start it without --no-store")
        submit.sampling.validate()
        submit.stop.validate()
        root = root_hash(Fingerprint(b""), submit.salt, VLLM_SHA256_CBOR, self._naming_key)
        sequence = TokenSequence(root, self._block_tokens, as_tokens(submit.tokens), VLLM_SHA256_CBOR)
        num_prompt = submit.num_prompt_tokens
        if not 0 < num_prompt <= len(sequence):
            raise InvalidRequest(
                f"request {submit.request_id} claims {num_prompt} prompt tokens but has {len(sequence)} tokens"
            )
        num_generated = len(sequence) - num_prompt
        return VllmRequest(
            request_id=submit.request_id,
            tokens=sequence.tokens.tolist(),
            num_prompt_tokens=num_prompt,
            block_hashes=sequence.block_hashes,
            sampling=_sampling(submit, num_generated) | self._always,
            grammar=_grammar(submit.sampling, num_generated),
            cache_salt=vllm_salt(submit.salt, self._naming_key),
            priority=-submit.priority if self._by_priority else 0,  # vLLM's lower numbers go first
            hand_over=submit.hand_over,
        )

    def pulled(self, pull: PullAhead) -> tuple[TokenSequence, KvSource]:
        """Raise InvalidRequest: nothing is fetched from another worker's memory here."""
        raise InvalidRequest("a vLLM worker cannot fetch KV from another worker's memory")

    def probe(self, request_id: RequestId) -> VllmRequest:
        """Return a request of one token whose name no other prompt has."""
        sampling = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True, "detokenize": False}
        return VllmRequest(request_id, [0], 1, [], sampling, cache_salt="tanghulu probe")


def _sampling(submit: Submit, num_generated: int) -> dict[str, Any]:
    given, stop = submit.sampling, submit.stop
    if stop.max_new_tokens <= num_generated:
        raise InvalidRequest(
            f"max_new_tokens is {stop.max_new_tokens}, and {num_generated} tokens were already generated"
        )
    generated = as_tokens(submit.tokens)[submit.num_prompt_tokens :].tolist()
    terms = engine_terms(given, stop, generated)
    if submit.hand_over:
        terms |= {"max_tokens": 1, "min_tokens": min(terms["min_tokens"], 1)}
    # A request without a seed still draws the same tokens wherever it begins: its id is the seed.
    named = given.seed if given.seed is not None else xxhash.xxh3_64_intdigest(submit.request_id.encode())
    seed = (named + num_generated) % MAX_ENGINE_SEED
    return terms | {"seed": seed, "logprobs": given.num_logprobs, "detokenize": False}


def _grammar(sampling: Sampling, num_generated: int) -> dict[str, str] | None:
    if sampling.grammar is None:
        return None
    if num_generated:
        raise NodeUnavailable(
            f"vLLM cannot continue a text of {num_generated} tokens under a grammar; use another worker"
        )
    kind, text = sampling.grammar
    return {VLLM_GRAMMARS[kind]: text}


def output_of(request: VllmRequest, output: Any) -> Output:
    """Convert an output of vLLM's (a ``RequestOutput`` of its own). Raises NodeUnavailable if vLLM gave up."""
    (one,) = output.outputs
    tokens, finish = list(one.token_ids), None
    if one.finish_reason is not None:
        finish = _FINISH.get(one.finish_reason)
        if finish is None or (finish is FinishReason.STOP and not tokens):
            raise NodeUnavailable(f"vLLM ended request {request.request_id} early: {one.finish_reason}")
    made = Output(request.request_id, tokens, finish)
    num_cached = output.num_cached_tokens or 0
    loaded = (output.kv_transfer_params or {}).get(REPORT_LOADS)
    if loaded is not None:
        ordered, arrived = loaded
        if num_cached >= ordered:  # vLLM (0.32) counts blocks whose load failed, unless it begins anew
            num_cached -= ordered - arrived
        made.loads = [KvLoad("store", arrived, "" if arrived == ordered else TransferFailed.code)]
    made.cached_tokens = min(num_cached, request.num_prompt_tokens)
    if finish is FinishReason.STOP:
        made.stop_token = tokens[-1]
    if one.logprobs:
        top = request.sampling["logprobs"]
        made.logprobs += [_logprobs(token, found, top) for token, found in zip(tokens, one.logprobs, strict=True)]
    return made


def _logprobs(token: int, found: Mapping[int, Any], num_top: int) -> TokenLogprobs:
    best: Sequence[tuple[int, Any]] = sorted(found.items(), key=lambda each: each[1].rank)
    entries = [(token, found[token]), *best[:num_top]]
    return TokenLogprobs(tuple(each for each, _ in entries), tuple(entry.logprob for _, entry in entries))
