"""``tanghulu topology``: this machine's devices, the matrix over them, and what each transport can do here."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import click

from tanghulu.config import command, option
from tanghulu.errors import TanghuluError
from tanghulu.transfer_engine import gpu_direct, rdma_verbs, ucx_agent
from tanghulu.transfer_engine.segment import MemorySegment, map_shared
from tanghulu.transfer_engine.shm_memory import may_trace
from tanghulu.transfer_engine.topology import Topology
from tanghulu.transfer_engine.topology_discovery import load

_PROBE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class TopologyConfig:
    """The options of ``tanghulu topology``."""

    json: bool = option(False, "print JSON; its devices and matrix are what --file reads")
    file: str = option("", "a topology file to show instead of what is discovered")


class Ability(NamedTuple):
    """Whether a transport works here, and what it would use or what it lacks."""

    works: bool
    note: str


def abilities(topology: Topology) -> dict[str, Ability]:
    """Every transport with what was found by trying; nothing is left behind."""
    return {
        "shm": _tried(_shm),
        "tcp": _tried(lambda: _tcp(topology)),
        "rdma": _rdma(),
        "ucx": _ucx(),
    }


def gpu_memory() -> Ability:
    """Whether an RDMA device reaches GPU memory by itself; if not, it goes through pinned memory."""
    found = gpu_direct.probe()
    return Ability(found.works, found.note)


def run(config: TopologyConfig) -> None:
    """Print it. Raises ConfigError if the file is bad."""
    topology = load(config.file)
    found = abilities(topology)
    gpus = gpu_memory()
    click.echo(_as_json(topology, found, gpus) if config.json else _as_text(topology, found, gpus))


def _tried(attempt: Callable[[], Ability]) -> Ability:
    try:
        return attempt()
    except (OSError, TanghuluError) as error:
        return Ability(False, str(error))


def _shm() -> Ability:
    segment = MemorySegment.create("probe", _PROBE_BYTES)
    try:
        map_shared(segment.fd, _PROBE_BYTES).close()
    finally:
        segment.close()
    else_copied = "; where they cannot be mapped the kernel copies" if may_trace(os.getppid()) else ""
    return Ability(
        True, f"sealed memory areas, passed over a Unix socket, to processes of this user on this host{else_copied}"
    )


def _tcp(topology: Topology) -> Ability:
    names = [each.name for each in topology.usable]
    if not names:
        return Ability(True, "loopback only: no other device is up and has an address")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        for name in names:
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name.encode())
            except OSError as error:
                return Ability(True, f"not bound to devices: {name}: {os.strerror(error.errno or 0)}")
    return Ability(True, f"can be bound to {', '.join(names)}")


def _rdma() -> Ability:
    found = rdma_verbs.probe()
    devices = ", ".join(f"{each.name} (mtu {each.mtu})" for each in found.devices)
    return Ability(bool(found.devices), devices or found.reason)


def _ucx() -> Ability:
    reason = ucx_agent.probe()
    return Ability(not reason, reason or "UCX through NIXL, over every lane but shared memory")


def _as_json(topology: Topology, found: dict[str, Ability], gpus: Ability) -> str:
    read = json.loads(topology.to_json())
    transports = {name: each._asdict() for name, each in found.items()}
    return json.dumps(read | {"transports": transports, "gpu_memory": gpus._asdict()}, indent=2)


def _as_text(topology: Topology, found: dict[str, Ability], gpus: Ability) -> str:
    rows = [("DEVICE", "ADDRESS", "NUMA", "MBIT/S", "STATE")]
    for each in topology.devices:
        node, speed = (str(number) if number >= 0 else "?" for number in (each.numa_node, each.speed_mbit_s))
        rows.append((each.name, each.address or "-", node, speed, "up" if each.up else "down"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += ["", "MATRIX"]
    for location, preference in topology.matrix.items():
        lines.append(
            f"{location}  {', '.join(preference.preferred) or '-'}; then {', '.join(preference.others) or '-'}"
        )
    lines += ["", "TRANSPORTS"]
    lines += [f"{name:<5} {'yes' if each.works else 'no ':<4} {each.note}" for name, each in found.items()]
    lines += ["", "GPU MEMORY", f"{'direct' if gpus.works else 'through pinned memory'}: {gpus.note}"]
    return "\n".join(lines)


COMMAND = command("topology", TopologyConfig, run, "Show network devices, their distances, and what transports can do.")
