from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Checksums(_message.Message):
    __slots__ = ("part_bytes", "parts")
    PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    part_bytes: int
    parts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, part_bytes: _Optional[int] = ..., parts: _Optional[_Iterable[int]] = ...) -> None: ...
