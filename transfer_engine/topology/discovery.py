"""Reads the machine's network devices and GPUs from /sys and the kernel. Owns no decision; see ``devices``."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from tanghulu.errors import ConfigError
from tanghulu.transfer_engine.topology.devices import Gpu, NetworkDevice, Topology, from_json, matrix_of

_NET = Path("/sys/class/net")
_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")
#: NVIDIA and AMD make GPUs for computing; other vendors' display controllers are those of servers' consoles.
_GPU_VENDORS = ("0x10de", "0x1002")
#: Display controllers and processing accelerators (PCI's base classes).
_GPU_CLASSES = ("0x03", "0x12")
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B
_IFF_LOOPBACK = 0x8


def discover(net: Path = _NET, nodes: Path = _NODES, pci: Path = _PCI) -> Topology:
    """Return this network namespace's devices with their first IPv4 (else IPv6) address, and the matrix by NUMA node
    and GPU.
    """
    devices = tuple(_device(folder) for folder in sorted(net.iterdir()) if (folder / "flags").exists())
    numbers = sorted(int(each.name[4:]) for each in nodes.glob("node[0-9]*")) or [0]
    return Topology(devices, matrix_of(devices, numbers, _gpus(pci)))


def load(path: str | None) -> Topology:
    """Return the topology of the file, or the discovered one if there is none. Raises ConfigError."""
    if not path:
        return discover()
    try:
        return from_json(Path(path).read_bytes().decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read topology file {path}: {error}") from error


def _device(folder: Path) -> NetworkDevice:
    return NetworkDevice(
        folder.name,
        _address(folder.name),
        _number(folder / "device" / "numa_node"),
        _number(folder / "speed"),
        up=_text(folder / "operstate") in ("up", "unknown"),
        loopback=bool(int(_text(folder / "flags") or "0", 16) & _IFF_LOOPBACK),
        pci=_pci_path(folder / "device"),
    )


def _gpus(pci: Path) -> list[Gpu]:
    """Return the GPUs by PCI address, numbered as CUDA does with CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    folders = sorted(pci.iterdir()) if pci.exists() else []
    return [
        Gpu(_pci_path(each), _number(each / "numa_node"))
        for each in folders
        if _text(each / "vendor") in _GPU_VENDORS and _text(each / "class")[:4] in _GPU_CLASSES
    ]


def _pci_path(device: Path) -> str:
    """Return the PCI addresses from the root complex to it; empty if the device is missing, or no PCI device."""
    parts = list(device.resolve().parts) if device.exists() else []
    roots = [number for number, part in enumerate(parts) if part.startswith("pci")]
    ours = parts[roots[0] :] if roots else []
    return "/".join(part for part in ours if part.startswith("pci") or part.count(":") == 2)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the kernel answers EINVAL for attributes that a device lacks
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.lstrip("-").isdigit() else -1


def _address(name: str) -> str:
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            host = socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, request)[20:24])
            mask = socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFNETMASK, request)[20:24])
        except OSError:
            return _address6(name)
    return str(ipaddress.ip_interface(f"{host}/{mask}"))


def _address6(name: str) -> str:
    for line in _text(Path("/proc/net/if_inet6")).splitlines():
        digits, _, prefix, scope, _, device = line.split()
        if device == name and scope == "00":  # global
            return f"{ipaddress.ip_address(bytes.fromhex(digits))}/{int(prefix, 16)}"
    return ""
