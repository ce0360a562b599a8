"""Files that are read again when they change: TOML, or JSON by file name.

Those of secrets' hashes are private to this user: tokens (``tokens``) and API keys (``api_keys``).
"""

from __future__ import annotations

import datetime
import json
import os
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
import structlog

from tanghulu.errors import ConfigError, InvalidRequest

R = TypeVar("R")
T = TypeVar("T")
_Stamp: TypeAlias = tuple[int, int, int]

_log = structlog.get_logger(__name__)
_MAX_BYTES = 16 << 20


class WatchedFile(Generic[R, T]):
    """The file at ``path``, whose ``rows`` make the table by ``parse``, as of the last well-formed read.

    ``called`` names the file in errors, such as "--tokens FILE". Raises ConfigError.
    """

    #: Whether the file is refused if others can read it: only its owner may, or, if root owns it, a group of ours.
    is_private = False

    def __init__(self, path: Path, called: str, rows: type[R], parse: Callable[[R], T]) -> None:
        self._path, self._called, self._rows, self._parse = path, called, rows, parse
        self._stamp, data = self._read()
        self.table = self._parsed(data)
        self._fault = ""

    def refresh(self) -> bool:
        """Check the file; returns whether the table has changed. A broken file is logged, once, and ignored."""
        fault, self._fault = self._fault, ""
        try:
            stamp, data = self._read()
            if stamp == self._stamp:
                self._fault = fault
                return False
            self._stamp = stamp
            self.table = self._parsed(data)
        except ConfigError as error:
            self._fault = error.message
            if fault != error.message:
                _log.error("file.not_reloaded", error=error.message, hint="what it had before stays")
            return False
        _log.info("file.reloaded", file=str(self._path), table=repr(self.table))
        return True

    def _read(self) -> tuple[_Stamp, bytes]:
        """Return a stamp that changes when the file does, and the file's bytes."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                mode = stat.S_IMODE(status.st_mode)
                if self.is_private and mode & 0o077 and not _is_mounted_secret(self._path, status):
                    raise ConfigError(f"{self._path} is readable by others (mode {mode:04o}); set its mode to 600")
                return (status.st_ino, status.st_mtime_ns, status.st_size), file.read(_MAX_BYTES)
        except OSError as error:
            raise ConfigError(f"cannot read {self._called}: {error.strerror}") from error

    def _parsed(self, data: bytes) -> T:
        try:
            text = data.decode("utf-8-sig")
            content = json.loads(text) if self._path.suffix == ".json" else tomllib.loads(text)
            return self._parse(msgspec.convert(content, self._rows))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"cannot read {self._called}: {error}") from error
        except (ConfigError, InvalidRequest) as error:
            raise ConfigError(f"{self._called}: {error.message}") from None


class PrivateFile(WatchedFile[R, T]):
    """A file of secrets' hashes."""

    is_private = True


def _is_mounted_secret(path: Path, status: os.stat_result) -> bool:
    """Return whether root owns the file and only a group of this process may read it, as in a Kubernetes Secret.

    A credential of systemd also has root's group, and an access list that names the service's user.
    """
    groups = {os.getegid(), *os.getgroups()} - {0}
    is_credential = str(path.parent) == os.environ.get("CREDENTIALS_DIRECTORY")  # no option: systemd sets it
    return status.st_uid == 0 and (is_credential or status.st_gid in groups) and not status.st_mode & 0o037


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
        raise ConfigError(f"{what}: expires {value!r} is not a date or time") from None
