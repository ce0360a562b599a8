"""Requests to workers, and the workers' descriptions, reports and outputs, as plain values.

The conductor's parts share them. Knows nothing of HTTP, protobuf or text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tanghulu.conductor.routing.cost import DecodeProfile, PrefillProfile
from tanghulu.conductor.routing.overrides import NO_OVERRIDES, RoutingOverrides
from tanghulu.conductor.stories.origin import Origin
from tanghulu.conductor.stories.story import WorkerPhases
from tanghulu.errors import TanghuluError
from tanghulu.hashing import Tokens
from tanghulu.types import BlockHash, Fingerprint, InstanceId, RequestId


class Sampling(Struct, frozen=True):
    """Parameters of drawing a token. ``temperature`` 0 is argmax; ``top_k`` 0 is off. At most one grammar is given."""

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
    logprob_token_ids: tuple[int, ...] = ()


class WantedPromptLogprobs(Struct, frozen=True):
    """The prompt's own log probabilities that are wanted: from position ``start`` on, which is at least 1."""

    start: int
    num_top: int = 0


class StopRule(Struct, frozen=True):
    """The rule by which a worker ends a request; the conductor itself looks for stop *strings*."""

    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0


class Timeouts(Struct, frozen=True):
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


class GenerationRequest(Struct, frozen=True, eq=False):
    """One sequence to continue. ``prompt``: uint32, shape ``[num_prompt_tokens]``.

    ``client`` is who takes turns with others where many wait, ``weight`` of them for each of another's; "" where nobody
    is known. ``timeouts`` are its own. ``origin`` is the HTTP request that it comes from, if any.
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
    scoring: WantedPromptLogprobs | None = None
    origin: Origin | None = None


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


class KvSource(Struct, frozen=True):
    """The export in which a worker holds a request's KV for another worker."""

    instance_id: InstanceId
    address: str
    unix_path: str
    export_id: int
    num_tokens: int
    #: Of the host on which ``unix_path`` is a path.
    host_id: str = ""


class PrefixSource(Struct, frozen=True):
    """A worker that has the first ``num_blocks`` blocks of a prompt in its cache, as far as is known."""

    address: str
    unix_path: str
    num_blocks: int
    #: Of the host on which ``unix_path`` is a path.
    host_id: str = ""


class TokenLogprobs(Struct, frozen=True):
    """Ids and log probabilities at one position: the sampled token, the most likely ones, those asked for by id."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class PromptLogprobs(Struct, frozen=True, eq=False):
    """Log probabilities of n tokens of a prompt, the first at ``position``.

    ``logprobs`` float32 [n]; ``ranks`` uint32 [n], 1 where no token was more likely; ``top_ids`` uint32 and
    ``top_logprobs`` float32 [n, num_top], best first; ``asked_logprobs`` float32 [n, len(logprob_token_ids)].
    """

    position: int
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.uint32]
    top_ids: npt.NDArray[np.uint32]
    top_logprobs: npt.NDArray[np.float32]
    asked_logprobs: npt.NDArray[np.float32]

    @property
    def end(self) -> int:
        """Position behind the last one."""
        return self.position + len(self.logprobs)


class Output(Struct, frozen=True):
    """One request's part of a step. ``wire_id`` names one submission of the request to one worker."""

    wire_id: str
    tokens: Sequence[int] = ()
    kind: OutputKind = OutputKind.TOKENS
    error: TanghuluError | None = None
    source: KvSource | None = None
    cached_tokens: int = 0
    stop_token: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    phases: WorkerPhases | None = None


class MeasuredRead(Struct, frozen=True):
    """KV that a worker has read from the one at ``address``."""

    address: str
    num_bytes: int
    seconds: float


class WorkerLoad(Struct, frozen=True):
    """A worker's own report; speeds are 0 until it has measured them.

    ``reads`` are those since its last report. ``peer_bytes_per_s`` is 0 where it cannot load KV from other workers;
    ``prefill`` and ``decode`` are what it has fitted to its steps, None until it has. ``prefill_pairs_waiting`` is what
    ``prefill_tokens_waiting`` cost in attention: the sum of n^2 - p^2 for n tokens of which p are computed.
    ``max_num_seqs`` is the number of its seats, requests in one step at most; 0 if unknown.
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
    max_num_seqs: int = 0


class KvChange(Struct, frozen=True):
    """One KV event of a worker: ``cleared`` comes before ``stored``."""

    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    cleared: bool = False


class SessionWelcome(Struct, frozen=True):
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


class BegunExport(Struct, frozen=True):
    """The export that grows while the submission ``wire_id`` is prefilled, and ends with that."""

    wire_id: str
    source: KvSource


class Step(Struct, frozen=True):
    """The outputs and events of one engine step. ``event_sequence`` numbers the first of ``kv_events``.

    ``begun``: prefills to be handed over whose KV may be fetched while they go on. ``scores`` are parts of prompts' log
    probabilities, each with its request's ``wire_id``.

    ``load`` holds the session's first ``submits_taken`` submissions; None where the worker does not say.
    """

    outputs: Sequence[Output]
    event_sequence: int
    kv_events: tuple[KvChange, ...]
    load: WorkerLoad | None
    submits_taken: int | None = None
    begun: Sequence[BegunExport] = ()
    scores: Sequence[tuple[str, PromptLogprobs]] = ()


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
    kv_dtype: str = ""
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    #: ``ClusterSecret.check_value`` of the worker.
    secret_check: bytes = b""
