"""The terms common to the engines' dialects: a request as sent, a piece of its answer, refusals of unoffered wishes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tanghulu.conductor.engines.client import EngineClient
from tanghulu.conductor.engines.load import EngineFigures
from tanghulu.conductor.engines.model import ModelFacts
from tanghulu.conductor.engines.servers import EngineServer
from tanghulu.conductor.routing.requests import GenerationRequest
from tanghulu.errors import InvalidRequest, TanghuluError
from tanghulu.hashing import Tokens
from tanghulu.runtime.scraping import Samples
from tanghulu.session.outputs import FinishReason, TokenLogprobs
from tanghulu.session.sampling import Sampling

#: The most that an engine adds to or takes from a logit (vLLM clamps).
MAX_BIAS = 100.0
#: What becomes of the text of a request that moves on: labels of the metric of migrations.
SAME_MODEL, SAME_DISTRIBUTION, IMPOSSIBLE = "same_model", "same_distribution", "impossible"


@dataclass(frozen=True, slots=True)
class EngineCall:
    """A request as sent to a server: ``tokens`` are its prompt, and ``num_generated`` more from before it moved.

    ``full_report``: have the engine report cached blocks, too. ``kv_transfer`` are vLLM's parameters of a hand-over.
    """

    request: GenerationRequest
    name: str
    tokens: Tokens
    num_generated: int
    cache_salt: str
    model: str
    adapter: str = ""
    full_report: bool = False
    seeded: bool = True
    hand_over: bool = False
    kv_transfer: dict[str, Any] | None = None

    @property
    def max_tokens(self) -> int:
        """Tokens still to be generated; the one token of a prefill for another server."""
        return 1 if self.hand_over else self.request.stop.max_new_tokens - self.num_generated

    @property
    def min_tokens(self) -> int:
        """Tokens before which nothing ends the text."""
        least = max(self.request.stop.min_tokens - self.num_generated, 1 if self.hand_over else 0)
        return min(least, self.max_tokens)

    @property
    def logit_bias(self) -> dict[str, float]:
        """The request's bias, less the frequency penalty of the tokens generated before it moved.

        An engine counts the tokens that it generates itself, so the earlier ones' part of the penalty is sent as a
        bias, which adds up alike. Not beside a repetition penalty, which an engine applies to biased logits.
        """
        sampling = self.request.sampling
        bias = dict(sampling.logit_bias)
        if self.num_generated and sampling.frequency_penalty and sampling.repetition_penalty == 1.0:
            for token in self.tokens[len(self.tokens) - self.num_generated :].tolist():
                bias[token] = bias.get(token, 0.0) - sampling.frequency_penalty
        return {str(token): min(max(value, -MAX_BIAS), MAX_BIAS) for token, value in bias.items()}


@dataclass(slots=True)
class Piece:
    """A piece of an answer: new tokens, and perhaps its end. ``cached_tokens`` None is unstated."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    cached_tokens: int | None = None
    kv_transfer: dict[str, Any] | None = None


class AnswerStream(Protocol):
    """Reads the events of one answer."""

    def read(self, data: bytes) -> Piece:
        """Return the event's contents. Raises NodeUnavailable for one that is none, or the engine's own error."""


class Dialect(Protocol):
    """One engine's HTTP API. Pure but for ``facts``."""

    engine: str
    generate_path: str
    health_path: str
    drop_path: str
    #: Whether a failing answer of ``health_path`` means that the engine has ended.
    ends_unhealthy: bool

    def body(self, call: EngineCall) -> dict[str, Any]:
        """Return the body of a request."""

    def stream(self, call: EngineCall) -> AnswerStream:
        """Return the reader of its answer."""

    def figures(self, samples: Samples) -> EngineFigures:
        """Return a server's load from its metrics."""

    async def facts(self, client: EngineClient) -> ServerFacts:
        """Ask a server for its facts. Raises NodeUnavailable, DeadlineExceeded."""

    def probe(self, model: str) -> dict[str, Any]:
        """Return the body of a request for one token, not streamed."""

    def exactness(self, sampling: Sampling, seeded: bool) -> str:
        """Return the label of a request that continues here from another worker's tokens."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts of a server: its model, its cache (``caches`` prefixes or not), its events ("" for none), its adapters."""

    model: ModelFacts
    num_blocks: int = 0
    max_num_seqs: int = 0
    events: str = ""
    replay: str = ""
    adapters: Sequence[str] = ()
    caches: bool = True


def refuse_unoffered(request: GenerationRequest, server: EngineServer) -> None:
    """Raise InvalidRequest for a wish that engines do not offer over HTTP."""
    wishes = {
        "log probabilities of the prompt": request.scoring is not None,
        "logprob_token_ids": bool(request.sampling.logprob_token_ids),
    }
    if wish := next((name for name, wished in wishes.items() if wished), ""):
        raise InvalidRequest(f"{wish}: worker {server.id} is a plain {server.engine} server, which does not offer that")


def refuse_mid_grammar(call: EngineCall, server: EngineServer) -> None:
    """Raise a plain error for a begun text under a grammar, which an engine can only begin anew."""
    if call.num_generated and call.request.sampling.grammar is not None:
        raise TanghuluError(
            f"the worker was lost after {call.num_generated} tokens of a text under a grammar, and a plain "
            f"{server.engine} server cannot continue one; send the request again"
        )
