"""A session between a conductor and a worker, message by message, and the calls beside it.

A conductor opens a stream with a hello; its submissions and their results travel under one call. The worker's model
card is large (it carries the tokenizer) and has its own call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from tanghulu.auth.tenants import Right
from tanghulu.rpc.methods import Method, Rule
from tanghulu.rpc.wire import U32, U64, FastMessage
from tanghulu.session.load import WorkerLoad
from tanghulu.session.model_card import ModelCard
from tanghulu.session.outputs import KvChange, KvSource, Output, PrefixHolder, PromptScores
from tanghulu.session.sampling import PromptScoring, Sampling, StopRule
from tanghulu.types import BlockHash, InstanceId, RequestId

# --- to the worker


class SessionHello(FastMessage, frozen=True, tag=1):
    """Begins the session; a later one requests a snapshot of the cache, sent as another welcome."""

    conductor_id: str
    protocol_version: U32


class Submit(FastMessage, frozen=True, tag=2):
    """A request to compute. ``tokens`` uint32, little endian: the prompt, and all tokens generated before.

    ``hand_over``: only the prefill and one token, then hold the KV for another worker. ``source`` holds its KV ready,
    ``holder`` has leading blocks of it in its cache; ``ahead`` names the PullAhead whose blocks it continues with.
    Clients sharing a worker take turns, ``weight`` turns for each of another's. A request that ``moved`` from a lost
    worker has waited already. ``traceparent`` (W3C's) and ``x_request_id`` are for logs.
    """

    request_id: RequestId
    tokens: bytes
    num_prompt_tokens: U32
    sampling: Sampling
    stop: StopRule
    salt: bytes = b""
    hand_over: bool = False
    source: KvSource | None = None
    priority: int = 0
    holder: PrefixHolder | None = None
    client: str = ""
    moved: bool = False
    ahead: str = ""
    weight: float = 1.0
    scoring: PromptScoring | None = None
    traceparent: str = ""
    x_request_id: str = ""


class Abort(FastMessage, frozen=True, tag=3):
    """Ends the request or the pull with that name."""

    request_id: RequestId


class ReleaseExport(FastMessage, frozen=True, tag=4):
    """Releases KV that will not be fetched any more."""

    export_id: U64


class PullAhead(FastMessage, frozen=True, tag=5):
    """Starts fetching the KV of a prompt that another worker is computing; a Submit or Abort of that name ends it."""

    name: RequestId
    tokens: bytes
    salt: bytes
    source: KvSource


class ToWorker(FastMessage, frozen=True):
    """One message of a conductor."""

    message: SessionHello | Submit | Abort | ReleaseExport | PullAhead


# --- from the worker


class SessionWelcome(FastMessage, frozen=True, tag=1):
    """A session's first message: the worker's identity, and the snapshot that its events continue.

    ``event_sequence`` is the number of the first event after the snapshot. While the engine runs, steps come at least
    every ``beat_s``, with work or without; 0 gives no such guarantee.
    """

    instance_id: InstanceId
    generation: U64
    cached_blocks: tuple[BlockHash, ...]
    event_sequence: U64
    load: WorkerLoad
    beat_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class StepOutput(FastMessage, frozen=True, tag=2):
    """The outputs and events of one engine step, or of several. ``event_sequence`` numbers the first of ``kv_events``.

    A gap in these numbers means lost events: request a snapshot. ``load`` includes the session's first
    ``submits_taken`` submissions; None if unknown.
    """

    outputs: Sequence[Output] = ()
    event_sequence: U64 = 0
    kv_events: tuple[KvChange, ...] = ()
    load: WorkerLoad | None = None
    submits_taken: U64 | None = None
    scores: Sequence[PromptScores] = ()


class FromWorker(FastMessage, frozen=True):
    """One message of a worker."""

    message: SessionWelcome | StepOutput

    def validate(self) -> None:
        if isinstance(self.message, StepOutput):
            for scores in self.message.scores:
                scores.validate()


# --- calls beside the session


class DescribeRequest(FastMessage, frozen=True):
    """Requests the ModelCard."""


class DropCacheRequest(FastMessage, frozen=True):
    """Administration: drop every unreferenced cached block."""


class DropCacheReply(FastMessage, frozen=True):
    """Number of dropped blocks."""

    num_blocks: U32


class ProbeRequest(FastMessage, frozen=True):
    """Health: send one token through the whole engine, ahead of waiting requests."""

    deadline_s: float


class ProbeReply(FastMessage, frozen=True):
    """Duration of the token."""

    seconds: float


def _of_the_cluster(name: str) -> Rule:
    return Rule(name, Right.JOIN)


#: A stream: it begins with a hello, and both sides continue under its call id.
SESSION = Method(54, "session", ToWorker, FromWorker, _of_the_cluster("session"))
DESCRIBE = Method(56, "describe", DescribeRequest, ModelCard, _of_the_cluster("describe"))
DROP_CACHE = Method(57, "drop_cache", DropCacheRequest, DropCacheReply, _of_the_cluster("drop_cache"))
PROBE = Method(58, "probe", ProbeRequest, ProbeReply, _of_the_cluster("probe"))
