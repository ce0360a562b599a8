from tanghulu.protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Pin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PIN_NONE: _ClassVar[Pin]
    PIN_SOFT: _ClassVar[Pin]
    PIN_HARD: _ClassVar[Pin]
PIN_NONE: Pin
PIN_SOFT: Pin
PIN_HARD: Pin

class Checksums(_message.Message):
    __slots__ = ("part_bytes", "parts")
    PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    part_bytes: int
    parts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, part_bytes: _Optional[int] = ..., parts: _Optional[_Iterable[int]] = ...) -> None: ...

class ExistsRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, keys: _Optional[_Iterable[str]] = ...) -> None: ...

class ExistsReply(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bytes
    def __init__(self, found: _Optional[bytes] = ...) -> None: ...

class RemoveRequest(_message.Message):
    __slots__ = ("keys", "deadline_ms")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    deadline_ms: int
    def __init__(self, keys: _Optional[_Iterable[str]] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class RemoveReply(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: bytes
    def __init__(self, removed: _Optional[bytes] = ...) -> None: ...

class StatRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, keys: _Optional[_Iterable[str]] = ...) -> None: ...

class ChunkStat(_message.Message):
    __slots__ = ("found", "size_bytes", "version", "checksums", "pin", "num_leases", "age_s", "num_hits", "tier", "replicas", "ttl_ms")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_HITS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    found: bool
    size_bytes: int
    version: int
    checksums: Checksums
    pin: Pin
    num_leases: int
    age_s: float
    num_hits: int
    tier: _common_pb2.Tier
    replicas: int
    ttl_ms: int
    def __init__(self, found: _Optional[bool] = ..., size_bytes: _Optional[int] = ..., version: _Optional[int] = ..., checksums: _Optional[_Union[Checksums, _Mapping]] = ..., pin: _Optional[_Union[Pin, str]] = ..., num_leases: _Optional[int] = ..., age_s: _Optional[float] = ..., num_hits: _Optional[int] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., replicas: _Optional[int] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class StatReply(_message.Message):
    __slots__ = ("chunks",)
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkStat]
    def __init__(self, chunks: _Optional[_Iterable[_Union[ChunkStat, _Mapping]]] = ...) -> None: ...

class EvictionRequest(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: str
    def __init__(self, policy: _Optional[str] = ...) -> None: ...

class EvictionReply(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: str
    def __init__(self, policy: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("draining",)
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    def __init__(self, draining: _Optional[bool] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("keys", "num_bytes")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    num_bytes: int
    def __init__(self, keys: _Optional[_Iterable[str]] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class EvictReply(_message.Message):
    __slots__ = ("num_chunks", "num_bytes")
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_chunks: int
    num_bytes: int
    def __init__(self, num_chunks: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("after", "limit", "drop_corrupt", "report")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    DROP_CORRUPT_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    after: str
    limit: int
    drop_corrupt: bool
    report: bool
    def __init__(self, after: _Optional[str] = ..., limit: _Optional[int] = ..., drop_corrupt: _Optional[bool] = ..., report: _Optional[bool] = ...) -> None: ...

class Verified(_message.Message):
    __slots__ = ("key", "version", "size_bytes", "corrupt")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    key: str
    version: int
    size_bytes: int
    corrupt: bool
    def __init__(self, key: _Optional[str] = ..., version: _Optional[int] = ..., size_bytes: _Optional[int] = ..., corrupt: _Optional[bool] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("chunks", "more")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[Verified]
    more: bool
    def __init__(self, chunks: _Optional[_Iterable[_Union[Verified, _Mapping]]] = ..., more: _Optional[bool] = ...) -> None: ...

class TenantsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TenantUsage(_message.Message):
    __slots__ = ("tenant", "quota_bytes", "used_bytes", "num_chunks", "hits", "misses", "evictions", "cluster_quota_bytes", "hit_bytes", "evicted_bytes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    HIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    quota_bytes: int
    used_bytes: int
    num_chunks: int
    hits: int
    misses: int
    evictions: int
    cluster_quota_bytes: int
    hit_bytes: int
    evicted_bytes: int
    def __init__(self, tenant: _Optional[str] = ..., quota_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., num_chunks: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., evictions: _Optional[int] = ..., cluster_quota_bytes: _Optional[int] = ..., hit_bytes: _Optional[int] = ..., evicted_bytes: _Optional[int] = ...) -> None: ...

class TenantsReply(_message.Message):
    __slots__ = ("tenants",)
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantUsage]
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantUsage, _Mapping]]] = ...) -> None: ...
