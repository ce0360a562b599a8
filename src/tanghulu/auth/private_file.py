"""Files of secrets' hashes, private to this user and read again when they change: TOML, or JSON by file name.

Tokens (``tokens``) and API keys (``api_keys``) are kept in such files.
"""

from __future__ import annotations

import datetime
import json
import os
import stat
import tomllib
from collections.abc import Callable, Set
from enum import Enum
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import structlog

from tanghulu.errors import ConfigError, InvalidRequest

E = TypeVar("E", bound=Enum)
T = TypeVar("T")
V = TypeVar("V")
_Stamp: TypeAlias = tuple[int, int, int]

_log = structlog.get_logger(__name__)
_MAX_BYTES = 16 << 20


class PrivateFile(Generic[T]):
    """The file at ``path`` as parsed by ``parse``, as of the last well-formed read.

    ``called`` names the file in errors, such as "--tokens FILE". Raises ConfigError, also if others can read the file:
    only its owner may, or, if root owns it, a group of this process.
    """

    def __init__(self, path: Path, called: str, parse: Callable[[dict[str, Any]], T]) -> None:
        self._path, self._called, self._parse = path, called, parse
        self._stamp, data = self._read()
        self.table = self._parsed(data)

    def refresh(self) -> bool:
        """Check the file; returns whether the table has changed. A broken file is logged and ignored."""
        try:
            stamp, data = self._read()
            if stamp == self._stamp:
                return False
            self._stamp = stamp
            self.table = self._parsed(data)
        except ConfigError as error:
            _log.error("private_file.not_reloaded", error=error.message)
            return False
        _log.info("private_file.reloaded", file=str(self._path), table=repr(self.table))
        return True

    def _read(self) -> tuple[_Stamp, bytes]:
        """Return a stamp that changes when the file does, and the file's bytes."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                mode = stat.S_IMODE(status.st_mode)
                if mode & 0o077 and not _is_mounted_secret(status):
                    raise ConfigError(f"{self._path} can be read by others (mode {mode:04o}): chmod 600")
                return (status.st_ino, status.st_mtime_ns, status.st_size), file.read(_MAX_BYTES)
        except OSError as error:
            raise ConfigError(f"cannot read {self._called}: {error.strerror}") from error

    def _parsed(self, data: bytes) -> T:
        try:
            text = data.decode("utf-8-sig")
            content = json.loads(text) if self._path.suffix == ".json" else tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"cannot read {self._called}: {error}") from error
        try:
            return self._parse(content)
        except (ConfigError, InvalidRequest) as error:
            raise ConfigError(f"{self._called}: {error.message}") from None


def _is_mounted_secret(status: os.stat_result) -> bool:
    """Return whether root owns the file and only a group of this process may read it, as in a Kubernetes Secret."""
    groups = {os.getegid(), *os.getgroups()}
    return status.st_uid == 0 and status.st_gid in groups - {0} and not status.st_mode & 0o037


def table_of(value: Any, what: str) -> dict[str, Any]:
    """Return ``value`` if it is a table; else raise ConfigError."""
    if not isinstance(value, dict):
        raise ConfigError(f"{what} is not a table")
    return value


def refuse_unknown(table: dict[str, Any], keys: Set[str], what: str) -> None:
    """Raise ConfigError for a key of ``table`` that is not in ``keys``."""
    for key in table_of(table, what):
        if key not in keys:
            raise ConfigError(f"{what}: key {key!r} is unknown; known: {', '.join(sorted(keys))}")


def list_of(value: Any, kind: type[V], what: str) -> list[V]:
    """Return ``value`` if it is a list of ``kind`` alone; else raise ConfigError."""
    if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
        raise ConfigError(f"{what} is not a list of {'tables' if kind is dict else 'strings'}")
    return value


def rights_of(value: Any, kind: type[E], what: str) -> frozenset[E]:
    """Return the rights of ``kind`` named in a list; raises ConfigError for an unknown one."""
    known = {right.value: right for right in kind}
    for right in list_of(value, str, f"{what}: rights"):
        if right not in known:
            raise ConfigError(f"{what}: right {right!r} is unknown; known: {', '.join(known)}")
    return frozenset(known[right] for right in value)


def expiry_unix_s(what: str, value: Any) -> float | None:
    """Return a date or a time as Unix time, in UTC unless it has a zone; None for None. Raises ConfigError."""
    if value is None:
        return None
    try:
        if isinstance(value, str):
            value = datetime.datetime.fromisoformat(value)
        elif isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
            value = datetime.datetime(value.year, value.month, value.day)
        if value.tzinfo is None:
            value = value.replace(tzinfo=datetime.UTC)
        return float(value.timestamp())
    except (ValueError, AttributeError):
        raise ConfigError(f"{what}: expires {value!r} is no date or time") from None
