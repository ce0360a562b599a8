from tanghulu.protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterRequest(_message.Message):
    __slots__ = ("instance", "ttl_ms")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    instance: _common_pb2.Instance
    ttl_ms: int
    def __init__(self, instance: _Optional[_Union[_common_pb2.Instance, _Mapping]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("lease_id", "master_generation")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    MASTER_GENERATION_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    master_generation: int
    def __init__(self, lease_id: _Optional[int] = ..., master_generation: _Optional[int] = ...) -> None: ...

class KeepAliveRequest(_message.Message):
    __slots__ = ("lease_id", "instance_id")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    instance_id: str
    def __init__(self, lease_id: _Optional[int] = ..., instance_id: _Optional[str] = ...) -> None: ...

class KeepAliveReply(_message.Message):
    __slots__ = ("known", "master_generation")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    MASTER_GENERATION_FIELD_NUMBER: _ClassVar[int]
    known: bool
    master_generation: int
    def __init__(self, known: _Optional[bool] = ..., master_generation: _Optional[int] = ...) -> None: ...

class DeregisterRequest(_message.Message):
    __slots__ = ("lease_id", "instance_id")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    instance_id: str
    def __init__(self, lease_id: _Optional[int] = ..., instance_id: _Optional[str] = ...) -> None: ...

class DeregisterReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("namespace", "components")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    components: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, namespace: _Optional[str] = ..., components: _Optional[_Iterable[str]] = ...) -> None: ...

class InstanceEvent(_message.Message):
    __slots__ = ("kind", "instance")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PUT: _ClassVar[InstanceEvent.Kind]
        DELETE: _ClassVar[InstanceEvent.Kind]
        SYNCED: _ClassVar[InstanceEvent.Kind]
    PUT: InstanceEvent.Kind
    DELETE: InstanceEvent.Kind
    SYNCED: InstanceEvent.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    kind: InstanceEvent.Kind
    instance: _common_pb2.Instance
    def __init__(self, kind: _Optional[_Union[InstanceEvent.Kind, str]] = ..., instance: _Optional[_Union[_common_pb2.Instance, _Mapping]] = ...) -> None: ...
