"""The terms common to the engines' dialects: a request as sent, the pieces of its answer, a server's description."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import msgspec

from tanghulu.conductor.engines.client import EngineClient, error_of
from tanghulu.conductor.engines.load import EngineFigures
from tanghulu.conductor.engines.model import ServerFacts
from tanghulu.conductor.engines.servers import EngineServer
from tanghulu.conductor.routing.requests import GenerationRequest
from tanghulu.errors import InvalidRequest, NodeUnavailable, TanghuluError
from tanghulu.hashing import Tokens
from tanghulu.session.outputs import FinishReason, TokenLogprobs
from tanghulu.session.sampling import MAX_ENGINE_SEED, Sampling, engine_terms

T = TypeVar("T")
#: An engine's null: a probability of zero, whose logarithm JSON cannot express.
LEAST_LOGPROB = -9999.0
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


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

    def sampling(self) -> dict[str, Any]:
        """Return the fields that all engines have, in vLLM's terms."""
        num_prompt = len(self.tokens) - self.num_generated
        asked, generated = self.request.sampling, self.tokens[num_prompt:].tolist()
        terms = engine_terms(asked, self.request.stop, generated) | {"max_tokens": self.max_tokens}
        if self.hand_over:
            terms["min_tokens"] = 1
        if asked.seed is not None and self.seeded:
            terms["seed"] = asked.seed % MAX_ENGINE_SEED
        return {name: value for name, value in terms.items() if value is not None}

    def check(self, server: EngineServer) -> None:
        """Raise InvalidRequest for what engines do not offer, a plain error for a text begun under a grammar."""
        unoffered = {
            "log probabilities of the prompt": self.request.scoring,
            "logprob_token_ids": self.request.sampling.logprob_token_ids,
        }
        if asked := next((name for name, value in unoffered.items() if value), ""):
            raise InvalidRequest(
                f"{asked}: worker {server.id} is a plain {server.engine} server, which does not support it"
            )
        if self.num_generated and self.request.sampling.grammar is not None:
            raise TanghuluError(
                f"the worker was lost after {self.num_generated} tokens of an answer bound to a grammar, which "
                f"a plain {server.engine} server cannot continue; send the request again"
            )


@dataclass(slots=True)
class AnswerPiece:
    """A piece of an answer: new tokens, and perhaps its end. ``cached_tokens`` None is unstated."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    cached_tokens: int | None = None
    kv_transfer: dict[str, Any] | None = None


class StreamError(msgspec.Struct):
    """An error within a stream, under status 200."""

    message: str = ""
    code: int | str | None = None


class EngineAnswer(ABC):
    """Reads the events of one answer of ``server``, with ``num_top`` likely tokens at each position."""

    def __init__(self, server: str, num_top: int = 0) -> None:
        self.server, self.num_top = f"worker {server}", num_top

    @abstractmethod
    def read(self, data: bytes, piece: AnswerPiece) -> None:
        """Add an event's contents to ``piece``. Raises NodeUnavailable for no event, or the engine's own error."""

    def read_all(self, batch: Sequence[bytes]) -> AnswerPiece:
        """Return the contents of events that came together, as one piece."""
        piece = AnswerPiece()
        for data in batch:
            self.read(data, piece)
        return piece

    def fail_with(self, error: StreamError) -> None:
        """Raise the engine's error."""
        raise error_of(error.code if isinstance(error.code, int) else 500, error.message, self.server)

    def finish(self, reason: str) -> FinishReason:
        """Return the end of an answer. Raises NodeUnavailable for one that the server gave up."""
        if reason not in _FINISH:
            raise NodeUnavailable(f"{self.server} ended the request early: {reason}")
        return _FINISH[reason]


def decoded(data: bytes, kind: type[T], what: str) -> T:
    """Return JSON of a server as ``kind``. Raises NodeUnavailable naming ``what`` sent it."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NodeUnavailable(f"{what} sent an answer unlike its engine's: {error}; is it the engine given?") from error


class EngineDialect(ABC):
    """One engine's HTTP API. Pure but for ``facts``."""

    engine: ClassVar[str]
    generate_path: ClassVar[str]
    health_path: ClassVar[str]
    drop_path: ClassVar[str]
    #: Whether a failing answer of ``health_path`` means that the engine has ended.
    ends_unhealthy: ClassVar[bool]
    #: The beginning of the names of its metrics; those of requests running and waiting, and of the cache's share.
    prefix: ClassVar[str]
    gauges: ClassVar[tuple[str, str, str]]
    #: Whether its repetition penalty counts prompt and answer alike.
    repeats_exactly: ClassVar[bool]
    stream: ClassVar[type[EngineAnswer]]

    @abstractmethod
    def body(self, call: EngineCall) -> dict[str, Any]:
        """Return the body of a request, which leaves nothing to the server's defaults."""

    @abstractmethod
    async def facts(self, client: EngineClient) -> ServerFacts:
        """Ask a server for its facts. Raises NodeUnavailable, DeadlineExceeded."""

    @abstractmethod
    def probe(self, model: str) -> dict[str, Any]:
        """Return the body of a request for one token, not streamed."""

    def figures(self, page: str) -> EngineFigures:
        """Return a server's load from its metrics; several ranks' are summed, the share in use is their mean.

        Only the lines of three gauges are parsed: a whole page takes 30 ms. Raises ValueError for other numbers.
        """
        own = [line for line in page.splitlines() if line.startswith(self.prefix)]
        starts = [(f"{self.prefix}{name}{{", f"{self.prefix}{name} ") for name in self.gauges]
        found = [[float(line.rpartition(" ")[2]) for line in own if line.startswith(start)] for start in starts]
        running, waiting, usage = found
        in_use = sum(usage) / len(usage) if usage else 0.0
        return EngineFigures(int(sum(running)), int(sum(waiting)), in_use, hash(tuple(own)) if own else None)

    def exactness(self, sampling: Sampling, seeded: bool) -> str:
        """Return the label of a request that continues here: a grammar begins anew, and draws need seeds."""
        if sampling.grammar is not None:
            return "impossible"
        repeats = sampling.repetition_penalty != 1.0
        is_off = sampling.presence_penalty or (repeats and (sampling.frequency_penalty or not self.repeats_exactly))
        return "same_distribution" if is_off or (sampling.temperature > 0 and not seeded) else "same_model"


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


async def served_models(client: EngineClient) -> tuple[str, str, int, dict[str, str]]:
    """Return name, path and context of the server's model or adapter, and the paths of all adapters by name.

    Raises NodeUnavailable.
    """
    server = client.server
    listed = decoded(await client.call("/v1/models"), _Models, server.url).data
    base = next((each for each in listed if not each.parent), None)
    adapters = {each.id: each.root or "" for each in listed if each.parent}
    if base is None or (server.adapter and server.adapter not in adapters):
        raise NodeUnavailable(f"{server.url} does not serve {server.adapter or 'any model'} (any more)")
    return server.adapter or base.id, base.root or base.id, base.max_model_len or 0, adapters
