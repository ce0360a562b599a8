"""What can be tuned about an engine and a segment server: values that are checked once and passed in."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from tanghulu.auth.credentials import NO_TLS, TlsFiles
from tanghulu.errors import ConfigError
from tanghulu.transfer_engine.topology.devices import Topology

MIB = 1 << 20


def _has_spare_core() -> bool:
    """Return whether this process may use more than one core."""
    return len(os.sched_getaffinity(0)) > 1


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """The slices that suit one transport: about ``slice_bytes`` long, and how much may be in flight on one path."""

    slice_bytes: int
    window_bytes: int
    window_slices: int


_MAY_BE_ZERO = ("retries_max", "fast_copy_bytes", "fast_copy_async_bytes")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one TransferEngine; raises ConfigError where a value makes no sense.

    ``limits`` by transport name, where they are to differ from the transport's own. ``tcp_devices`` are the local
    network devices that tcp streams are bound to in turn; the empty name leaves the choice to the kernel.
    """

    limits: Mapping[str, TransportLimits] = field(default_factory=dict)
    #: tcp connections a batch may use to one peer (a small batch uses one).
    streams_per_peer: int = 2
    tcp_devices: tuple[str, ...] = ("",)
    #: With a topology tcp uses its devices instead, each for the peer's endpoints that it reaches, those first that are
    #: preferred from ``location`` (where this process's buffers lie, as ``cpu:0``; empty: unknown).
    topology: Topology | None = None
    location: str = ""
    #: Verbs devices of this process in the order of their rails; none: every usable one, by name.
    rdma_devices: tuple[str, ...] = ()
    #: With files, tcp and the control connections of rdma and ucx are encrypted; what these two move is not.
    tls: TlsFiles = NO_TLS
    #: Further attempts of one slice after its first.
    retries_max: int = 3
    #: A path with slices in flight and none finished for this long counts as failed.
    slice_deadline_s: float = 5.0
    connect_timeout_s: float = 3.0
    #: Errors in a row that pause a path, and for how long (doubled by each failed probe up to the maximum).
    pause_after_errors: int = 3
    pause_s: float = 0.25
    pause_max_s: float = 8.0
    #: Sets of connections to one peer; each batch in flight borrows one of its own.
    max_links_per_peer: int = 16
    max_requests_per_batch: int = 1 << 16
    #: Batches up to this size that need only shm are copied by the calling thread without any machinery.
    fast_copy_bytes: int = 64 * MIB
    #: The same for ``transfer_async``, where the copy holds up the event loop.
    fast_copy_async_bytes: int = 256 << 10
    #: Whether a thread of the engine's helps callers with long copies (see ``transports.shm.long_copy``).
    copy_helper: bool = field(default_factory=_has_spare_core)
    #: Threads that drive the batches of asyncio callers, and how many batches may wait for one.
    async_threads: int = 8
    max_async_batches: int = 4096

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            minimum = 0 if each.name in _MAY_BE_ZERO else 1e-9
            if isinstance(value, int | float) and type(value) is not bool and value < minimum:
                raise ConfigError(f"EngineConfig.{each.name} is {value}; it must be at least {minimum:g}")
        if not self.tcp_devices:
            raise ConfigError("EngineConfig.tcp_devices is empty; the empty name leaves the choice to the kernel")
        for name, limits in self.limits.items():
            if min(limits.slice_bytes, limits.window_bytes, limits.window_slices) < 1:
                raise ConfigError(f"EngineConfig.limits[{name!r}] has a value below 1: {limits}")


#: A slice of which less than the least rate has moved in this time has its connection closed, so that its range can be
#: reused.
STALL_TIMEOUT_S = 10.0
#: A peer that has not said HELLO so long after it connected is hung up on; TLS is agreed on in the same time.
HELLO_S = 10.0
#: 10,000 clients with two streams each have room.
MAX_CONNECTIONS = 32768


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    """Over which transports a segment is offered, and at which addresses.

    ``advertised_host`` (by default ``host``) is what the descriptor tells peers. Each transport reads the fields that
    carry its name; the others are for all that listen on a port.
    """

    #: Which transports to offer.
    transports: tuple[str, ...] = ("tcp",)
    host: str
    #: Where tcp listens; 0 picks a free port.
    port: int = 0
    advertised_host: str = ""
    #: Where shm listens.
    unix_path: str | None = None
    #: Whether a peer that hangs up on shm reads nothing under its session any more, so that its leases end. Not where
    #: clients keep views of the mapping longer.
    shm_hang_up_frees: bool = False
    #: The verbs devices to offer, in the order of their rails; none: every usable one.
    rdma_devices: tuple[str, ...] = ()
    #: Pairs of a device's name and its address: the descriptor tells one tcp endpoint for each. ``host`` must let all
    #: of them in. Empty: one endpoint, at ``advertised_host``.
    tcp_devices: tuple[tuple[str, str], ...] = ()
    #: Which of these devices are not the preferred ones (see ``Endpoint.distance``).
    tcp_distances: Mapping[str, int] = field(default_factory=dict)
    #: With a context, tcp and the control connections of rdma and ucx are encrypted; what these two move is not.
    tls: ssl.SSLContext | None = None

    @property
    def announced_host(self) -> str:
        """The host that peers are told."""
        return self.advertised_host or self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What the owner of a segment bears with its peers: how many, and for how long."""

    max_connections: int = MAX_CONNECTIONS
    stall_timeout_s: float = STALL_TIMEOUT_S
    hello_s: float = HELLO_S
