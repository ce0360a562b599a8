"""The Discovery that a process uses, as its option ``--discovery`` names it."""

from __future__ import annotations

from pathlib import Path

from tanghulu.discovery.base import Discovery
from tanghulu.discovery.etcd import EtcdDiscovery
from tanghulu.discovery.file import FileDiscovery
from tanghulu.discovery.master import MasterDiscovery
from tanghulu.errors import ConfigError
from tanghulu.masters import Masters
from tanghulu.types import Address

HELP = "where instances find each other: master (the default), etcd://host:port[,host:port], or file:DIR"


def open_discovery(spec: str, master: Masters | Address) -> Discovery:
    """The Discovery that ``spec`` names; enter it as an async context. Raises ConfigError for another spec."""
    if spec in ("", "master"):
        return MasterDiscovery(master)
    scheme, _, rest = spec.partition(":")
    if scheme == "etcd" and rest.startswith("//"):
        return EtcdDiscovery(*Masters.parse(spec).addresses)
    if scheme == "file" and rest:
        return FileDiscovery(Path(rest.removeprefix("//")))
    raise ConfigError(f"--discovery {spec!r} is none of master, etcd://host:port, file:DIR")
