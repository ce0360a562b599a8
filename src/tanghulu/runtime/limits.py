"""Limits of this process: files and connections that it may open, and memory of its machine and control groups.

A store node's memory is allocated as it fills, so one configured for more than there is would run for weeks before it
is killed. The limit is the minimum of the machine (``MemTotal``, ``MemAvailable``) and each control group from this
process's up to the root, of version 2 (``memory.max``) and 1 (``memory.limit_in_bytes``). The file cache does not count
as used by a group, as the kernel reclaims it.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from tanghulu.errors import ConfigError, Overloaded
from tanghulu.runtime.telemetry import RareLog
from tanghulu.types import format_size

_log = structlog.get_logger(__name__)
_rare_log = RareLog(_log)
#: Descriptors that a process has open besides its peers' connections.
_OTHERS: Final = 256
#: With fewer no process gets far enough to report what is wrong.
LEAST: Final = 64
#: Reserved for refusals and for a process's own files: a 16th of all, within these bounds.
_LEAST_KEPT, _MOST_KEPT = 8, 64
_LOOK_S: Final = 1.0
_HINT: Final = "raise the limit of open files (ulimit -n, LimitNOFILE)"


def _most() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft in (resource.RLIM_INFINITY, -1) else soft


def require_descriptors() -> None:
    """Raise the soft limit to ``LEAST`` if allowed; else raise ConfigError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = (resource.RLIM_INFINITY, -1)
    if soft not in unlimited and soft < LEAST:
        if hard not in unlimited and hard < LEAST:
            raise ConfigError(f"this process may open {hard} files and needs at least {LEAST}: {_HINT}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (LEAST, hard))


def allow_descriptors(num_connections: int) -> None:
    """Raise the process's soft limit to the hard one; log if that is not enough for ``num_connections``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    wanted = num_connections + _OTHERS
    if hard not in (resource.RLIM_INFINITY, -1) and hard < wanted:
        _log.warning("process.few_descriptors", most=hard, wanted=wanted, hint=_HINT)


def refuse_last_descriptors(descriptor: int) -> None:
    """Raise Overloaded if a peer's connection, accepted as ``descriptor``, is one of the last possible ones.

    The kernel assigns the lowest free number, so it indicates how many are in use.
    """
    most = _most()
    if descriptor >= most - min(_MOST_KEPT, max(_LEAST_KEPT, most // 16)):
        _rare_log.warning("process.out_of_descriptors", most=most, hint=_HINT)
        raise Overloaded(f"this process may have {most} files open and has none left for a connection: {_HINT}")


async def watch_descriptors() -> None:
    """Log while none can be opened; runs until cancelled. Event loops then close connections without an error."""
    while True:
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            _rare_log.warning("process.out_of_descriptors", most=_most(), hint=_HINT)
        await asyncio.sleep(_LOOK_S)


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
                f"{flag} {format_size(wanted_bytes)}: {where} has {left} free of {has}; request less, or "
                "stop what uses the rest (clients of an ended node hold its memory until they notice)"
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
