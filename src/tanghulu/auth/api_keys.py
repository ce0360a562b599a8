"""API keys, ``--api-keys FILE``: callers of the HTTP API, their rights, limits and tenants.

    [[keys]]
    name = "acme-chat"              # for logs, metrics and error messages
    tenant = "acme"                 # its prefixes are shared within this tenant; absent: among keys without one
    rights = ["inference"]          # of inference, metrics, admin
    sha256 = "..."                  # of the key; `tanghulu keys create` makes both
    expires = 2027-01-31            # optional; a date or a time
    requests_per_s = 10             # optional, like the following ones; default: no limit
    tokens_per_minute = 100000      # prompt and generated tokens
    max_in_flight = 32              # concurrent requests
    weight = 2.0                    # turns in a queue per turn of a key of weight 1; default 1
    shared_prefixes = true          # prefixes are shared with all keys that set this, in any tenant

The file belongs to this user alone (mode 0600) and is read again when it changes. It is TOML, or JSON if its name ends
in .json. Keys are secrets of 256 random bits, so one round of SHA-256 hides them well enough: guessing is hopeless.
"""

from __future__ import annotations

import hmac
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from tanghulu.auth.derived_tokens import hash_of
from tanghulu.auth.private_file import PrivateFile, expiry_unix_s
from tanghulu.auth.tenants import validate_tenant
from tanghulu.errors import ConfigError, Forbidden, Unauthorized

KEY_PREFIX: Final = "sk-tanghulu-"
MAX_KEYS: Final = 4096
#: Prefix of the salts of callers with a key, so that no two tenants, and no tenant and a keyless caller, share a salt.
_SALT: Final = "@{}/"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,62}")


class KeyRight(Enum):
    """A right granted by an API key; the value is its name in the file. ``admin`` includes the others."""

    INFERENCE = "inference"
    METRICS = "metrics"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of a key; 0 means no limit."""

    requests_per_s: float = 0.0
    tokens_per_minute: float = 0.0
    max_in_flight: int = 0


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, identified by its hash."""

    name: str
    sha256: str = field(repr=False)
    rights: frozenset[KeyRight]
    tenant: str = ""
    limits: KeyLimits = KeyLimits()
    weight: float = 1.0
    shared_prefixes: bool = False
    expires_unix_s: float | None = None

    @property
    def client(self) -> str:
        """The name under which this key's requests take turns with other clients."""
        return f"key {self.name}"

    def may(self, right: KeyRight) -> bool:
        return right in self.rights or KeyRight.ADMIN in self.rights

    def require(self, right: KeyRight, what: str) -> None:
        """Raise Forbidden unless the key gives ``right``; ``what`` names the request."""
        if not self.may(right):
            has = ", ".join(sorted(each.value for each in self.rights))
            raise Forbidden(f"{what} needs the right {right.value!r}; key {self.name!r} has {has}")

    def salted(self, salt: bytes) -> bytes:
        """Return the salt of a request whose body names ``salt``: prefixes are shared within one tenant only."""
        return _SALT.format("" if self.shared_prefixes else self.tenant).encode() + salt


def new_key() -> str:
    """Return a new random key."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


class ApiKeyTable:
    """All keys, validated; empty if all were revoked. Immutable: a changed file makes another table."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self.keys: dict[str, ApiKey] = {}
        self._by_hash: dict[str, ApiKey] = {}
        for key in keys:
            self._add(key)
        if len(self.keys) > MAX_KEYS:
            raise ConfigError(f"{len(self.keys)} keys; the limit is {MAX_KEYS}")

    def _add(self, key: ApiKey) -> None:
        if not _NAME.fullmatch(key.name):
            raise ConfigError(f"key {key.name!r}: a name must have 1 to 63 letters, digits and _ . @ -")
        if key.name in self.keys:
            raise ConfigError(f"two keys are named {key.name!r}")
        if not re.fullmatch(r"[0-9a-f]{64}", key.sha256):
            raise ConfigError(f"key {key.name!r}: sha256 is not 64 hexadecimal digits; see `tanghulu keys create`")
        if key.sha256 in self._by_hash:
            raise ConfigError(f"keys {self._by_hash[key.sha256].name!r} and {key.name!r} have the same sha256")
        if not key.rights:
            raise ConfigError(f"key {key.name!r} has no rights; give at least one")
        self.keys[key.name] = self._by_hash[key.sha256] = key

    def authenticate(self, shown: str, now_unix_s: float | None = None) -> ApiKey:
        """Return the key matching ``shown``; raises Unauthorized stating what is missing."""
        if not shown:
            raise Unauthorized("this port requires an API key: send the header Authorization: Bearer KEY")
        sha256 = hash_of(shown)
        key = self._by_hash.get(sha256)
        if key is None or not hmac.compare_digest(key.sha256, sha256):
            raise Unauthorized("unknown API key; it may have been revoked or belong to another cluster")
        now_unix_s = time.time() if now_unix_s is None else now_unix_s
        if key.expires_unix_s is not None and key.expires_unix_s <= now_unix_s:
            raise Unauthorized(f"key {key.name!r} has expired; ask the operator for a new one")
        return key

    def still_stands(self, key: ApiKey, now_unix_s: float) -> bool:
        """Return whether ``key`` is in this table unchanged and has not expired."""
        return self.keys.get(key.name) == key and (key.expires_unix_s is None or key.expires_unix_s > now_unix_s)

    def check(self) -> None:
        assert {key.sha256 for key in self.keys.values()} == set(self._by_hash)
        assert all(name == key.name for name, key in self.keys.items())

    def __repr__(self) -> str:
        return f"ApiKeyTable({len(self.keys)} keys)"


_Amount = Annotated[float, Meta(ge=0, lt=1e15)]


class _KeyRow(Struct, forbid_unknown_fields=True):
    name: str
    sha256: str
    rights: list[KeyRight] = []
    tenant: str = ""
    expires: Any = None
    requests_per_s: _Amount = 0.0
    tokens_per_minute: _Amount = 0.0
    max_in_flight: Annotated[int, Meta(ge=0)] = 0
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    shared_prefixes: bool = False

    def key(self) -> ApiKey:
        return ApiKey(
            self.name,
            self.sha256,
            frozenset(self.rights),
            validate_tenant(self.tenant) if self.tenant else "",
            KeyLimits(self.requests_per_s, self.tokens_per_minute, self.max_in_flight),
            self.weight,
            self.shared_prefixes,
            expiry_unix_s(f"key {self.name!r}", self.expires),
        )


class _KeyRows(Struct, forbid_unknown_fields=True):
    keys: list[_KeyRow] = []


class ApiKeysFile(PrivateFile[_KeyRows, ApiKeyTable]):
    """The table of a file of keys, as of the last well-formed read. Raises ConfigError."""

    def __init__(self, path: Path, called: str = "") -> None:
        super().__init__(
            path, called or f"--api-keys {path}", _KeyRows, lambda rows: ApiKeyTable(row.key() for row in rows.keys)
        )
