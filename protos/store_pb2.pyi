from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Pin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NONE: _ClassVar[Pin]
    SOFT: _ClassVar[Pin]
    HARD: _ClassVar[Pin]
NONE: Pin
SOFT: Pin
HARD: Pin

class PutRequest(_message.Message):
    __slots__ = ("key", "value", "replicas", "pin", "ttl_s", "prefer_node")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    PREFER_NODE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    replicas: int
    pin: Pin
    ttl_s: float
    prefer_node: str
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ..., replicas: _Optional[int] = ..., pin: _Optional[_Union[Pin, str]] = ..., ttl_s: _Optional[float] = ..., prefer_node: _Optional[str] = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ("existed", "num_replicas")
    EXISTED_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    existed: bool
    num_replicas: int
    def __init__(self, existed: _Optional[bool] = ..., num_replicas: _Optional[int] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("key", "offset", "length")
    KEY_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    key: str
    offset: int
    length: int
    def __init__(self, key: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class GetReply(_message.Message):
    __slots__ = ("value", "version")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    value: bytes
    version: int
    def __init__(self, value: _Optional[bytes] = ..., version: _Optional[int] = ...) -> None: ...

class Keys(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, keys: _Optional[_Iterable[str]] = ...) -> None: ...

class ExistsReply(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, found: _Optional[_Iterable[bool]] = ...) -> None: ...

class RemoveReply(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, removed: _Optional[_Iterable[bool]] = ...) -> None: ...

class StatRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: str
    def __init__(self, key: _Optional[str] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("key", "size_bytes", "version", "nodes", "pin", "ttl_s", "replicas", "age_s", "num_hits", "num_leases", "tier")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    key: str
    size_bytes: int
    version: int
    nodes: _containers.RepeatedScalarFieldContainer[str]
    pin: Pin
    ttl_s: float
    replicas: int
    age_s: float
    num_hits: int
    num_leases: int
    tier: str
    def __init__(self, key: _Optional[str] = ..., size_bytes: _Optional[int] = ..., version: _Optional[int] = ..., nodes: _Optional[_Iterable[str]] = ..., pin: _Optional[_Union[Pin, str]] = ..., ttl_s: _Optional[float] = ..., replicas: _Optional[int] = ..., age_s: _Optional[float] = ..., num_hits: _Optional[int] = ..., num_leases: _Optional[int] = ..., tier: _Optional[str] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("prefix", "after", "limit")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    after: str
    limit: int
    def __init__(self, prefix: _Optional[str] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListedChunk(_message.Message):
    __slots__ = ("key", "size_bytes", "version", "nodes")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    key: str
    size_bytes: int
    version: int
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, key: _Optional[str] = ..., size_bytes: _Optional[int] = ..., version: _Optional[int] = ..., nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("chunks", "next")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[ListedChunk]
    next: str
    def __init__(self, chunks: _Optional[_Iterable[_Union[ListedChunk, _Mapping]]] = ..., next: _Optional[str] = ...) -> None: ...
