"""Discovery through a directory visible to all processes: one JSON file per instance, its mtime the sign of life.

    <directory>/<namespace>/<instance id>.json        {"id": …, "role": …, "ttl_s": 3.0, …}

Files appear by rename, so a reader never sees half of one, and a killed writer leaves at most a ``.tmp``.
Writers touch their file every third of the lease. A reader trusts a file for ``ttl_s`` after seeing its
mtime move, by its own monotonic clock; the wall clock decides only whether a file seen for the first time is alive. So
clocks of hosts that share the directory may differ: then a crashed process may be listed for one lease, a live one
missed for a third of one. A reader deletes files that have not moved for ``LITTER_S`` by its monotonic clock.

There are no tokens: anyone who can write to the directory can register, replace and remove any instance, so it
belongs to the cluster's user alone. An id keeps its role while its file is fresh, which guards against mistakes only.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import structlog

from tanghulu.discovery.base import DEFAULT_TTL_S, Instance, InstanceEvent, require_same_role, validate
from tanghulu.discovery.leases import MAX_TTL_S
from tanghulu.discovery.mirror import InstanceMirror
from tanghulu.discovery.renewing import RenewedRegistration
from tanghulu.errors import InvalidRequest, MasterUnavailable, TanghuluError
from tanghulu.runtime.clock import SystemClock
from tanghulu.runtime.telemetry import RareLog
from tanghulu.types import Address, InstanceId, Place, Role

_log = structlog.get_logger(__name__)
POLL_S = 0.1
#: A file that a reader has seen unchanged for this long is deleted.
LITTER_S = 600.0


#: The types of an instance's values in a file from any writer.
_TEXTS = ("id", "role", "address", "namespace", "metrics_address", "place", "unix_path")
_KINDS: dict[str, type | tuple[type, ...]] = {**dict.fromkeys(_TEXTS, str), "generation": int, "attributes": dict}
_KINDS["ttl_s"] = (int, float)


def encode(instance: Instance, ttl_s: float) -> bytes:
    """Return the contents of an instance's file."""
    values = dataclasses.asdict(instance)
    values.update(
        role=instance.role.value, address=str(instance.address), place=str(instance.place), ttl_s=ttl_s, format=1
    )
    return json.dumps(values, indent=1).encode()


def decode(data: bytes) -> tuple[Instance, float]:
    """Return the instance and its ttl_s; raises InvalidRequest for contents that are not an instance."""
    try:
        values: dict[str, Any] = json.loads(data)
        for name, kind in _KINDS.items():
            if not isinstance(values[name], kind):
                raise TypeError(f"{name} is {values[name]!r:.80}")
        if not all(isinstance(each, str) for pair in values["attributes"].items() for each in pair):
            raise TypeError("attributes are texts")
        instance = Instance(
            id=InstanceId(values["id"]),
            role=Role(values["role"]),
            address=Address.parse(values["address"]),
            namespace=values["namespace"],
            metrics_address=values["metrics_address"],
            place=Place.parse(values["place"]),
            generation=values["generation"],
            unix_path=values["unix_path"],
            attributes=values["attributes"],
        )
        if not 0 <= values["ttl_s"] <= MAX_TTL_S:
            raise ValueError(f"ttl_s is {values['ttl_s']:g}")
        return validate(instance), float(values["ttl_s"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, InvalidRequest) as error:
        raise InvalidRequest(f"not an instance file: {type(error).__name__}: {error}") from error


class FileRegistration(RenewedRegistration):
    """An instance's file, touched by a task until ``close``."""

    def __init__(self, discovery: FileDiscovery, path: Path, instance: Instance, ttl_s: float) -> None:
        super().__init__(discovery.registrations, instance, ttl_s)
        self._path = path

    async def _enter(self) -> None:
        await self.update(self._instance)

    async def update(self, instance: Instance) -> None:
        """Replace the registered contents (same id). Raises MasterUnavailable if the directory cannot be written."""
        assert instance.id == self._instance.id, "an update keeps the id"
        async with self._lock:
            self._instance = instance
            await asyncio.to_thread(_write, self._path, encode(instance, self._ttl_s))

    async def _leave(self) -> None:
        async with self._lock:
            await asyncio.to_thread(_unlink, self._path)

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            try:
                async with self._lock:
                    await asyncio.to_thread(_touch, self._path, encode(self._instance, self._ttl_s))
            except TanghuluError as error:
                _log.warning("discovery.lease_not_renewed", instance=self._instance.id, error=error.message)


@dataclass(slots=True)
class _Sighting:
    mtime_ns: int
    inode: int
    seen_s: float  # when this reader first saw this version, by its own clock
    moved_s: float  # when it was written, to this reader's knowledge
    instance: Instance | None
    ttl_s: float


class _Reader:
    """The files of one namespace as seen by one watcher; ``scan`` runs in a thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sightings: dict[str, _Sighting] = {}

    def scan(self) -> list[Instance]:
        """Read the directory; returns the live instances, by file name."""
        files = _stats(self._directory)
        for name in self._sightings.keys() - files.keys():
            del self._sightings[name]
        now_s = time.monotonic()
        for name, stat in files.items():
            self._see(name, stat, now_s)
        alive = (s.instance for _, s in sorted(self._sightings.items()) if now_s - s.moved_s <= s.ttl_s)
        return [instance for instance in alive if instance is not None]

    def _see(self, name: str, stat: os.stat_result, now_s: float) -> None:
        seen, path = self._sightings.get(name), self._directory / name
        if seen is not None and (seen.mtime_ns, seen.inode) == (stat.st_mtime_ns, stat.st_ino):
            if now_s - seen.seen_s > LITTER_S:
                _unlink(path)
            return
        age_s = max(time.time() - stat.st_mtime, 0.0) if seen is None else 0.0
        # Inode numbers are reused, so a moved mtime may mean other contents: read again.
        instance, ttl_s = None, 0.0
        try:
            if not name.endswith(".tmp"):
                instance, ttl_s = decode(path.read_bytes())
        except FileNotFoundError:
            return
        except (InvalidRequest, OSError) as error:
            _log.warning("discovery.unreadable_file", path=str(path), error=str(error))
        self._sightings[name] = _Sighting(stat.st_mtime_ns, stat.st_ino, now_s, now_s - age_s, instance, ttl_s)


class FileDiscovery:
    """Instances as files under ``directory``. An async context manager; leaving it closes its registrations."""

    def __init__(self, directory: Path, poll_s: float = POLL_S) -> None:
        self.registrations: set[FileRegistration] = set()
        self._directory = directory
        self._poll_s = poll_s
        self._clock = SystemClock()
        self._rare_log = RareLog(_log)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.gather(*(registration.close() for registration in list(self.registrations)))

    async def look(self) -> None:
        """Create the directory if absent. Raises MasterUnavailable."""
        await asyncio.to_thread(_make, self._directory)

    async def require_role(self, instance: Instance) -> None:
        """Raise Conflict if a live instance with this id has another role."""
        await asyncio.to_thread(_require_role, self._path_of(instance), instance)

    def _path_of(self, instance: Instance) -> Path:
        return self._namespace(instance.namespace) / f"{quote(instance.id, safe='')}.json"

    async def register(self, instance: Instance, ttl_s: float = DEFAULT_TTL_S) -> FileRegistration:
        """Register ``instance``. Raises MasterUnavailable if the directory cannot be written."""
        return await FileRegistration(self, self._path_of(instance), instance, ttl_s).open()

    async def watch(self, *roles: Role, namespace: str = "default") -> AsyncIterator[InstanceEvent]:
        """Yield every live instance, then SYNCED, then changes, at most ``poll_s`` late."""
        reader = _Reader(self._namespace(namespace))
        mirror = InstanceMirror(grace_s=0.0)
        while True:
            try:
                present = await asyncio.to_thread(reader.scan)
            except OSError as error:
                self._rare_log.warning("discovery.watch_interrupted", directory=str(self._directory), error=str(error))
            else:
                mirror.begin()
                for instance in present:
                    for event in mirror.put(instance) if not roles or instance.role in roles else ():
                        yield event
                for event in mirror.synced(self._clock.now_s()):
                    yield event
            await asyncio.sleep(self._poll_s)

    def _namespace(self, namespace: str) -> Path:
        return self._directory / quote(namespace, safe="")


def _stats(directory: Path) -> dict[str, os.stat_result]:
    """Return the files in ``directory``, including those of active or killed writers."""
    found: dict[str, os.stat_result] = {}
    with contextlib.suppress(FileNotFoundError):  # nobody has registered yet
        with os.scandir(directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    if entry.name.endswith((".json", ".tmp")):
                        found[entry.name] = entry.stat()
    return found


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MasterUnavailable(f"cannot register in {directory}: {error}") from error


def _require_role(path: Path, instance: Instance) -> None:
    """Raise Conflict if the file at ``path`` belongs to a live instance of another role."""
    try:
        known, ttl_s = decode(path.read_bytes())
        age_s = time.time() - path.stat().st_mtime
    except (OSError, InvalidRequest):  # no such id, or the file is not an instance
        return
    if age_s <= ttl_s:
        require_same_role(known, instance)


def _write(path: Path, data: bytes) -> None:
    scratch = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(data)
        os.replace(scratch, path)
    except OSError as error:
        raise MasterUnavailable(f"cannot register in {path.parent}: {error}") from error


def _touch(path: Path, data: bytes) -> None:
    try:
        os.utime(path)
    except FileNotFoundError:  # deleted by a reader while this process was stalled
        _write(path, data)
    except OSError as error:
        raise MasterUnavailable(f"cannot renew the registration {path}: {error}") from error


def _unlink(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
