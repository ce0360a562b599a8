"""Arguments and results of the client: values without behaviour, and the check of a put's options."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

from tanghulu.arguments import above_zero, text, whole
from tanghulu.errors import InvalidRequest, TanghuluError
from tanghulu.store.protocol.checksums import NO_CHECKSUMS, Checksums
from tanghulu.store.protocol.directory_messages import KeyInfo as KeyInfo
from tanghulu.store.protocol.directory_messages import NodeView as NodeView
from tanghulu.store.protocol.types import Pin

MAX_REPLICAS = 64
MAX_TTL_S = 49 * 24 * 3600.0  # the limit of 32 bits of milliseconds


@dataclass(slots=True)  # not frozen: see Status
class PutItem:
    """One value of ``put_many`` with options of its own. ``checksums`` saves the client computing them."""

    key: str
    value: Any
    checksums: Checksums = NO_CHECKSUMS


@dataclass(slots=True)  # not frozen: one is created for every put, and freezing costs a microsecond more
class Status:
    """The outcome of one put.

    ``existed``: the key existed already (a hit; nothing was written). ``num_replicas``: nodes that hold the chunk to
    this put's knowledge; fewer than requested is not an error. ``error`` None means success, and a status with an error
    is false.
    """

    key: str
    existed: bool = False
    num_replicas: int = 0
    error: TanghuluError | None = None

    @property
    def ok(self) -> bool:
        """Whether the chunk is in the store."""
        return self.error is None

    def __bool__(self) -> bool:
        return self.error is None

    def check(self) -> Self:
        """Return this status, or raise the put's error."""
        if self.error is not None:
            raise self.error
        return self


@dataclass(frozen=True, slots=True)
class PutOptions:
    """Options of a put; the fields of ``Client.put``."""

    replicas: int = 1
    pin: Pin = Pin.NONE
    ttl_s: float | None = None
    prefer_node: str | None = None
    visible: bool = True
    part_bytes: int = 0


def put_options(
    replicas: int, pin: str, ttl_s: float | None, prefer_node: str | None, visible: bool, part_bytes: int
) -> PutOptions:
    """Return the options; raises InvalidRequest that names the bad one."""
    try:
        return _put_options(replicas, pin, ttl_s, prefer_node, visible, part_bytes)
    except TypeError:  # it cannot even be hashed
        raise InvalidRequest(
            f"an option has a wrong type: replicas={replicas!r}, pin={pin!r}, ttl_s={ttl_s!r}, "
            f"prefer_node={prefer_node!r}, visible={visible!r}, part_bytes={part_bytes!r}"
        ) from None


@lru_cache(maxsize=256, typed=True)  # equal values may be of types of which one is refused
def _put_options(
    replicas: int, pin: str, ttl_s: float | None, prefer_node: str | None, visible: bool, part_bytes: int
) -> PutOptions:
    return PutOptions(
        whole("replicas", replicas, 1, MAX_REPLICAS),
        Pin.parse(text("pin", pin)),
        None if ttl_s is None else above_zero("ttl_s", ttl_s, MAX_TTL_S),
        None if prefer_node is None else text("prefer_node", prefer_node),
        bool(visible),
        whole("part_bytes", part_bytes, 0, 1 << 62),
    )


@dataclass(frozen=True, slots=True)
class MasterView:
    """A master that owns ranges of keys. ``term``: of its latest range; 0 if it was not elected.

    ``address`` is "" for a single master, found at the client's own address. ``num_keys``: the known ones of its
    ranges; ``num_rebuilding`` of the ranges are not completely known yet. ``answers`` is False for an unresponsive
    master.
    """

    address: str
    ranges: tuple[int, ...]
    term: int
    leads: bool = False
    num_keys: int = 0
    num_rebuilding: int = 0
    answers: bool = True


@dataclass(frozen=True, slots=True)
class TenantView:
    """One tenant over all nodes; "" is for chunks without one. Fields behind ``num_chunks`` count from node start.

    ``quota_bytes`` is for each node, ``cluster_quota_bytes`` for all together; 0 means no bound. ``share``: its part of
    the memory of all nodes (0 to 1).
    """

    tenant: str
    used_bytes: int = 0
    share: float = 0.0
    quota_bytes: int = 0
    cluster_quota_bytes: int = 0
    num_chunks: int = 0
    hits: int = 0
    hit_bytes: int = 0
    misses: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
