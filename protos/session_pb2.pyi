from tanghulu.protos import common_pb2 as _common_pb2
from tanghulu.protos import store_pb2 as _store_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_NONE: _ClassVar[FinishReason]
    FINISH_STOP: _ClassVar[FinishReason]
    FINISH_LENGTH: _ClassVar[FinishReason]
    FINISH_HANDED_OVER: _ClassVar[FinishReason]
    FINISH_ABORTED: _ClassVar[FinishReason]
    FINISH_ERROR: _ClassVar[FinishReason]
FINISH_NONE: FinishReason
FINISH_STOP: FinishReason
FINISH_LENGTH: FinishReason
FINISH_HANDED_OVER: FinishReason
FINISH_ABORTED: FinishReason
FINISH_ERROR: FinishReason

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SamplingDefaults(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ...) -> None: ...

class ModelCard(_message.Message):
    __slots__ = ("model", "fingerprint", "block_hash", "block_tokens", "context_length", "vocab_size", "dtype", "eos_token_ids", "tokenizer_json_zlib", "chat_template", "bos_token", "eos_token", "add_bos", "block_bytes", "num_blocks", "secret_check", "sampling_defaults")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_JSON_ZLIB_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ADD_BOS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SECRET_CHECK_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    model: str
    fingerprint: bytes
    block_hash: str
    block_tokens: int
    context_length: int
    vocab_size: int
    dtype: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    tokenizer_json_zlib: bytes
    chat_template: str
    bos_token: str
    eos_token: str
    add_bos: bool
    block_bytes: int
    num_blocks: int
    secret_check: bytes
    sampling_defaults: SamplingDefaults
    def __init__(self, model: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., block_hash: _Optional[str] = ..., block_tokens: _Optional[int] = ..., context_length: _Optional[int] = ..., vocab_size: _Optional[int] = ..., dtype: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., tokenizer_json_zlib: _Optional[bytes] = ..., chat_template: _Optional[str] = ..., bos_token: _Optional[str] = ..., eos_token: _Optional[str] = ..., add_bos: _Optional[bool] = ..., block_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., secret_check: _Optional[bytes] = ..., sampling_defaults: _Optional[_Union[SamplingDefaults, _Mapping]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed", "logit_bias", "num_logprobs", "json_schema", "regex", "lark", "logprob_token_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int
    logit_bias: _containers.ScalarMap[int, float]
    num_logprobs: int
    json_schema: str
    regex: str
    lark: str
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., num_logprobs: _Optional[int] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., lark: _Optional[str] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PromptScoring(_message.Message):
    __slots__ = ("start", "num_top")
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    num_top: int
    def __init__(self, start: _Optional[int] = ..., num_top: _Optional[int] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("max_new_tokens", "stop_token_ids", "ignore_eos", "min_tokens")
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_new_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    min_tokens: int
    def __init__(self, max_new_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., min_tokens: _Optional[int] = ...) -> None: ...

class KvSource(_message.Message):
    __slots__ = ("instance_id", "address", "unix_path", "export_id", "num_tokens", "host_id")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    UNIX_PATH_FIELD_NUMBER: _ClassVar[int]
    EXPORT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    address: str
    unix_path: str
    export_id: int
    num_tokens: int
    host_id: str
    def __init__(self, instance_id: _Optional[str] = ..., address: _Optional[str] = ..., unix_path: _Optional[str] = ..., export_id: _Optional[int] = ..., num_tokens: _Optional[int] = ..., host_id: _Optional[str] = ...) -> None: ...

class PrefixHolder(_message.Message):
    __slots__ = ("address", "unix_path", "num_blocks", "host_id")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    UNIX_PATH_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    address: str
    unix_path: str
    num_blocks: int
    host_id: str
    def __init__(self, address: _Optional[str] = ..., unix_path: _Optional[str] = ..., num_blocks: _Optional[int] = ..., host_id: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "tokens", "num_prompt_tokens", "sampling", "stop", "salt", "hand_over", "source", "priority", "holder", "client", "moved", "ahead", "weight", "scoring", "traceparent", "x_request_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SCORING_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    X_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokens: bytes
    num_prompt_tokens: int
    sampling: Sampling
    stop: Stop
    salt: bytes
    hand_over: bool
    source: KvSource
    priority: int
    holder: PrefixHolder
    client: str
    moved: bool
    ahead: str
    weight: float
    scoring: PromptScoring
    traceparent: str
    x_request_id: str
    def __init__(self, request_id: _Optional[str] = ..., tokens: _Optional[bytes] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., salt: _Optional[bytes] = ..., hand_over: _Optional[bool] = ..., source: _Optional[_Union[KvSource, _Mapping]] = ..., priority: _Optional[int] = ..., holder: _Optional[_Union[PrefixHolder, _Mapping]] = ..., client: _Optional[str] = ..., moved: _Optional[bool] = ..., ahead: _Optional[str] = ..., weight: _Optional[float] = ..., scoring: _Optional[_Union[PromptScoring, _Mapping]] = ..., traceparent: _Optional[str] = ..., x_request_id: _Optional[str] = ...) -> None: ...

class PullAhead(_message.Message):
    __slots__ = ("name", "tokens", "salt", "source")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    tokens: bytes
    salt: bytes
    source: KvSource
    def __init__(self, name: _Optional[str] = ..., tokens: _Optional[bytes] = ..., salt: _Optional[bytes] = ..., source: _Optional[_Union[KvSource, _Mapping]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ReleaseExport(_message.Message):
    __slots__ = ("export_id",)
    EXPORT_ID_FIELD_NUMBER: _ClassVar[int]
    export_id: int
    def __init__(self, export_id: _Optional[int] = ...) -> None: ...

class SessionHello(_message.Message):
    __slots__ = ("conductor_id", "protocol_version")
    CONDUCTOR_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    conductor_id: str
    protocol_version: int
    def __init__(self, conductor_id: _Optional[str] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class ToWorker(_message.Message):
    __slots__ = ("hello", "submit", "abort", "release", "pull")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    hello: SessionHello
    submit: Submit
    abort: Abort
    release: ReleaseExport
    pull: PullAhead
    def __init__(self, hello: _Optional[_Union[SessionHello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., release: _Optional[_Union[ReleaseExport, _Mapping]] = ..., pull: _Optional[_Union[PullAhead, _Mapping]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class PromptScores(_message.Message):
    __slots__ = ("request_id", "position", "logprobs", "ranks", "top_ids", "top_logprobs", "asked_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ASKED_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    position: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes
    asked_logprobs: bytes
    def __init__(self, request_id: _Optional[str] = ..., position: _Optional[int] = ..., logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ..., asked_logprobs: _Optional[bytes] = ...) -> None: ...

class PhaseTimes(_message.Message):
    __slots__ = ("queue_s", "kv_load_s", "prefill_s", "kv_store_s", "decode_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    KV_LOAD_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    KV_STORE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    kv_load_s: float
    prefill_s: float
    kv_store_s: float
    decode_s: float
    def __init__(self, queue_s: _Optional[float] = ..., kv_load_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., kv_store_s: _Optional[float] = ..., decode_s: _Optional[float] = ...) -> None: ...

class RequestOutput(_message.Message):
    __slots__ = ("request_id", "tokens", "finish", "error", "source", "cached_tokens", "computed_tokens", "stop_token", "logprobs", "phases")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    finish: FinishReason
    error: _common_pb2.Status
    source: KvSource
    cached_tokens: int
    computed_tokens: int
    stop_token: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    phases: PhaseTimes
    def __init__(self, request_id: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., finish: _Optional[_Union[FinishReason, str]] = ..., error: _Optional[_Union[_common_pb2.Status, _Mapping]] = ..., source: _Optional[_Union[KvSource, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., stop_token: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., phases: _Optional[_Union[PhaseTimes, _Mapping]] = ...) -> None: ...

class BegunExport(_message.Message):
    __slots__ = ("request_id", "source")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    source: KvSource
    def __init__(self, request_id: _Optional[str] = ..., source: _Optional[_Union[KvSource, _Mapping]] = ...) -> None: ...

class KvEvent(_message.Message):
    __slots__ = ("stored", "removed", "cleared")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    stored: _containers.RepeatedScalarFieldContainer[bytes]
    removed: _containers.RepeatedScalarFieldContainer[bytes]
    cleared: bool
    def __init__(self, stored: _Optional[_Iterable[bytes]] = ..., removed: _Optional[_Iterable[bytes]] = ..., cleared: _Optional[bool] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_running", "num_waiting", "blocks_total", "blocks_free", "prefill_tokens_waiting", "prefill_tokens_per_s", "decode_step_s", "store_bytes_per_s", "peer_bytes_per_s", "costs", "reads", "prefill_pairs_waiting", "max_num_seqs")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_WAITING_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    STORE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    PEER_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PAIRS_WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    blocks_total: int
    blocks_free: int
    prefill_tokens_waiting: int
    prefill_tokens_per_s: float
    decode_step_s: float
    store_bytes_per_s: float
    peer_bytes_per_s: float
    costs: StepCosts
    reads: _containers.RepeatedCompositeFieldContainer[PeerRead]
    prefill_pairs_waiting: int
    max_num_seqs: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_free: _Optional[int] = ..., prefill_tokens_waiting: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_step_s: _Optional[float] = ..., store_bytes_per_s: _Optional[float] = ..., peer_bytes_per_s: _Optional[float] = ..., costs: _Optional[_Union[StepCosts, _Mapping]] = ..., reads: _Optional[_Iterable[_Union[PeerRead, _Mapping]]] = ..., prefill_pairs_waiting: _Optional[int] = ..., max_num_seqs: _Optional[int] = ...) -> None: ...

class PeerRead(_message.Message):
    __slots__ = ("address", "num_bytes", "seconds")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    address: str
    num_bytes: int
    seconds: float
    def __init__(self, address: _Optional[str] = ..., num_bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class StepCosts(_message.Message):
    __slots__ = ("prefill_fixed_s", "prefill_token_s", "prefill_pair_s", "decode_fixed_s", "decode_sequence_s", "decode_context_s")
    PREFILL_FIXED_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PAIR_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIXED_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_SEQUENCE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_S_FIELD_NUMBER: _ClassVar[int]
    prefill_fixed_s: float
    prefill_token_s: float
    prefill_pair_s: float
    decode_fixed_s: float
    decode_sequence_s: float
    decode_context_s: float
    def __init__(self, prefill_fixed_s: _Optional[float] = ..., prefill_token_s: _Optional[float] = ..., prefill_pair_s: _Optional[float] = ..., decode_fixed_s: _Optional[float] = ..., decode_sequence_s: _Optional[float] = ..., decode_context_s: _Optional[float] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("step", "outputs", "event_sequence", "kv_events", "load", "submits_taken", "begun", "scores")
    STEP_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    EVENT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SUBMITS_TAKEN_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    step: int
    outputs: _containers.RepeatedCompositeFieldContainer[RequestOutput]
    event_sequence: int
    kv_events: _containers.RepeatedCompositeFieldContainer[KvEvent]
    load: Load
    submits_taken: int
    begun: _containers.RepeatedCompositeFieldContainer[BegunExport]
    scores: _containers.RepeatedCompositeFieldContainer[PromptScores]
    def __init__(self, step: _Optional[int] = ..., outputs: _Optional[_Iterable[_Union[RequestOutput, _Mapping]]] = ..., event_sequence: _Optional[int] = ..., kv_events: _Optional[_Iterable[_Union[KvEvent, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., submits_taken: _Optional[int] = ..., begun: _Optional[_Iterable[_Union[BegunExport, _Mapping]]] = ..., scores: _Optional[_Iterable[_Union[PromptScores, _Mapping]]] = ...) -> None: ...

class SessionWelcome(_message.Message):
    __slots__ = ("instance_id", "generation", "cached_blocks", "event_sequence", "load", "beat_s")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVENT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    BEAT_S_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    generation: int
    cached_blocks: _containers.RepeatedScalarFieldContainer[bytes]
    event_sequence: int
    load: Load
    beat_s: float
    def __init__(self, instance_id: _Optional[str] = ..., generation: _Optional[int] = ..., cached_blocks: _Optional[_Iterable[bytes]] = ..., event_sequence: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., beat_s: _Optional[float] = ...) -> None: ...

class FromWorker(_message.Message):
    __slots__ = ("welcome", "step")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    welcome: SessionWelcome
    step: StepOutput
    def __init__(self, welcome: _Optional[_Union[SessionWelcome, _Mapping]] = ..., step: _Optional[_Union[StepOutput, _Mapping]] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("deadline_s",)
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    deadline_s: float
    def __init__(self, deadline_s: _Optional[float] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class DropCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DropCacheReply(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class ExportPinRequest(_message.Message):
    __slots__ = ("export_id", "first_block", "fingerprint", "max_blocks")
    EXPORT_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    export_id: int
    first_block: int
    fingerprint: bytes
    max_blocks: int
    def __init__(self, export_id: _Optional[int] = ..., first_block: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., max_blocks: _Optional[int] = ...) -> None: ...

class ExportedBlock(_message.Message):
    __slots__ = ("offset", "length", "checksums", "lease_id")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    offset: int
    length: int
    checksums: _store_pb2.Checksums
    lease_id: int
    def __init__(self, offset: _Optional[int] = ..., length: _Optional[int] = ..., checksums: _Optional[_Union[_store_pb2.Checksums, _Mapping]] = ..., lease_id: _Optional[int] = ...) -> None: ...

class PrefixPinRequest(_message.Message):
    __slots__ = ("block_hashes", "fingerprint")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    fingerprint: bytes
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class ExportPinReply(_message.Message):
    __slots__ = ("status", "num_tokens", "blocks", "export_id")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EXPORT_ID_FIELD_NUMBER: _ClassVar[int]
    status: _common_pb2.Status
    num_tokens: int
    blocks: _containers.RepeatedCompositeFieldContainer[ExportedBlock]
    export_id: int
    def __init__(self, status: _Optional[_Union[_common_pb2.Status, _Mapping]] = ..., num_tokens: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[ExportedBlock, _Mapping]]] = ..., export_id: _Optional[int] = ...) -> None: ...

class ExportReleaseRequest(_message.Message):
    __slots__ = ("export_id", "bytes_read", "keep")
    EXPORT_ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    export_id: int
    bytes_read: int
    keep: bool
    def __init__(self, export_id: _Optional[int] = ..., bytes_read: _Optional[int] = ..., keep: _Optional[bool] = ...) -> None: ...

class ExportReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExportWatchRequest(_message.Message):
    __slots__ = ("export_id", "num_known", "fingerprint", "wait_ms")
    EXPORT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    export_id: int
    num_known: int
    fingerprint: bytes
    wait_ms: int
    def __init__(self, export_id: _Optional[int] = ..., num_known: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class ExportWatchReply(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...
