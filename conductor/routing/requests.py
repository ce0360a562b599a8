"""A client's request on its way through the conductor. Independent of HTTP and text."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tanghulu.conductor.routing.overrides import NO_OVERRIDES, RoutingOverrides
from tanghulu.conductor.stories.account import Audience
from tanghulu.conductor.stories.origin import Origin
from tanghulu.hashing import Tokens
from tanghulu.session.outputs import PromptScores
from tanghulu.session.sampling import PromptScoring, Sampling, StopRule
from tanghulu.types import RequestId


class Timeouts(Struct, frozen=True):
    """Longest waits of a client, in seconds: for the end, the first token, each further token. 0 means no limit."""

    request_s: float = 0.0
    first_token_s: float = 0.0
    token_s: float = 0.0

    def within(self, most: Timeouts) -> Timeouts:
        """Return the shorter of both, for each field separately."""
        return Timeouts(
            _shorter(self.request_s, most.request_s),
            _shorter(self.first_token_s, most.first_token_s),
            _shorter(self.token_s, most.token_s),
        )


def _shorter(one_s: float, other_s: float) -> float:
    return min(one_s, other_s) if one_s and other_s else one_s or other_s


NO_TIMEOUTS = Timeouts()


class GenerationRequest(Struct, frozen=True, eq=False):
    """One sequence to continue. ``prompt``: uint32, shape ``[num_prompt_tokens]``.

    ``client`` takes turns with others in the queue, ``weight`` of them for each of another's; "" if unknown.
    ``timeouts`` are its own. ``origin`` is the HTTP request that carried it, if any.
    ``seed_given`` by the client, rather than drawn here. ``tenant`` of the API key, "" without one. ``explain`` the
    prompt's cache misses to this audience, if any; ``messages`` are the positions of a chat's messages in its rendered
    text.
    """

    id: RequestId
    model: str
    prompt: Tokens
    sampling: Sampling
    stop: StopRule
    salt: bytes = b""
    priority: int = 0
    session: str = ""
    routing: RoutingOverrides = NO_OVERRIDES
    timeouts: Timeouts = NO_TIMEOUTS
    client: str = ""
    weight: float = 1.0
    scoring: PromptScoring | None = None
    origin: Origin | None = None
    seed_given: bool = False
    tenant: str = ""
    explain: Audience | None = None
    messages: tuple[int, ...] = ()


class PromptLogprobs(Struct, frozen=True, eq=False):
    """Log probabilities of n tokens of a prompt, the first at ``position``.

    The arrays of `PromptScores`, with their shapes.
    """

    position: int
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.uint32]
    top_ids: npt.NDArray[np.uint32]
    top_logprobs: npt.NDArray[np.float32]
    named_logprobs: npt.NDArray[np.float32]

    @property
    def end(self) -> int:
        """Position after the last one."""
        return self.position + len(self.logprobs)

    @classmethod
    def of(cls, scores: PromptScores) -> PromptLogprobs:
        """Build from the tables of ``scores``."""
        logprobs = np.frombuffer(scores.logprobs, "<f4")
        return cls(
            scores.position,
            logprobs,
            np.frombuffer(scores.ranks, "<u4"),
            np.frombuffer(scores.top_ids, "<u4").reshape(len(logprobs), -1),
            np.frombuffer(scores.top_logprobs, "<f4").reshape(len(logprobs), -1),
            np.frombuffer(scores.named_logprobs, "<f4").reshape(len(logprobs), -1),
        )
