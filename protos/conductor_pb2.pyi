from tanghulu.protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PeerAbort(_message.Message):
    __slots__ = ("request_id", "client")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    client: str
    def __init__(self, request_id: _Optional[str] = ..., client: _Optional[str] = ...) -> None: ...

class PeerAborted(_message.Message):
    __slots__ = ("num_aborted",)
    NUM_ABORTED_FIELD_NUMBER: _ClassVar[int]
    num_aborted: int
    def __init__(self, num_aborted: _Optional[int] = ...) -> None: ...

class PeerFollow(_message.Message):
    __slots__ = ("conductor_id", "protocol_version")
    CONDUCTOR_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    conductor_id: str
    protocol_version: int
    def __init__(self, conductor_id: _Optional[str] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class PeerBegun(_message.Message):
    __slots__ = ("request_id", "worker", "prefill_tokens", "num_blocks", "block_hashes", "decode_worker", "prefilled")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    worker: str
    prefill_tokens: int
    num_blocks: int
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    decode_worker: str
    prefilled: bool
    def __init__(self, request_id: _Optional[str] = ..., worker: _Optional[str] = ..., prefill_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., decode_worker: _Optional[str] = ..., prefilled: _Optional[bool] = ...) -> None: ...

class PeerNews(_message.Message):
    __slots__ = ("snapshot", "begun", "prefilled", "freed")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    FREED_FIELD_NUMBER: _ClassVar[int]
    snapshot: bool
    begun: _containers.RepeatedCompositeFieldContainer[PeerBegun]
    prefilled: _containers.RepeatedScalarFieldContainer[str]
    freed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, snapshot: _Optional[bool] = ..., begun: _Optional[_Iterable[_Union[PeerBegun, _Mapping]]] = ..., prefilled: _Optional[_Iterable[str]] = ..., freed: _Optional[_Iterable[str]] = ...) -> None: ...
