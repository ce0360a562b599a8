"""The parameters for sampling a request's tokens, and for its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tanghulu.errors import InvalidRequest
from tanghulu.rpc.wire import U32, FastMessage

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
#: Kinds of grammars, each a field of `Sampling`.
GRAMMARS = ("json_schema", "regex", "lark")
#: vLLM's names of them, and the end of its seeds.
VLLM_GRAMMARS, MAX_ENGINE_SEED = {"json_schema": "json", "regex": "regex", "lark": "grammar"}, 1 << 63
_NAMED_ALIKE = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
#: The most that an engine adds to or takes from a logit (vLLM clamps).
_MAX_BIAS = 100.0


class Sampling(FastMessage, frozen=True):
    """Parameters of sampling a token. At most one grammar is given.

    ``temperature`` 0 is the exact argmax after penalties and bias. ``top_k`` 0 and ``top_p`` 1 and ``min_p`` 0
    are off. ``seed`` names the random stream; equal seeds give equal text whatever else is in the batch.
    ``num_logprobs`` None is off, 0 the chosen token only, n also the n most likely, and then ``logprob_token_ids``.
    ``json_schema``: the text must be JSON that the schema accepts; ``regex`` must match the whole text, and so must
    ``lark``, a grammar in llguidance's dialect of Lark.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = msgspec.field(default_factory=dict)
    num_logprobs: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    lark: str | None = None
    logprob_token_ids: tuple[U32, ...] = ()

    def validate(self) -> None:
        """Raise InvalidRequest for parameters with which no token can be sampled."""
        _require(self.temperature >= 0, f"temperature is {self.temperature}; it must be 0 or more")
        _require(self.top_k >= 0, f"top_k is {self.top_k}; it must be 0 (off) or more")
        _require(0 < self.top_p <= 1, f"top_p is {self.top_p}; it must be above 0 and at most 1")
        _require(0 <= self.min_p <= 1, f"min_p is {self.min_p}; it must be between 0 and 1")
        _require(self.repetition_penalty > 0, f"repetition_penalty is {self.repetition_penalty}; it must be above 0")
        _require(
            len(self.logit_bias) <= MAX_LOGIT_BIAS,
            f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS}",
        )
        wanted = self.num_logprobs
        _require(wanted is None or 0 <= wanted <= MAX_LOGPROBS, f"num_logprobs is {wanted}; at most {MAX_LOGPROBS}")
        num_ids, most = len(self.logprob_token_ids), MAX_LOGPROB_TOKEN_IDS
        _require(num_ids <= most, f"logprob_token_ids has {num_ids} tokens; at most {most} are allowed")
        grammars = [kind for kind in GRAMMARS if getattr(self, kind) is not None]
        _require(len(grammars) <= 1, f"{' and '.join(grammars)} are given; a request has at most one grammar")

    @property
    def grammar(self) -> tuple[str, str] | None:
        """Return the kind (one of ``GRAMMARS``) and the text of the grammar, if there is one."""
        return next(((kind, text) for kind in GRAMMARS if (text := getattr(self, kind)) is not None), None)

    @property
    def has_penalties(self) -> bool:
        """Whether previous tokens change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class StopRule(FastMessage, frozen=True):
    """The end conditions that a worker checks; stop *strings* are the conductor's.

    Counts are of tokens generated beyond the original prompt, on any worker. End-of-sequence tokens end the text
    unless ``ignore_eos``; ``stop_token_ids`` always do. Neither is sampled before ``min_tokens`` tokens exist. A text
    under a grammar ends with the first of either that is sampled, regardless of the other settings: nothing may follow
    the end of a grammar.
    """

    max_new_tokens: int
    stop_token_ids: tuple[U32, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0

    def validate(self) -> None:
        """Raise InvalidRequest for meaningless counts."""
        _require(self.max_new_tokens >= 1, f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        _require(self.min_tokens >= 0, f"min_tokens is {self.min_tokens}; it must be 0 or more")


class PromptScoring(FastMessage, frozen=True):
    """Request for the prompt's own log probabilities, from position ``start`` on, which is at least 1.

    ``num_top`` of the most likely tokens are given beside each.
    """

    start: int
    num_top: int = 0

    def validate(self) -> None:
        """Raise InvalidRequest for a position or a count out of range."""
        _require(
            self.start >= 1, f"start is {self.start}; it must be at least 1, as the first token has no log probability"
        )
        top = self.num_top
        _require(0 <= top <= MAX_LOGPROBS, f"num_top is {top}; it must be between 0 and {MAX_LOGPROBS}")


class SamplingDefaults(FastMessage, frozen=True):
    """Sampling parameters recommended by a model's makers, used where a request sets none; the defaults are neutral."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def engine_terms(sampling: Sampling, stop: StopRule, generated: Sequence[int]) -> dict[str, Any]:
    """Return the parameters in the terms of vLLM, most of them SGLang's, each explicit: engines' defaults differ.

    ``generated`` was generated before the request moved, and is a part of its prompt now. An engine counts the tokens
    that it generates itself, so the earlier ones' part of the frequency penalty is a bias, which adds up alike. Not
    beside a repetition penalty, which an engine applies to biased logits.
    """
    bias, left = dict(sampling.logit_bias), stop.max_new_tokens - len(generated)
    if sampling.frequency_penalty and sampling.repetition_penalty == 1.0:
        for token in generated:
            bias[token] = bias.get(token, 0.0) - sampling.frequency_penalty
    return {name: getattr(sampling, name) for name in _NAMED_ALIKE} | {
        "top_k": sampling.top_k or -1,
        "logit_bias": {token: min(max(value, -_MAX_BIAS), _MAX_BIAS) for token, value in bias.items()} or None,
        "max_tokens": left,
        "min_tokens": min(max(stop.min_tokens - len(generated), 0), left),
        "stop_token_ids": list(stop.stop_token_ids),
        "ignore_eos": stop.ignore_eos,
    }


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequest(message)
