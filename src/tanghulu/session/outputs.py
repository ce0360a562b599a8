"""The results of a worker's steps: tokens and ends of requests, their KV for other workers, changes of its cache."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct, field

from tanghulu.errors import InvalidRequest
from tanghulu.rpc.wire import U32, U64, Failure, FastMessage
from tanghulu.types import BlockHash, InstanceId, RequestId


class FinishReason(Enum):
    """The reasons for a request's end at a worker; clients see the values of the first three."""

    STOP = "stop"  # end of sequence, a stop token, or a stop string
    LENGTH = "length"
    ABORTED = "abort"
    HANDED_OVER = "handed_over"  # prefilled; its KV is held for another worker
    ERROR = "error"  # the worker cannot continue it


class KvSource(FastMessage, frozen=True):
    """The export in which a worker holds a request's KV for another worker: of its first ``num_tokens`` so far."""

    instance_id: InstanceId
    address: str
    unix_path: str
    export_id: U64
    num_tokens: U32
    #: The host on which ``unix_path`` is a path.
    host_id: str = ""


class PrefixHolder(FastMessage, frozen=True):
    """A worker with the first ``num_blocks`` blocks of a prompt in its cache, as far as the conductor knows."""

    address: str
    unix_path: str
    num_blocks: U32
    #: The host on which ``unix_path`` is a path.
    host_id: str = ""


class TokenLogprobs(FastMessage, frozen=True):
    """Log probabilities at one position: of the sampled token, the most likely ones, those of ``logprob_token_ids``.

    Natural logarithms of the model's own probabilities, before penalties and temperature.
    """

    token_ids: tuple[U32, ...]
    logprobs: tuple[float, ...]


class PhaseTimes(FastMessage, frozen=True):
    """Seconds spent by a request at its worker so far, by the worker's clock.

    ``kv_load_s``: from the store or from another worker; ``kv_store_s``: only while the request waited for it.
    """

    queue_s: float = 0.0
    kv_load_s: float = 0.0
    prefill_s: float = 0.0
    kv_store_s: float = 0.0
    decode_s: float = 0.0


class KvLoad(FastMessage, frozen=True):
    """Tokens of a prompt whose KV a worker loaded before computing the rest: from a ``peer``, ``store`` or ``ssd``.

    The loads of a prompt follow each other, behind what was in the worker's own cache. ``error`` is the code of the
    error that ended this one early.
    """

    source: str
    tokens: U32
    error: str = ""


class Output(Struct, array_like=True, gc=False):
    """New tokens of a request, from one step or several, and perhaps its end.

    ``request_id`` names one submission of the request to one worker. ``failure`` comes with ERROR, ``stop_token`` with
    STOP: the token that ended it. ``source`` comes with HANDED_OVER, and alone during the prefill: its KV can be read
    as far as it is computed. ``cached_tokens`` of the prompt were found in the worker's cache or fetched instead of
    computed; ``loads``, with the first token or the last, are those that were fetched. ``phases`` come with the first
    token and with the last.
    """

    request_id: RequestId
    tokens: list[U32] = field(default_factory=list)
    finish: FinishReason | None = None
    failure: Failure | None = None
    source: KvSource | None = None
    cached_tokens: U32 = 0
    stop_token: U32 = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    phases: PhaseTimes | None = None
    loads: list[KvLoad] = field(default_factory=list)

    def add(self, later: Output) -> None:
        """Append ``later``, an output of the same request from the next step."""
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.loads += later.loads
        self.finish, self.failure, self.source = later.finish, later.failure, later.source
        self.cached_tokens, self.stop_token = later.cached_tokens, later.stop_token
        self.phases = later.phases or self.phases


class PromptScores(FastMessage, frozen=True):
    """Log probabilities of n tokens of a prompt, the first at ``position``; sent before the first new token.

    All numbers are little endian: ``logprobs`` float32 [n]; ``ranks`` uint32 [n], 1 if no token was more likely;
    ``top_ids`` uint32 and ``top_logprobs`` float32 [n, num_top], best first; ``named_logprobs`` float32
    [n, len(logprob_token_ids)].
    """

    request_id: RequestId
    position: U32
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes
    named_logprobs: bytes

    def validate(self) -> None:
        """Raise InvalidRequest unless all tables have complete rows, one for each token."""
        size = len(self.logprobs)
        tables = (self.top_ids, self.top_logprobs, self.named_logprobs)
        if not size or size % 4 or len(self.ranks) != size or any(len(table) % size for table in tables):
            sizes = [len(table) for table in (self.logprobs, self.ranks, *tables)]
            raise InvalidRequest(f"log probabilities of a prompt have tables of {sizes} bytes, not of whole rows")


class KvChange(FastMessage, frozen=True):
    """Blocks that a worker can now, or no longer, serve from its cache; ``cleared`` (all) comes before ``stored``."""

    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    cleared: bool = False
