from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RouterDone(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RouterDumpRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RouterWorker(_message.Message):
    __slots__ = ("worker", "role", "place", "url")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    worker: str
    role: str
    place: str
    url: str
    def __init__(self, worker: _Optional[str] = ..., role: _Optional[str] = ..., place: _Optional[str] = ..., url: _Optional[str] = ...) -> None: ...

class RouterGenerate(_message.Message):
    __slots__ = ("body",)
    BODY_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    def __init__(self, body: _Optional[bytes] = ...) -> None: ...

class RouterPiece(_message.Message):
    __slots__ = ("status", "worker", "data")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    status: int
    worker: str
    data: bytes
    def __init__(self, status: _Optional[int] = ..., worker: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class RouterWorkerName(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: str
    def __init__(self, worker: _Optional[str] = ...) -> None: ...

class RouterRequestName(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class RouterLoad(_message.Message):
    __slots__ = ("worker", "num_running", "num_waiting", "blocks_total", "blocks_free", "prefill_tokens_waiting", "prefill_tokens_per_s", "decode_step_s", "store_bytes_per_s")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_WAITING_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    STORE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    worker: str
    num_running: int
    num_waiting: int
    blocks_total: int
    blocks_free: int
    prefill_tokens_waiting: int
    prefill_tokens_per_s: float
    decode_step_s: float
    store_bytes_per_s: float
    def __init__(self, worker: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_free: _Optional[int] = ..., prefill_tokens_waiting: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_step_s: _Optional[float] = ..., store_bytes_per_s: _Optional[float] = ...) -> None: ...

class RouterEvents(_message.Message):
    __slots__ = ("worker", "stored", "removed", "cleared")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    worker: str
    stored: _containers.RepeatedScalarFieldContainer[bytes]
    removed: _containers.RepeatedScalarFieldContainer[bytes]
    cleared: bool
    def __init__(self, worker: _Optional[str] = ..., stored: _Optional[_Iterable[bytes]] = ..., removed: _Optional[_Iterable[bytes]] = ..., cleared: _Optional[bool] = ...) -> None: ...

class RouterQuestion(_message.Message):
    __slots__ = ("block_hashes", "tokens", "num_tokens", "request_id", "session", "policy", "weights", "prefill_worker", "decode_worker", "explain", "cache_salt", "lora", "lora_path", "media")
    class WeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    LORA_PATH_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    tokens: bytes
    num_tokens: int
    request_id: str
    session: str
    policy: str
    weights: _containers.ScalarMap[str, float]
    prefill_worker: str
    decode_worker: str
    explain: bool
    cache_salt: str
    lora: str
    lora_path: str
    media: _containers.RepeatedCompositeFieldContainer[RouterMedia]
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ..., tokens: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., request_id: _Optional[str] = ..., session: _Optional[str] = ..., policy: _Optional[str] = ..., weights: _Optional[_Mapping[str, float]] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., explain: _Optional[bool] = ..., cache_salt: _Optional[str] = ..., lora: _Optional[str] = ..., lora_path: _Optional[str] = ..., media: _Optional[_Iterable[_Union[RouterMedia, _Mapping]]] = ...) -> None: ...

class RouterMedia(_message.Message):
    __slots__ = ("identifier", "offset", "length")
    IDENTIFIER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    identifier: str
    offset: int
    length: int
    def __init__(self, identifier: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class RouterAddRequest(_message.Message):
    __slots__ = ("question", "prefill_worker", "decode_worker")
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    question: RouterQuestion
    prefill_worker: str
    decode_worker: str
    def __init__(self, question: _Optional[_Union[RouterQuestion, _Mapping]] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ...) -> None: ...

class RouterCandidate(_message.Message):
    __slots__ = ("worker", "phase", "score", "terms")
    class TermsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    phase: str
    score: float
    terms: _containers.ScalarMap[str, float]
    def __init__(self, worker: _Optional[str] = ..., phase: _Optional[str] = ..., score: _Optional[float] = ..., terms: _Optional[_Mapping[str, float]] = ...) -> None: ...

class RouterBest(_message.Message):
    __slots__ = ("prefill_worker", "decode_worker", "overlap_blocks", "candidates")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    decode_worker: str
    overlap_blocks: int
    candidates: _containers.RepeatedCompositeFieldContainer[RouterCandidate]
    def __init__(self, prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., overlap_blocks: _Optional[int] = ..., candidates: _Optional[_Iterable[_Union[RouterCandidate, _Mapping]]] = ...) -> None: ...

class RouterOverlap(_message.Message):
    __slots__ = ("worker", "num_blocks")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    num_blocks: int
    def __init__(self, worker: _Optional[str] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class RouterOverlaps(_message.Message):
    __slots__ = ("overlaps",)
    OVERLAPS_FIELD_NUMBER: _ClassVar[int]
    overlaps: _containers.RepeatedCompositeFieldContainer[RouterOverlap]
    def __init__(self, overlaps: _Optional[_Iterable[_Union[RouterOverlap, _Mapping]]] = ...) -> None: ...

class RouterPotentialLoad(_message.Message):
    __slots__ = ("worker", "prefill_tokens", "decode_blocks", "num_requests")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    prefill_tokens: int
    decode_blocks: int
    num_requests: int
    def __init__(self, worker: _Optional[str] = ..., prefill_tokens: _Optional[int] = ..., decode_blocks: _Optional[int] = ..., num_requests: _Optional[int] = ...) -> None: ...

class RouterPotentialLoads(_message.Message):
    __slots__ = ("loads",)
    LOADS_FIELD_NUMBER: _ClassVar[int]
    loads: _containers.RepeatedCompositeFieldContainer[RouterPotentialLoad]
    def __init__(self, loads: _Optional[_Iterable[_Union[RouterPotentialLoad, _Mapping]]] = ...) -> None: ...
