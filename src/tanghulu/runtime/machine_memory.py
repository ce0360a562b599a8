"""The memory available from this machine, and from the control group in which this process runs.

A store node's memory is allocated as it fills, so one configured for more than there is would run for weeks before it
is killed. The limit is the minimum of the machine (``MemTotal``, ``MemAvailable``) and each control group from this
process's up to the root, of version 2 (``memory.max``) and 1 (``memory.limit_in_bytes``). The file cache does not count
as used by a group, as the kernel reclaims it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tanghulu.errors import ConfigError, Overloaded
from tanghulu.types import format_size

#: (limit, usage, the field of memory.stat with the cache reclaimed first) by version of control groups.
_FILES = {
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


class MemoryBound(NamedTuple):
    """The total memory of the machine or a group, and the part available now."""

    where: str
    total_bytes: int
    free_bytes: int


def memory_bounds(root: Path = Path("/")) -> list[MemoryBound]:
    """Return all bounds of this process's memory; ``root`` is the parent of /proc and /sys."""
    return [*_machine(root), *_control_groups(root)]


def refuse_too_much(wanted_bytes: int, flag: str, root: Path = Path("/")) -> None:
    """Raise ConfigError for more than the total, and Overloaded for more than is available now."""
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
    """Yield the group and its ancestors; inside a container only the uppermost may be visible."""
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
        if limit != "max":  # version 1 expresses no limit by a number larger than any machine
            used_bytes -= sum(int(stat.get(each, 0)) for each in caches)
            free_bytes = max(int(limit) - max(used_bytes, 0), 0)
            yield MemoryBound(f"the control group /{'/'.join(parts[:depth])}", int(limit), free_bytes)
