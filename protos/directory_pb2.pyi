from tanghulu.protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChunkEntry(_message.Message):
    __slots__ = ("key", "version", "size_bytes", "tier", "unconfirmed")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    UNCONFIRMED_FIELD_NUMBER: _ClassVar[int]
    key: str
    version: int
    size_bytes: int
    tier: _common_pb2.Tier
    unconfirmed: bool
    def __init__(self, key: _Optional[str] = ..., version: _Optional[int] = ..., size_bytes: _Optional[int] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., unconfirmed: _Optional[bool] = ...) -> None: ...

class ReportPiece(_message.Message):
    __slots__ = ("number", "next_slot", "keys", "versions", "sizes", "cold")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NEXT_SLOT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    COLD_FIELD_NUMBER: _ClassVar[int]
    number: int
    next_slot: int
    keys: _containers.RepeatedScalarFieldContainer[str]
    versions: _containers.RepeatedScalarFieldContainer[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    cold: bytes
    def __init__(self, number: _Optional[int] = ..., next_slot: _Optional[int] = ..., keys: _Optional[_Iterable[str]] = ..., versions: _Optional[_Iterable[int]] = ..., sizes: _Optional[_Iterable[int]] = ..., cold: _Optional[bytes] = ...) -> None: ...

class CopyOrder(_message.Message):
    __slots__ = ("key", "version", "size_bytes", "source")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    key: str
    version: int
    size_bytes: int
    source: str
    def __init__(self, key: _Optional[str] = ..., version: _Optional[int] = ..., size_bytes: _Optional[int] = ..., source: _Optional[str] = ...) -> None: ...

class DropOrder(_message.Message):
    __slots__ = ("key", "version", "removed")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    key: str
    version: int
    removed: bool
    def __init__(self, key: _Optional[str] = ..., version: _Optional[int] = ..., removed: _Optional[bool] = ...) -> None: ...

class CopyNews(_message.Message):
    __slots__ = ("replicated", "quiet", "hot", "failed")
    REPLICATED_FIELD_NUMBER: _ClassVar[int]
    QUIET_FIELD_NUMBER: _ClassVar[int]
    HOT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    replicated: _containers.RepeatedCompositeFieldContainer[Replicated]
    quiet: bool
    hot: _containers.RepeatedCompositeFieldContainer[HotKey]
    failed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, replicated: _Optional[_Iterable[_Union[Replicated, _Mapping]]] = ..., quiet: _Optional[bool] = ..., hot: _Optional[_Iterable[_Union[HotKey, _Mapping]]] = ..., failed: _Optional[_Iterable[str]] = ...) -> None: ...

class Replicated(_message.Message):
    __slots__ = ("key", "replicas")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    key: str
    replicas: int
    def __init__(self, key: _Optional[str] = ..., replicas: _Optional[int] = ...) -> None: ...

class HotKey(_message.Message):
    __slots__ = ("key", "num_gets")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_GETS_FIELD_NUMBER: _ClassVar[int]
    key: str
    num_gets: int
    def __init__(self, key: _Optional[str] = ..., num_gets: _Optional[int] = ...) -> None: ...

class AnnounceRequest(_message.Message):
    __slots__ = ("node_id", "generation", "added", "removed", "capacity_bytes", "used_bytes", "deleted", "ssd_capacity_bytes", "ssd_used_bytes", "term", "term_of", "news", "tenants", "withdrawn", "report_id", "piece", "removed_versions", "deleted_versions", "map_version", "owned", "ranges")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    SSD_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    TERM_OF_FIELD_NUMBER: _ClassVar[int]
    NEWS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    REPORT_ID_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    REMOVED_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    DELETED_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    MAP_VERSION_FIELD_NUMBER: _ClassVar[int]
    OWNED_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    generation: int
    added: _containers.RepeatedCompositeFieldContainer[ChunkEntry]
    removed: _containers.RepeatedScalarFieldContainer[str]
    capacity_bytes: int
    used_bytes: int
    deleted: _containers.RepeatedScalarFieldContainer[str]
    ssd_capacity_bytes: int
    ssd_used_bytes: int
    term: int
    term_of: int
    news: CopyNews
    tenants: _containers.RepeatedCompositeFieldContainer[TenantBytes]
    withdrawn: _containers.RepeatedCompositeFieldContainer[Withdrawal]
    report_id: int
    piece: ReportPiece
    removed_versions: _containers.RepeatedScalarFieldContainer[int]
    deleted_versions: _containers.RepeatedScalarFieldContainer[int]
    map_version: int
    owned: int
    ranges: _containers.RepeatedCompositeFieldContainer[ReportedRange]
    def __init__(self, node_id: _Optional[str] = ..., generation: _Optional[int] = ..., added: _Optional[_Iterable[_Union[ChunkEntry, _Mapping]]] = ..., removed: _Optional[_Iterable[str]] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., deleted: _Optional[_Iterable[str]] = ..., ssd_capacity_bytes: _Optional[int] = ..., ssd_used_bytes: _Optional[int] = ..., term: _Optional[int] = ..., term_of: _Optional[int] = ..., news: _Optional[_Union[CopyNews, _Mapping]] = ..., tenants: _Optional[_Iterable[_Union[TenantBytes, _Mapping]]] = ..., withdrawn: _Optional[_Iterable[_Union[Withdrawal, _Mapping]]] = ..., report_id: _Optional[int] = ..., piece: _Optional[_Union[ReportPiece, _Mapping]] = ..., removed_versions: _Optional[_Iterable[int]] = ..., deleted_versions: _Optional[_Iterable[int]] = ..., map_version: _Optional[int] = ..., owned: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[ReportedRange, _Mapping]]] = ...) -> None: ...

class ReportedRange(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Withdrawal(_message.Message):
    __slots__ = ("key", "version")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    key: str
    version: int
    def __init__(self, key: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class TenantBytes(_message.Message):
    __slots__ = ("tenant", "num_bytes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    num_bytes: int
    def __init__(self, tenant: _Optional[str] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class AnnounceReply(_message.Message):
    __slots__ = ("status", "accepted", "report_wanted", "term", "term_of", "copies", "drops", "sources", "undecided", "elsewhere", "num_nodes", "refused", "report_keys", "known_slots", "renewals", "ranges", "map_version")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REPORT_WANTED_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    TERM_OF_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    DROPS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    UNDECIDED_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    REPORT_KEYS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_SLOTS_FIELD_NUMBER: _ClassVar[int]
    RENEWALS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    MAP_VERSION_FIELD_NUMBER: _ClassVar[int]
    status: _common_pb2.Status
    accepted: _containers.RepeatedScalarFieldContainer[bool]
    report_wanted: bool
    term: int
    term_of: int
    copies: _containers.RepeatedCompositeFieldContainer[CopyOrder]
    drops: _containers.RepeatedCompositeFieldContainer[DropOrder]
    sources: _containers.RepeatedCompositeFieldContainer[_common_pb2.Instance]
    undecided: _containers.RepeatedScalarFieldContainer[int]
    elsewhere: _containers.RepeatedCompositeFieldContainer[TenantBytes]
    num_nodes: int
    refused: _containers.RepeatedScalarFieldContainer[int]
    report_keys: int
    known_slots: int
    renewals: int
    ranges: _containers.RepeatedCompositeFieldContainer[KnownRange]
    map_version: int
    def __init__(self, status: _Optional[_Union[_common_pb2.Status, _Mapping]] = ..., accepted: _Optional[_Iterable[bool]] = ..., report_wanted: _Optional[bool] = ..., term: _Optional[int] = ..., term_of: _Optional[int] = ..., copies: _Optional[_Iterable[_Union[CopyOrder, _Mapping]]] = ..., drops: _Optional[_Iterable[_Union[DropOrder, _Mapping]]] = ..., sources: _Optional[_Iterable[_Union[_common_pb2.Instance, _Mapping]]] = ..., undecided: _Optional[_Iterable[int]] = ..., elsewhere: _Optional[_Iterable[_Union[TenantBytes, _Mapping]]] = ..., num_nodes: _Optional[int] = ..., refused: _Optional[_Iterable[int]] = ..., report_keys: _Optional[int] = ..., known_slots: _Optional[int] = ..., renewals: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[KnownRange, _Mapping]]] = ..., map_version: _Optional[int] = ...) -> None: ...

class KnownRange(_message.Message):
    __slots__ = ("number", "known_slots", "wanted")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KNOWN_SLOTS_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    number: int
    known_slots: int
    wanted: bool
    def __init__(self, number: _Optional[int] = ..., known_slots: _Optional[int] = ..., wanted: _Optional[bool] = ...) -> None: ...

class LocateRequest(_message.Message):
    __slots__ = ("keys", "count_only", "removing")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    COUNT_ONLY_FIELD_NUMBER: _ClassVar[int]
    REMOVING_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    count_only: bool
    removing: bool
    def __init__(self, keys: _Optional[_Iterable[str]] = ..., count_only: _Optional[bool] = ..., removing: _Optional[bool] = ...) -> None: ...

class Location(_message.Message):
    __slots__ = ("nodes", "version", "size_bytes", "num_warm")
    NODES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_WARM_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedScalarFieldContainer[int]
    version: int
    size_bytes: int
    num_warm: int
    def __init__(self, nodes: _Optional[_Iterable[int]] = ..., version: _Optional[int] = ..., size_bytes: _Optional[int] = ..., num_warm: _Optional[int] = ...) -> None: ...

class LocateReply(_message.Message):
    __slots__ = ("status", "node_ids", "locations", "incomplete", "found", "term", "term_of", "renewals")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    LOCATIONS_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    TERM_OF_FIELD_NUMBER: _ClassVar[int]
    RENEWALS_FIELD_NUMBER: _ClassVar[int]
    status: _common_pb2.Status
    node_ids: _containers.RepeatedScalarFieldContainer[str]
    locations: _containers.RepeatedCompositeFieldContainer[Location]
    incomplete: bool
    found: bytes
    term: int
    term_of: int
    renewals: int
    def __init__(self, status: _Optional[_Union[_common_pb2.Status, _Mapping]] = ..., node_ids: _Optional[_Iterable[str]] = ..., locations: _Optional[_Iterable[_Union[Location, _Mapping]]] = ..., incomplete: _Optional[bool] = ..., found: _Optional[bytes] = ..., term: _Optional[int] = ..., term_of: _Optional[int] = ..., renewals: _Optional[int] = ...) -> None: ...

class NodeInfo(_message.Message):
    __slots__ = ("instance", "capacity_bytes", "used_bytes", "num_chunks", "draining", "last_seen_s", "ssd_capacity_bytes", "ssd_used_bytes", "num_unsafe", "drained")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_S_FIELD_NUMBER: _ClassVar[int]
    SSD_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_UNSAFE_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    instance: _common_pb2.Instance
    capacity_bytes: int
    used_bytes: int
    num_chunks: int
    draining: bool
    last_seen_s: float
    ssd_capacity_bytes: int
    ssd_used_bytes: int
    num_unsafe: int
    drained: bool
    def __init__(self, instance: _Optional[_Union[_common_pb2.Instance, _Mapping]] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., num_chunks: _Optional[int] = ..., draining: _Optional[bool] = ..., last_seen_s: _Optional[float] = ..., ssd_capacity_bytes: _Optional[int] = ..., ssd_used_bytes: _Optional[int] = ..., num_unsafe: _Optional[int] = ..., drained: _Optional[bool] = ...) -> None: ...

class PlaceRequest(_message.Message):
    __slots__ = ("size_bytes", "replicas", "prefer_node", "client_place")
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    PREFER_NODE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_PLACE_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    replicas: int
    prefer_node: str
    client_place: str
    def __init__(self, size_bytes: _Optional[int] = ..., replicas: _Optional[int] = ..., prefer_node: _Optional[str] = ..., client_place: _Optional[str] = ...) -> None: ...

class PlaceReply(_message.Message):
    __slots__ = ("status", "nodes", "term", "term_of", "renewals")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    TERM_OF_FIELD_NUMBER: _ClassVar[int]
    RENEWALS_FIELD_NUMBER: _ClassVar[int]
    status: _common_pb2.Status
    nodes: _containers.RepeatedCompositeFieldContainer[NodeInfo]
    term: int
    term_of: int
    renewals: int
    def __init__(self, status: _Optional[_Union[_common_pb2.Status, _Mapping]] = ..., nodes: _Optional[_Iterable[_Union[NodeInfo, _Mapping]]] = ..., term: _Optional[int] = ..., term_of: _Optional[int] = ..., renewals: _Optional[int] = ...) -> None: ...

class NodesRequest(_message.Message):
    __slots__ = ("known_version", "known_generation", "versioned", "ranges")
    KNOWN_VERSION_FIELD_NUMBER: _ClassVar[int]
    KNOWN_GENERATION_FIELD_NUMBER: _ClassVar[int]
    VERSIONED_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    known_version: int
    known_generation: int
    versioned: bool
    ranges: int
    def __init__(self, known_version: _Optional[int] = ..., known_generation: _Optional[int] = ..., versioned: _Optional[bool] = ..., ranges: _Optional[int] = ...) -> None: ...

class NodesReply(_message.Message):
    __slots__ = ("status", "nodes", "rebuilding", "num_keys", "master_generation", "term", "term_of", "version", "unchanged", "renewals", "rebuilding_ranges", "leading", "of_part")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    REBUILDING_FIELD_NUMBER: _ClassVar[int]
    NUM_KEYS_FIELD_NUMBER: _ClassVar[int]
    MASTER_GENERATION_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    TERM_OF_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    RENEWALS_FIELD_NUMBER: _ClassVar[int]
    REBUILDING_RANGES_FIELD_NUMBER: _ClassVar[int]
    LEADING_FIELD_NUMBER: _ClassVar[int]
    OF_PART_FIELD_NUMBER: _ClassVar[int]
    status: _common_pb2.Status
    nodes: _containers.RepeatedCompositeFieldContainer[NodeInfo]
    rebuilding: bool
    num_keys: int
    master_generation: int
    term: int
    term_of: int
    version: int
    unchanged: bool
    renewals: int
    rebuilding_ranges: int
    leading: bool
    of_part: bool
    def __init__(self, status: _Optional[_Union[_common_pb2.Status, _Mapping]] = ..., nodes: _Optional[_Iterable[_Union[NodeInfo, _Mapping]]] = ..., rebuilding: _Optional[bool] = ..., num_keys: _Optional[int] = ..., master_generation: _Optional[int] = ..., term: _Optional[int] = ..., term_of: _Optional[int] = ..., version: _Optional[int] = ..., unchanged: _Optional[bool] = ..., renewals: _Optional[int] = ..., rebuilding_ranges: _Optional[int] = ..., leading: _Optional[bool] = ..., of_part: _Optional[bool] = ...) -> None: ...

class ListKeysRequest(_message.Message):
    __slots__ = ("prefix", "after", "limit", "ranges")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    after: str
    limit: int
    ranges: int
    def __init__(self, prefix: _Optional[str] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ..., ranges: _Optional[int] = ...) -> None: ...

class ReplicateRequest(_message.Message):
    __slots__ = ("keys", "holders", "for_s")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    FOR_S_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    holders: int
    for_s: float
    def __init__(self, keys: _Optional[_Iterable[str]] = ..., holders: _Optional[int] = ..., for_s: _Optional[float] = ...) -> None: ...

class ReplicateReply(_message.Message):
    __slots__ = ("status", "num_taken", "term", "term_of", "renewals")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    NUM_TAKEN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    TERM_OF_FIELD_NUMBER: _ClassVar[int]
    RENEWALS_FIELD_NUMBER: _ClassVar[int]
    status: _common_pb2.Status
    num_taken: int
    term: int
    term_of: int
    renewals: int
    def __init__(self, status: _Optional[_Union[_common_pb2.Status, _Mapping]] = ..., num_taken: _Optional[int] = ..., term: _Optional[int] = ..., term_of: _Optional[int] = ..., renewals: _Optional[int] = ...) -> None: ...

class KeyInfo(_message.Message):
    __slots__ = ("key", "size_bytes", "version", "node_ids")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    key: str
    size_bytes: int
    version: int
    node_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, key: _Optional[str] = ..., size_bytes: _Optional[int] = ..., version: _Optional[int] = ..., node_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ListKeysReply(_message.Message):
    __slots__ = ("status", "keys", "more", "term", "term_of", "renewals")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    TERM_OF_FIELD_NUMBER: _ClassVar[int]
    RENEWALS_FIELD_NUMBER: _ClassVar[int]
    status: _common_pb2.Status
    keys: _containers.RepeatedCompositeFieldContainer[KeyInfo]
    more: bool
    term: int
    term_of: int
    renewals: int
    def __init__(self, status: _Optional[_Union[_common_pb2.Status, _Mapping]] = ..., keys: _Optional[_Iterable[_Union[KeyInfo, _Mapping]]] = ..., more: _Optional[bool] = ..., term: _Optional[int] = ..., term_of: _Optional[int] = ..., renewals: _Optional[int] = ...) -> None: ...

class WaitRequest(_message.Message):
    __slots__ = ("keys", "deadline_ms")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    deadline_ms: int
    def __init__(self, keys: _Optional[_Iterable[str]] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class WaitReply(_message.Message):
    __slots__ = ("status", "found", "term", "term_of", "renewals")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    TERM_OF_FIELD_NUMBER: _ClassVar[int]
    RENEWALS_FIELD_NUMBER: _ClassVar[int]
    status: _common_pb2.Status
    found: bytes
    term: int
    term_of: int
    renewals: int
    def __init__(self, status: _Optional[_Union[_common_pb2.Status, _Mapping]] = ..., found: _Optional[bytes] = ..., term: _Optional[int] = ..., term_of: _Optional[int] = ..., renewals: _Optional[int] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("key_prefix", "after_sequence", "master_generation", "ranges", "fresh")
    KEY_PREFIX_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MASTER_GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    key_prefix: str
    after_sequence: int
    master_generation: int
    ranges: int
    fresh: int
    def __init__(self, key_prefix: _Optional[str] = ..., after_sequence: _Optional[int] = ..., master_generation: _Optional[int] = ..., ranges: _Optional[int] = ..., fresh: _Optional[int] = ...) -> None: ...

class DirectoryEvent(_message.Message):
    __slots__ = ("sequence", "kind", "node_id", "keys", "ranges")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STORED: _ClassVar[DirectoryEvent.Kind]
        REMOVED: _ClassVar[DirectoryEvent.Kind]
        NODE_GONE: _ClassVar[DirectoryEvent.Kind]
        SYNCED: _ClassVar[DirectoryEvent.Kind]
        RESET: _ClassVar[DirectoryEvent.Kind]
        MOVED: _ClassVar[DirectoryEvent.Kind]
    STORED: DirectoryEvent.Kind
    REMOVED: DirectoryEvent.Kind
    NODE_GONE: DirectoryEvent.Kind
    SYNCED: DirectoryEvent.Kind
    RESET: DirectoryEvent.Kind
    MOVED: DirectoryEvent.Kind
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    kind: DirectoryEvent.Kind
    node_id: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    ranges: int
    def __init__(self, sequence: _Optional[int] = ..., kind: _Optional[_Union[DirectoryEvent.Kind, str]] = ..., node_id: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ..., ranges: _Optional[int] = ...) -> None: ...

class EventBatch(_message.Message):
    __slots__ = ("master_generation", "events", "first_sequence", "last_sequence")
    MASTER_GENERATION_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    master_generation: int
    events: _containers.RepeatedCompositeFieldContainer[DirectoryEvent]
    first_sequence: int
    last_sequence: int
    def __init__(self, master_generation: _Optional[int] = ..., events: _Optional[_Iterable[_Union[DirectoryEvent, _Mapping]]] = ..., first_sequence: _Optional[int] = ..., last_sequence: _Optional[int] = ...) -> None: ...
