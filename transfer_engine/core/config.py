"""Settings of an engine and of a segment server: values checked once and passed in."""

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
    """Slices that suit one transport: about ``slice_bytes`` long, and how much may be in flight on one path."""

    slice_bytes: int
    window_bytes: int
    window_slices: int


_MAY_BE_ZERO = ("retries_max", "fast_copy_bytes", "fast_copy_async_bytes")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one TransferEngine; raises ConfigError for invalid values.

    ``limits`` by transport name, where they differ from the transport's own. ``tcp_devices`` are the local network
    devices to which tcp streams are bound in turn; the empty name leaves the choice to the kernel.
    """

    limits: Mapping[str, TransportLimits] = field(default_factory=dict)
    #: tcp connections a batch may use to one peer (a small batch uses one).
    streams_per_peer: int = 2
    tcp_devices: tuple[str, ...] = ("",)
    #: With a topology tcp uses its devices instead, each for the peer's endpoints that it reaches, starting with those
    #: preferred from ``location`` (where this process's buffers lie, as ``cpu:0``; empty: unknown).
    topology: Topology | None = None
    location: str = ""
    #: Verbs devices of this process in the order of their rails; if empty, every usable one, by name.
    rdma_devices: tuple[str, ...] = ()
    #: With files, tcp and the control connections of rdma and ucx are encrypted; the data of these two is not.
    tls: TlsFiles = NO_TLS
    #: Further attempts of one slice after its first.
    retries_max: int = 3
    #: Seconds after which a path with slices in flight and none finished counts as failed.
    slice_deadline_s: float = 5.0
    connect_timeout_s: float = 3.0
    #: Consecutive errors that pause a path, and the duration (doubled by each failed probe up to the maximum).
    pause_after_errors: int = 3
    pause_s: float = 0.25
    pause_max_s: float = 8.0
    #: Sets of connections to one peer; each batch in flight borrows one of its own.
    max_links_per_peer: int = 16
    max_requests_per_batch: int = 1 << 16
    #: Batches up to this size that need only shm are copied by the calling thread without any machinery.
    fast_copy_bytes: int = 64 * MIB
    #: The same for ``transfer_async``, where the copy blocks the event loop.
    fast_copy_async_bytes: int = 256 << 10
    #: Whether a thread of the engine's helps callers with long copies (see ``transports.shm.long_copy``).
    copy_helper: bool = field(default_factory=_has_spare_core)
    #: Threads that drive the batches of asyncio callers, and the most batches that may wait for one.
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


#: Time in which a slice must move at the least rate; otherwise its connection is closed, so that its range can be
#: reused.
STALL_TIMEOUT_S = 10.0
#: Time after connecting by which a peer must have sent HELLO before it is disconnected; also bounds the TLS handshake.
HELLO_S = 10.0
#: Enough for 10,000 clients with two streams each.
MAX_CONNECTIONS = 32768


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    """Transports over which a segment is offered, and their addresses.

    ``advertised_host`` (by default ``host``) is the host that the descriptor gives to peers. Each transport reads the
    fields that carry its name; the others are for all that listen on a port.
    """

    #: Transports to offer.
    transports: tuple[str, ...] = ("tcp",)
    host: str
    #: Port of tcp; 0 picks a free one.
    port: int = 0
    advertised_host: str = ""
    #: Path of the shm socket.
    unix_path: str | None = None
    #: Whether a peer that disconnects from shm has stopped reading under its session, so that its leases end. Not where
    #: clients keep views of the mapping longer.
    shm_hang_up_frees: bool = False
    #: Verbs devices to offer, in the order of their rails; if empty, every usable one.
    rdma_devices: tuple[str, ...] = ()
    #: Pairs of a device's name and its address: the descriptor lists one tcp endpoint for each. ``host`` must cover all
    #: of them. Empty: one endpoint, at ``advertised_host``.
    tcp_devices: tuple[tuple[str, str], ...] = ()
    #: Those of these devices that are not preferred (see ``Endpoint.distance``).
    tcp_distances: Mapping[str, int] = field(default_factory=dict)
    #: With a context, tcp and the control connections of rdma and ucx are encrypted; the data of these two is not.
    tls: ssl.SSLContext | None = None

    @property
    def announced_host(self) -> str:
        """Host announced to peers."""
        return self.advertised_host or self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits that the owner of a segment sets on its peers: numbers and times."""

    max_connections: int = MAX_CONNECTIONS
    stall_timeout_s: float = STALL_TIMEOUT_S
    hello_s: float = HELLO_S
