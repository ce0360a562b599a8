"""Network devices of a process, their distance to its memory, and which of a peer's they reach.

A *location* of memory is ``cpu:N`` for NUMA node N, ``gpu:N`` for the N-th GPU by its PCI address. The matrix lists for
each location the preferred devices and those after them: those of a NUMA node, or of no known one, before the others;
those nearest to a GPU by PCIe before the others. A file may replace the discovered topology. Pure, but for
``discovery``, which reads the system.

The file; all of it is optional except the names:

    {"devices": [{"name": "eth1", "address": "10.0.1.1/24", "numa_node": 0, "speed_mbit_s": 25000}],
     "matrix": {"cpu:0": {"preferred": ["eth1"], "others": []}}}

The output of ``tanghulu topology --json`` is such a file; its ``transports`` and ``gpu_memory`` are ignored.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import msgspec

from tanghulu.errors import ConfigError

MAX_DEVICES = 64


@dataclass(frozen=True, slots=True)
class NetworkDevice:
    """One NIC. ``address`` with its prefix (``10.0.1.1/24``), empty if it has none; unknown numbers are -1."""

    name: str
    address: str = ""
    numa_node: int = -1
    speed_mbit_s: int = -1
    up: bool = True
    loopback: bool = False
    #: The PCI addresses on the way to it, from the root complex: ``pci0000:16/0000:16:01.0/0000:17:00.0``; empty if it
    #: is no PCI device.
    pci: str = ""

    @property
    def host(self) -> str:
        """The address without its prefix."""
        return self.address.partition("/")[0]

    def reaches(self, host: str) -> bool:
        """Return whether ``host`` is an address of this device's own network."""
        try:
            return bool(self.address) and ipaddress.ip_address(host) in ipaddress.ip_interface(self.address).network
        except ValueError:  # a host name
            return False


class Preference(NamedTuple):
    """Devices for one location, by name, the best first."""

    preferred: tuple[str, ...]
    others: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """The devices of one machine and the matrix over them."""

    devices: tuple[NetworkDevice, ...]
    matrix: Mapping[str, Preference] = field(default_factory=dict)

    @property
    def usable(self) -> tuple[NetworkDevice, ...]:
        """Devices to which tcp can be bound: up, with an address, not the loopback."""
        return tuple(each for each in self.devices if each.up and each.address and not each.loopback)

    def distance(self, location: str, name: str) -> int:
        """Return 0 if preferred from ``location`` (or the location is unknown), 1 if it comes after those."""
        preference = self.matrix.get(location)
        return 0 if preference is None or name in preference.preferred else 1

    def addresses(self, location: str = "") -> list[tuple[str, str]]:
        """Return (name, address) of the usable devices for a SegmentServer's peers, those near ``location`` first."""
        nearest = sorted(self.usable, key=lambda each: self.distance(location, each.name))
        return [(each.name, each.host) for each in nearest]

    def to_json(self) -> str:
        """Return the content of a file for ``from_json``."""
        devices = [asdict(each) for each in self.devices]
        matrix = {name: each._asdict() for name, each in self.matrix.items()}
        return json.dumps({"devices": devices, "matrix": matrix}, indent=2)


class Gpu(NamedTuple):
    """Location of a GPU; ``pci`` as of a NetworkDevice."""

    pci: str
    numa_node: int = -1


def matrix_of(
    devices: Sequence[NetworkDevice], numa_nodes: Sequence[int], gpus: Sequence[Gpu] = ()
) -> dict[str, Preference]:
    """Return for each node its own devices and those of no known node, the fastest first, before the others.

    For each GPU, the nearest come before the others. Example: eth0 behind one switch with it, eth1 below another root
    port of the same root complex, eth2 on the other socket: eth0 is preferred, then come eth1 and eth2.
    """
    ranked = sorted((each for each in devices if not each.loopback), key=lambda each: -each.speed_mbit_s)
    matrix = {
        f"cpu:{node}": Preference(
            tuple(each.name for each in ranked if each.numa_node in (-1, node)),
            tuple(each.name for each in ranked if each.numa_node not in (-1, node)),
        )
        for node in numa_nodes
    }
    for number, gpu in enumerate(gpus):
        far = {each.name: _steps_between(gpu, each) for each in ranked}
        nearest = min(far.values(), default=0)
        names = sorted(far, key=far.__getitem__)  # stable: the fastest first among equals
        matrix[f"gpu:{number}"] = Preference(
            tuple(name for name in names if far[name] == nearest), tuple(name for name in names if far[name] > nearest)
        )
    return matrix


def _steps_between(gpu: Gpu, device: NetworkDevice) -> int:
    """Return 0 below one root port, so that bytes need not pass the processor; 1 below one root complex; 2 on one NUMA
    node, or an unknown one; 3 on another.
    """
    shared = 0
    for ours, theirs in zip(gpu.pci.split("/"), device.pci.split("/"), strict=False):
        if ours != theirs or not ours:
            break
        shared += 1
    if shared:
        return 0 if shared > 1 else 1
    return 2 if -1 in (gpu.numa_node, device.numa_node) or gpu.numa_node == device.numa_node else 3


def from_json(text: str) -> Topology:
    """Read a topology file; raises ConfigError that names the fault. Without a matrix, one is made."""
    try:
        read = json.loads(text)
        devices = tuple(NetworkDevice(**each) for each in read["devices"])
        msgspec.convert(list(map(asdict, devices)), list[NetworkDevice])  # raises ValidationError, a ValueError
        given = msgspec.convert(read.get("matrix") or {}, dict[str, dict[str, tuple[str, ...]]])
        matrix = {name: Preference(each["preferred"], each["others"]) for name, each in given.items()}
        for each in devices:
            if each.address:
                ipaddress.ip_interface(each.address)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"the topology file cannot be used: {type(error).__name__}: {error}") from error
    _refuse_nonsense(devices, matrix, set(read) - {"devices", "matrix", "transports", "gpu_memory"})
    nodes = sorted({max(0, each.numa_node) for each in devices}) or [0]
    return Topology(devices, matrix or matrix_of(devices, nodes))


def _refuse_nonsense(devices: Sequence[NetworkDevice], matrix: Mapping[str, Preference], unknown: set[Any]) -> None:
    names = [each.name for each in devices]
    if unknown:
        raise ConfigError(f"the topology file has unknown keys {sorted(unknown)}; known are devices and matrix")
    if len(names) > MAX_DEVICES or len(set(names)) != len(names) or not all(names):
        raise ConfigError(f"the topology file must name at most {MAX_DEVICES} devices, each once; it has {names}")
    for location, preference in matrix.items():
        strangers = {*preference.preferred, *preference.others} - set(names)
        if strangers:
            raise ConfigError(f"the topology's matrix of {location} names unknown devices {sorted(strangers)}")


def pair(local: Sequence[NetworkDevice], remote_hosts: Sequence[str]) -> list[tuple[str, int]]:
    """Pair local devices with the peer's endpoints that they reach: (device name, index of the endpoint).

    An endpoint in the network of a device is reached over that device only. Where no device shares its network (routers
    between), devices and endpoints are paired in order, as rails: 3 devices and 2 endpoints give (0, 0), (1, 1), (2,
    0). Example: eth0 10.0.0.1/24, eth1 10.0.1.1/24 and endpoints 10.0.1.9, 10.0.0.9 give (eth0, 1), (eth1, 0).
    """
    pairs = [(each.name, index) for each in local for index, host in enumerate(remote_hosts) if each.reaches(host)]
    reached = {index for _, index in pairs}
    far = [index for index in range(len(remote_hosts)) if index not in reached]
    if far and not pairs:
        count = max(len(local), len(far))
        pairs = [(local[n % len(local)].name, far[n % len(far)]) for n in range(count)] if local else []
    return pairs
