"""The tokens file, ``--tokens FILE``, which is read again when it changes.

    [tenants.acme]                  # needed only for what differs from the defaults
    quota = "64GiB"                 # most bytes on one node; default: no bound
    cluster_quota = "256GiB"        # most bytes on all nodes together; default: no bound
    shared_memory = true            # its clients may map the nodes' memory, and so read all of it

    [[tokens]]
    name = "acme-engines"           # for logs and error messages
    tenant = "acme"                 # left out: an operator's token
    rights = ["read", "write", "join"]
    sha256 = "..."                  # of the token; `tanghulu store token` makes both
    expires = 2027-01-31            # optional; a date or a time

The file is this user's alone (mode 0600). It is TOML, or JSON if its name ends in .json.
"""

from __future__ import annotations

import datetime
import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

import structlog

from tanghulu.auth.tenants import Right, Tenant, TokenEntry, TokenTable, validate_tenant
from tanghulu.errors import ConfigError, InvalidRequest
from tanghulu.types import parse_size

_log = structlog.get_logger(__name__)
_MAX_BYTES = 16 << 20
_TOKEN_KEYS = {"name", "tenant", "rights", "sha256", "expires"}
_TENANT_KEYS = {"quota", "cluster_quota", "shared_memory"}


def load(path: Path) -> TokenTable:
    """The table in ``path``; raises ConfigError that names what is wrong, a mode that others can read included."""
    return _parse(path, _read(path)[1])


def _read(path: Path) -> tuple[tuple[int, int, int], bytes]:
    """A pair: a stamp that changes when the file does, and the file's bytes."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_IMODE(status.st_mode) & 0o077:
                raise ConfigError(f"{path} can be read by others (mode {stat.S_IMODE(status.st_mode):04o}): chmod 600")
            return (status.st_ino, status.st_mtime_ns, status.st_size), file.read(_MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read --tokens {path}: {error.strerror}") from error


def _parse(path: Path, data: bytes) -> TokenTable:
    try:
        text = data.decode()
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:  # of all three
        raise ConfigError(f"cannot read --tokens {path}: {error}") from error
    try:
        _known(content, {"tenants", "tokens"}, "the file")
        tenants = {name: _tenant(name, each) for name, each in _table(content.get("tenants", {}), "tenants").items()}
        tokens = [_token(each) for each in content.get("tokens", [])]
        if not tokens:
            raise ConfigError("there is no token in it, so nobody could ever connect")
        return TokenTable(tokens, tenants)
    except (ConfigError, InvalidRequest) as error:
        raise ConfigError(f"--tokens {path}: {error.message}") from None


def _table(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{what} is not a table")
    return value


def _known(table: dict[str, Any], keys: set[str], what: str) -> None:
    for key in _table(table, what):
        if key not in keys:
            raise ConfigError(f"{what}: key {key!r} is unknown; known: {', '.join(sorted(keys))}")


def _tenant(name: str, content: Any) -> Tenant:
    _known(content, _TENANT_KEYS, f"tenant {name!r}")
    shared = content.get("shared_memory", False)
    if not isinstance(shared, bool):
        raise ConfigError(f"tenant {name!r}: shared_memory is true or false")
    quotas = [parse_size(content.get(key, 0)) for key in ("quota", "cluster_quota")]
    return Tenant(validate_tenant(name), quotas[0], shared, quotas[1])


def _token(content: Any) -> TokenEntry:
    _known(content, _TOKEN_KEYS, "a token")
    name = str(content.get("name", ""))
    if not name:
        raise ConfigError("a token has no name")
    rights = content.get("rights", [])
    known = {right.value: right for right in Right}
    for right in rights:
        if right not in known:
            raise ConfigError(f"token {name!r}: right {right!r} is unknown; known: {', '.join(known)}")
    expires = _unix_s(name, content.get("expires"))
    sha256, tenant = str(content.get("sha256", "")), str(content.get("tenant", ""))
    return TokenEntry(name, sha256, frozenset(known[right] for right in rights), tenant, expires)


def _unix_s(name: str, value: Any) -> float | None:
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
        raise ConfigError(f"token {name!r}: expires {value!r} is no date or time") from None


class TokensFile:
    """The table of a tokens file, as it was when last looked at and well-formed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp, data = _read(path)
        self.table = _parse(path, data)

    def refresh(self) -> bool:
        """Look at the file; returns whether the table has changed. A broken file is logged and ignored."""
        try:
            stamp, data = _read(self._path)
            if stamp == self._stamp:
                return False
            self._stamp = stamp
            self.table = _parse(self._path, data)
        except ConfigError as error:
            _log.error("tokens.not_reloaded", error=error.message)
            return False
        _log.info("tokens.reloaded", num_tokens=len(self.table), num_tenants=len(self.table.tenants))
        return True
