from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_MEMORY: _ClassVar[Tier]
    TIER_SSD: _ClassVar[Tier]
TIER_MEMORY: Tier
TIER_SSD: Tier

class Status(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("transport", "address", "device", "distance")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DISTANCE_FIELD_NUMBER: _ClassVar[int]
    transport: str
    address: str
    device: str
    distance: int
    def __init__(self, transport: _Optional[str] = ..., address: _Optional[str] = ..., device: _Optional[str] = ..., distance: _Optional[int] = ...) -> None: ...

class SegmentDescriptor(_message.Message):
    __slots__ = ("name", "size_bytes", "host_id", "generation", "endpoints")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    host_id: str
    generation: int
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., host_id: _Optional[str] = ..., generation: _Optional[int] = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ...) -> None: ...

class Instance(_message.Message):
    __slots__ = ("id", "namespace", "component", "address", "metrics_address", "place", "generation", "unix_path", "attributes")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    UNIX_PATH_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    id: str
    namespace: str
    component: str
    address: str
    metrics_address: str
    place: str
    generation: int
    unix_path: str
    attributes: _containers.ScalarMap[str, str]
    def __init__(self, id: _Optional[str] = ..., namespace: _Optional[str] = ..., component: _Optional[str] = ..., address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., place: _Optional[str] = ..., generation: _Optional[int] = ..., unix_path: _Optional[str] = ..., attributes: _Optional[_Mapping[str, str]] = ...) -> None: ...

class EndRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndReply(_message.Message):
    __slots__ = ("num_requests", "grace_s")
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    grace_s: float
    def __init__(self, num_requests: _Optional[int] = ..., grace_s: _Optional[float] = ...) -> None: ...
