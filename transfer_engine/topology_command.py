"""``tanghulu topology``: this machine's devices, the matrix over them, and what each transport can do here."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import click

from tanghulu.errors import TanghuluError
from tanghulu.runtime.config import command, option
from tanghulu.transfer_engine.core.transport import Ability, Transport
from tanghulu.transfer_engine.gpu import direct as gpu_direct
from tanghulu.transfer_engine.options import TransferOptions
from tanghulu.transfer_engine.topology.devices import Topology
from tanghulu.transfer_engine.topology.discovery import load
from tanghulu.transfer_engine.transports.registry import TRANSPORTS

_BY_DEFAULT = TransferOptions().transports.split(",")


@dataclass(frozen=True, kw_only=True)
class TopologyConfig:
    """The options of ``tanghulu topology``."""

    json: bool = option(False, "print JSON; its devices and matrix are what --file reads")
    file: str = option("", "topology file to show instead of the discovered one")


def abilities(topology: Topology) -> dict[str, Ability]:
    """Return what each transport can do here, found by trying; nothing is left behind."""
    return {name: _tried(transport, topology) for name, transport in sorted(TRANSPORTS.items(), key=_by_default_first)}


def _by_default_first(named: tuple[str, Transport]) -> bool:
    return named[0] not in _BY_DEFAULT


def gpu_memory() -> Ability:
    """Return whether an RDMA device reaches GPU memory directly; if not, it goes through pinned memory."""
    found = gpu_direct.probe()
    return Ability(found.works, found.note)


def run(config: TopologyConfig) -> None:
    """Print devices, matrix and abilities. Raises ConfigError if the file is bad."""
    topology = load(config.file)
    found = abilities(topology)
    gpus = gpu_memory()
    click.echo(_as_json(topology, found, gpus) if config.json else _as_text(topology, found, gpus))


def _tried(transport: Transport, topology: Topology) -> Ability:
    try:
        return transport.probe(topology)
    except (OSError, TanghuluError) as error:
        return Ability(False, str(error))


def _as_json(topology: Topology, found: dict[str, Ability], gpus: Ability) -> str:
    read = json.loads(topology.to_json())
    transports = {name: each._asdict() for name, each in found.items()}
    return json.dumps(read | {"transports": transports, "gpu_memory": gpus._asdict()}, indent=2)


def _as_text(topology: Topology, found: dict[str, Ability], gpus: Ability) -> str:
    lines = [*_device_lines(topology), "", "MATRIX  which devices come first for memory that lies there"]
    usable = {each.name for each in topology.usable}
    for location, preference in topology.matrix.items():
        preferred, others = (_named(names, usable) for names in preference)
        lines.append(f"{location}  {preferred}; then {others}")
    lines += ["", f"TRANSPORTS  {', '.join(_BY_DEFAULT)} are used; others where --transports names them"]
    lines += [f"{name:<5} {'yes' if each.works else 'no ':<4} {each.note}" for name, each in found.items()]
    lines += ["", "GPU MEMORY", f"{'direct' if gpus.works else 'through pinned memory'}: {gpus.note}"]
    return "\n".join(lines)


def _device_lines(topology: Topology) -> list[str]:
    rows = [("DEVICE", "ADDRESS", "NUMA", "MBIT/S", "STATE")]
    for each in topology.devices:
        node, speed = (str(number) if number >= 0 else "?" for number in (each.numa_node, each.speed_mbit_s))
        rows.append((each.name, each.address or "-", node, speed, "up" if each.up else "down"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, "?: not reported by the system"] if any("?" in row for row in rows[1:]) else lines


def _named(names: Sequence[str], usable: Collection[str]) -> str:
    """Return the names of devices that carry traffic now: up, and with an address."""
    return ", ".join(name for name in names if name in usable) or "none"


COMMAND = command("topology", TopologyConfig, run, "Show network devices, their distances, and what transports can do.")
