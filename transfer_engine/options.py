"""Transfer engine options of a process: its flags as settings of the segment it serves and the engine it runs.

Shared by nodes and workers. Pure, except for ``topology.discovery`` where devices are requested.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tanghulu.errors import ConfigError
from tanghulu.runtime.config import option
from tanghulu.transfer_engine.core.config import MAX_CONNECTIONS, EngineConfig, ListenOptions, ServerLimits
from tanghulu.transfer_engine.core.paths import NOTICE_TRANSPORT
from tanghulu.transfer_engine.topology.devices import Topology
from tanghulu.transfer_engine.topology.discovery import load
from tanghulu.transfer_engine.transports.registry import TRANSPORTS

_WILDCARDS = ("", "0.0.0.0", "::")


@dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """Configuration fields of a process that offers a segment or opens those of others."""

    transports: str = option("shm,tcp", f"transports of payloads, best first, out of {', '.join(TRANSPORTS)}")
    topology: str = option(
        "", "spread tcp over network devices: auto, or the output of tanghulu topology --json as a file"
    )
    tcp_devices: str = option("", "network devices for tcp: eth1,eth2; default: all of --topology")
    rdma_devices: str = option("", "verbs devices for rdma, in the order of their rails; default: all working ones")
    max_data_connections: int = option(
        MAX_CONNECTIONS, "limit on connections to this process's memory, for each transport"
    )
    near: str = option("", "location of this process's memory, a row of --topology's matrix: cpu:1, gpu:0")


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """The options, checked: values for TransferEngine and SegmentServer.

    ``listen`` lacks values known only to the process, such as the path of its socket.
    """

    transports: tuple[str, ...]
    engine: EngineConfig
    listen: ListenOptions
    limits: ServerLimits


def transfer_settings(options: TransferOptions, host: str) -> TransferSettings:
    """Return the settings from the flags; the process listens at ``host``. Raises ConfigError that names the flag."""
    transports = _names(options.transports)
    unknown = [name for name in transports if name not in TRANSPORTS]
    if unknown or len(set(transports)) != len(transports):
        raise ConfigError(f"--transports {options.transports}: name some of {', '.join(TRANSPORTS)}, each once")
    if NOTICE_TRANSPORT not in transports:
        raise ConfigError(
            f"--transports {options.transports}: {NOTICE_TRANSPORT} must be among them; it carries control and notices"
        )
    rdma = _names(options.rdma_devices)
    if rdma and "rdma" not in transports:
        raise ConfigError(f"--rdma-devices {options.rdma_devices}: rdma is not among --transports {options.transports}")
    if options.max_data_connections < 1:
        raise ConfigError(f"--max-data-connections is {options.max_data_connections}; it must be at least 1")
    topology = _topology(options)
    location = _location(options, topology)
    if topology is not None and host not in _WILDCARDS:
        raise ConfigError(f"--topology and --tcp-devices need --host 0.0.0.0; {host} is one device's address")
    near = [] if topology is None else topology.addresses(location)
    listen = ListenOptions(
        transports=transports,
        host=host,
        rdma_devices=rdma,
        tcp_devices=tuple(near),
        tcp_distances={name: topology.distance(location, name) for name, _ in near} if topology is not None else {},
    )
    engine = EngineConfig(topology=topology, location=location, rdma_devices=rdma)
    limits = ServerLimits(max_connections=options.max_data_connections)
    return TransferSettings(transports, engine, listen, limits)


def _location(options: TransferOptions, topology: Topology | None) -> str:
    """Return the location of the process's memory, as named in the matrix; empty if not given."""
    if options.near and topology is None:
        raise ConfigError(f"--near {options.near} requires --topology, whose devices it orders")
    if options.near and topology is not None and options.near not in topology.matrix:
        raise ConfigError(
            f"--near {options.near} is not a row of the matrix, which has {', '.join(sorted(topology.matrix))}"
        )
    return options.near


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _topology(options: TransferOptions) -> Topology | None:
    """Return the devices over which tcp is to be spread; None leaves it to the kernel."""
    wanted = _names(options.tcp_devices)
    if not options.topology and not wanted:
        return None
    topology = load(None if options.topology in ("", "auto") else options.topology)
    usable = {each.name for each in topology.usable}
    if not usable:
        raise ConfigError(
            f"--topology {options.topology or 'auto'}: no network device except the loopback is up with an address; "
            "bring one up, or omit --topology and --tcp-devices"
        )
    strangers = [name for name in wanted if name not in usable]
    if strangers:
        raise ConfigError(
            f"--tcp-devices: {', '.join(strangers)} cannot be used; usable are {', '.join(sorted(usable))}"
        )
    if not wanted:
        return topology
    return replace(topology, devices=tuple(each for each in topology.devices if each.name in wanted))
