from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor

class Method(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    METHOD_NONE: _ClassVar[Method]
    METHOD_HELLO: _ClassVar[Method]
    METHOD_ERROR: _ClassVar[Method]
    METHOD_PUT: _ClassVar[Method]
    METHOD_RESERVE: _ClassVar[Method]
    METHOD_COMMIT: _ClassVar[Method]
    METHOD_GET: _ClassVar[Method]
    METHOD_UNPIN: _ClassVar[Method]
    METHOD_EXISTS: _ClassVar[Method]
    METHOD_REMOVE: _ClassVar[Method]
    METHOD_CHUNK_STAT: _ClassVar[Method]
    METHOD_EVICTION: _ClassVar[Method]
    METHOD_DRAIN: _ClassVar[Method]
    METHOD_EVICT: _ClassVar[Method]
    METHOD_VERIFY: _ClassVar[Method]
    METHOD_TENANTS: _ClassVar[Method]
    METHOD_DESK: _ClassVar[Method]
    METHOD_STREAM: _ClassVar[Method]
    METHOD_SETTLE: _ClassVar[Method]
    METHOD_ANNOUNCE: _ClassVar[Method]
    METHOD_LOCATE: _ClassVar[Method]
    METHOD_PLACE: _ClassVar[Method]
    METHOD_NODES: _ClassVar[Method]
    METHOD_LIST_KEYS: _ClassVar[Method]
    METHOD_PROCLAIM: _ClassVar[Method]
    METHOD_WAIT: _ClassVar[Method]
    METHOD_PROCLAIM_MANY: _ClassVar[Method]
    METHOD_REPLICATE: _ClassVar[Method]
    METHOD_EXPORT_PIN: _ClassVar[Method]
    METHOD_EXPORT_RELEASE: _ClassVar[Method]
    METHOD_PREFIX_PIN: _ClassVar[Method]
METHOD_NONE: Method
METHOD_HELLO: Method
METHOD_ERROR: Method
METHOD_PUT: Method
METHOD_RESERVE: Method
METHOD_COMMIT: Method
METHOD_GET: Method
METHOD_UNPIN: Method
METHOD_EXISTS: Method
METHOD_REMOVE: Method
METHOD_CHUNK_STAT: Method
METHOD_EVICTION: Method
METHOD_DRAIN: Method
METHOD_EVICT: Method
METHOD_VERIFY: Method
METHOD_TENANTS: Method
METHOD_DESK: Method
METHOD_STREAM: Method
METHOD_SETTLE: Method
METHOD_ANNOUNCE: Method
METHOD_LOCATE: Method
METHOD_PLACE: Method
METHOD_NODES: Method
METHOD_LIST_KEYS: Method
METHOD_PROCLAIM: Method
METHOD_WAIT: Method
METHOD_PROCLAIM_MANY: Method
METHOD_REPLICATE: Method
METHOD_EXPORT_PIN: Method
METHOD_EXPORT_RELEASE: Method
METHOD_PREFIX_PIN: Method
