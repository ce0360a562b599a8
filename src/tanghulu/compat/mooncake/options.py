"""Arguments of ``setup`` and of puts in Mooncake's API, error codes, and the names of keys in our store.

Keys live below ``mooncake/<tenant>/``: two tenants do not see each other's keys, and no call reaches the KV blocks
that tanghulu's own workers and connectors keep in the same store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any
from urllib.parse import quote

from tanghulu import errors
from tanghulu.errors import InvalidRequest, TanghuluError
from tanghulu.store.client.model import MAX_REPLICAS
from tanghulu.types import parse_size

OK = 0
INTERNAL_ERROR, NO_SPACE, INVALID_PARAMS = -1, -200, -600
NOT_FOUND, LEASE_EXPIRED, TRANSFER_FAIL, RPC_FAIL = -704, -707, -800, -900
#: The classes of errors by their codes; the first that matches counts.
_CODES: dict[int, tuple[type[TanghuluError], ...]] = {
    NOT_FOUND: (errors.ChunkNotFound,),
    NO_SPACE: (errors.StoreFull,),
    INVALID_PARAMS: (errors.InvalidRequest,),
    LEASE_EXPIRED: (errors.LeaseExpired,),
    TRANSFER_FAIL: (errors.ChecksumMismatch, errors.TransferFailed),
    RPC_FAIL: (
        *(errors.NodeUnavailable, errors.MasterUnavailable, errors.DirectoryIncomplete),
        *(errors.DeadlineExceeded, errors.Overloaded),
    ),
}
DEFAULT_TENANT = "default"
_DEFAULT_SEGMENT_BYTES = 16 << 20
_MAX_TENANT = 64
#: Bytes of a key in our store, without a tenant's scope; longer ones keep their head and get a digest.
_MAX_KEY_BYTES = 900
_HEAD_BYTES = 32


def code_of(error: TanghuluError) -> int:
    """Return Mooncake's code of ``error``."""
    return next((code for code, kinds in _CODES.items() if isinstance(error, kinds)), INTERNAL_ERROR)


@dataclass(frozen=True)
class SetupOptions:
    """The arguments of ``setup`` that matter here; the others are for Mooncake's own network and are ignored.

    A ``global_segment_size`` above 0 is the memory of a store node that runs as long as the store is open.
    """

    local_hostname: str = "127.0.0.1"
    global_segment_size: int = _DEFAULT_SEGMENT_BYTES
    master_server_addr: str = ""
    tenant_id: str = DEFAULT_TENANT

    def __post_init__(self) -> None:
        if not self.master_server_addr:
            raise InvalidRequest("master_server_addr is empty; give the address of tanghulu's master: host:7400")
        if not 0 < len(self.tenant_id) <= _MAX_TENANT:
            raise InvalidRequest(f"tenant_id {self.tenant_id!r:.80} does not have 1 to {_MAX_TENANT} characters")
        if self.global_segment_size < 0:
            raise InvalidRequest(f"global_segment_size is {self.global_segment_size}; give 0 to offer no memory")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SetupOptions:
        """Return the options among ``values``; raises InvalidRequest naming a bad value."""
        values = {"master_server_addr": values.get("master_server_address"), **values}  # LMCache writes the former
        given = {each.name: values[each.name] for each in fields(cls) if values.get(each.name) is not None}
        for name in ("local_hostname", "master_server_addr", "tenant_id"):
            if not isinstance(given.get(name, ""), str):
                raise InvalidRequest(f"{name} is {given[name]!r:.80}, not a str")
        size = given.get("global_segment_size", _DEFAULT_SEGMENT_BYTES)
        try:
            given["global_segment_size"] = parse_size(size.replace(" ", "")) if isinstance(size, str) else int(size)
        except (InvalidRequest, TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(f"global_segment_size is {size!r:.80}, not a size: {error}") from None
        return cls(**given)

    @property
    def host(self) -> str:
        """The host in ``local_hostname``, which may end in a port."""
        name, colon, port = self.local_hostname.rpartition(":")
        return name if colon and port.isdecimal() and "]" not in port else self.local_hostname

    @property
    def prefix(self) -> str:
        """The beginning of all keys of the tenant in our store."""
        return f"mooncake/{quote(self.tenant_id, safe='')}/"

    def key(self, name: str | bytes) -> str:
        """Return the key in our store of the object called ``name``; raises InvalidRequest for an unusable one."""
        if not isinstance(name, str | bytes) or not name:
            raise InvalidRequest(f"a key is a str of at least one character, not {name!r:.80}")
        encoded = name if isinstance(name, bytes) else name.encode("utf-8", "surrogatepass")
        text = encoded.decode("utf-8", "replace")
        if len(self.prefix) + len(encoded) <= _MAX_KEY_BYTES and text.isprintable() and text.encode() == encoded:
            return self.prefix + text
        return f"{self.prefix}{quote(encoded[:_HEAD_BYTES])}#{hashlib.sha256(encoded).hexdigest()}"


class SoftPinAction(IntEnum):
    """Effect of a put on the soft pin of its object."""

    PRESERVE, ENABLE, DISABLE = 0, 1, 2


@dataclass
class ReplicateConfig:
    """Options of a put. ``data_type``, NoF and DFS replicas are accepted and have no effect.

    ``preferred_segment`` is the name of a store (its ``get_hostname()``), or the address of a node.
    """

    replica_num: int = 1
    with_soft_pin: bool = False
    with_hard_pin: bool = False
    soft_pin_action: SoftPinAction = SoftPinAction.PRESERVE
    soft_pin_ttl_ms: int | None = None
    preferred_segment: str = ""
    preferred_segments: list[str] = field(default_factory=list)
    prefer_alloc_in_same_node: bool = False
    data_type: Any = None
    nof_replica_num: int = 0
    dfs_replica_num: int = 0

    @property
    def segment(self) -> str:
        """The first choice of a segment; "" for none."""
        return self.preferred_segment or next(iter(self.preferred_segments), "")

    @property
    def pin(self) -> str:
        """The pin in our store's words."""
        if self.with_hard_pin:
            return "hard"
        return "soft" if self.with_soft_pin or self.soft_pin_action == SoftPinAction.ENABLE else "none"

    @property
    def replicas(self) -> int:
        """The number of nodes to write to."""
        return min(max(1, self.replica_num), MAX_REPLICAS)
