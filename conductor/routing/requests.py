"""Requests to workers, and the workers' descriptions, reports and outputs, as plain values.

The conductor's parts share them. Knows nothing of HTTP, protobuf or text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from tanghulu.conductor.routing.cost import DecodeProfile, PrefillProfile
from tanghulu.conductor.routing.overrides import NO_OVERRIDES, RoutingOverrides
from tanghulu.errors import TanghuluError
from tanghulu.hashing import Tokens
from tanghulu.types import BlockHash, Fingerprint, InstanceId, RequestId


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters of drawing a token. ``temperature`` 0 is argmax; ``top_k`` 0 is off. At most one grammar is given."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    num_logprobs: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    lark: str | None = None


@dataclass(frozen=True, slots=True)
class StopRule:
    """The rule by which a worker ends a request; the conductor itself looks for stop *strings*."""

    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The longest waits of a client, in seconds: for the end, the first token, each further token. 0: no limit."""

    request_s: float = 0.0
    first_token_s: float = 0.0
    token_s: float = 0.0

    def within(self, most: Timeouts) -> Timeouts:
        """The shorter of both, each for itself."""
        return Timeouts(
            _shorter(self.request_s, most.request_s),
            _shorter(self.first_token_s, most.first_token_s),
            _shorter(self.token_s, most.token_s),
        )


def _shorter(one_s: float, other_s: float) -> float:
    return min(one_s, other_s) if one_s and other_s else one_s or other_s


NO_TIMEOUTS = Timeouts()


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """One sequence to continue. ``prompt``: uint32, shape ``[num_prompt_tokens]``.

    ``client`` is who takes turns with others where many wait; "" where nobody is known. ``timeouts`` are its own.
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


class FinishReason(Enum):
    """The reason why a sequence ended, as the client is told."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "abort"


class OutputKind(Enum):
    """The kinds of output that a worker gives of a request in one step."""

    TOKENS = "goes on"
    STOP = "ended at an end-of-sequence or stop token"
    LENGTH = "reached max_new_tokens"
    HANDED_OVER = "prefilled; its KV is held for another worker"
    ABORTED = "the worker ended it from outside"
    ERROR = "the worker could not go on"


@dataclass(frozen=True, slots=True)
class KvSource:
    """The export in which a worker holds a request's KV for another worker."""

    instance_id: InstanceId
    address: str
    unix_path: str
    export_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A worker that has the first ``num_blocks`` blocks of a prompt in its cache, as far as is known."""

    address: str
    unix_path: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Ids and log probabilities at one position: the sampled token first, then the most likely ones."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Output:
    """One request's part of a step. ``wire_id`` names one submission of the request to one worker."""

    wire_id: str
    tokens: Sequence[int] = ()
    kind: OutputKind = OutputKind.TOKENS
    error: TanghuluError | None = None
    source: KvSource | None = None
    cached_tokens: int = 0
    stop_token: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class MeasuredRead:
    """KV that a worker has read from the one at ``address``."""

    address: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's own report; speeds are 0 until it has measured them.

    ``reads`` are those since its last report. ``peer_bytes_per_s`` is 0 where it cannot load KV from other workers;
    ``prefill`` and ``decode`` are what it has fitted to its steps, None until it has. ``prefill_pairs_waiting`` is what
    ``prefill_tokens_waiting`` cost in attention: the sum of n^2 - p^2 for n tokens of which p are computed.
    """

    num_running: int = 0
    num_waiting: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    prefill_tokens_waiting: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    store_bytes_per_s: float = 0.0
    peer_bytes_per_s: float = 0.0
    prefill: PrefillProfile | None = None
    decode: DecodeProfile | None = None
    reads: tuple[MeasuredRead, ...] = ()
    prefill_pairs_waiting: int = 0


@dataclass(frozen=True, slots=True)
class KvChange:
    """One KV event of a worker: ``cleared`` comes before ``stored``."""

    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    cleared: bool = False


@dataclass(frozen=True, slots=True)
class SessionWelcome:
    """A session's first message: the worker's identity, and the snapshot that its events go on from.

    ``event_sequence`` is the number that the first event behind the snapshot will carry. While the engine runs, steps
    come at least every ``beat_s``, with work or without; 0: the worker does not say so.
    """

    instance_id: InstanceId
    generation: int
    cached_blocks: tuple[BlockHash, ...]
    event_sequence: int
    load: WorkerLoad
    beat_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """The outputs and events of one engine step. ``event_sequence`` numbers the first of ``kv_events``.

    ``load`` holds the session's first ``submits_taken`` submissions; None where the worker does not say.
    """

    outputs: Sequence[Output]
    event_sequence: int
    kv_events: tuple[KvChange, ...]
    load: WorkerLoad | None
    submits_taken: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a model's makers want for tokens to be drawn with, where the client does not say."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The model that a worker serves. ``tokenizer_json`` is zlib-compressed."""

    model: str
    fingerprint: Fingerprint
    block_hash: str
    block_tokens: int
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_json_zlib: bytes = field(repr=False)
    chat_template: str = field(repr=False)
    bos_token: str
    eos_token: str
    add_bos: bool
    block_bytes: int
    sampling_defaults: SamplingDefaults = SamplingDefaults()
