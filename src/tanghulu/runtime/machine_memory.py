"""How much memory this machine, and the control group that this process runs in, have to give.

A store node's memory is taken from the system as it fills, so one that asks for more than there is would run for weeks
before it is killed. What counts is the least of: the machine (``MemTotal``, ``MemAvailable``) and each control group
from this process's up to the root, of version 2 (``memory.max``) and 1 (``memory.limit_in_bytes``). Of what a group
uses, the cache of files does not count: the kernel gives it up.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tanghulu.errors import ConfigError, Overloaded
from tanghulu.types import format_size

#: (limit, usage, the field of memory.stat with the cache that goes first) by version of control groups.
_FILES = {
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


class MemoryBound(NamedTuple):
    """What one of them has in all, and what of it is to be had now."""

    where: str
    total_bytes: int
    free_bytes: int


def memory_bounds(root: Path = Path("/")) -> list[MemoryBound]:
    """Everything that bounds this process's memory; ``root``: where /proc and /sys are."""
    return [*_machine(root), *_control_groups(root)]


def refuse_too_much(wanted_bytes: int, flag: str, root: Path = Path("/")) -> None:
    """Raise ConfigError for more than there can ever be, and Overloaded for more than there is now."""
    bounds = memory_bounds(root)
    for where, total_bytes, _ in bounds:
        if wanted_bytes > total_bytes:
            raise ConfigError(
                f"{flag} {format_size(wanted_bytes)}: {where} has {format_size(total_bytes)}; request less"
            )
    for where, total_bytes, free_bytes in bounds:
        if wanted_bytes > free_bytes:
            has, left = format_size(total_bytes), format_size(free_bytes)
            raise Overloaded(
                f"{flag} {format_size(wanted_bytes)}: of the {has} that {where} has, {left} are free; request less, or "
                "end what uses the rest (clients of a node that ended hold its memory until they notice)"
            )


def _machine(root: Path) -> Iterator[MemoryBound]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    if "MemTotal" in kib and "MemAvailable" in kib:
        yield MemoryBound("this machine", kib["MemTotal"] << 10, kib["MemAvailable"] << 10)


def _control_groups(root: Path) -> Iterator[MemoryBound]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers:
            yield from _groups(root / "sys/fs/cgroup", name, 2)
        elif "memory" in controllers.split(","):
            yield from _groups(root / "sys/fs/cgroup/memory", name, 1)


def _groups(mount: Path, name: str, version: int) -> Iterator[MemoryBound]:
    """The group and those above it; inside a container only the uppermost may be seen."""
    parts = [part for part in name.split("/") if part and part != ".."]
    for depth in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:depth])
        limit_file, usage_file, caches = _FILES[version]
        try:
            limit = (folder / limit_file).read_text().strip()
            used_bytes = int((folder / usage_file).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except OSError:
            continue
        if limit != "max":  # version 1 says no limit by a number larger than any machine
            used_bytes -= sum(int(stat.get(each, 0)) for each in caches)
            free_bytes = max(int(limit) - max(used_bytes, 0), 0)
            yield MemoryBound(f"the control group /{'/'.join(parts[:depth])}", int(limit), free_bytes)
