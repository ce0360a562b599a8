"""Tenants, the rights of tokens, and the part of the key space that belongs to each tenant. Pure.

Inside the store a tenant's keys carry its scope, ``@tenant/``; calls add it to the keys that a tenant sends and strip
it from those it receives, so no tenant can name another's chunk. Example: tenant acme puts ``doc``. The store holds
``@acme/doc``; if tenant initech requests ``@acme/doc``, that means ``@initech/@acme/doc``. An operator's token belongs
to no tenant, has the scope "" and so sees every key unchanged.

Tokens are secrets of 256 random bits, so one round of SHA-256 hides them well enough: guessing is hopeless.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from tanghulu.auth.credentials import Credentials
from tanghulu.auth.derived_tokens import hash_of, id_of, is_derived_from, named_in
from tanghulu.errors import ConfigError, Forbidden, InvalidRequest, Unauthorized
from tanghulu.types import MAX_KEY_BYTES

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")
TOKEN_PREFIX = "tgh_"
MAX_TENANTS = 1024


class Right(Enum):
    """A right granted by a token; the value is its name in the tokens file."""

    READ = "read"  # get, exists, list, stat, follow events
    WRITE = "write"  # put, remove
    KV = "kv"  # besides write: put and remove KV, which workers and engines load
    JOIN = "join"  # be a process of the cluster: register, announce; operators only
    METRICS = "metrics"  # see the metrics of processes, which cover all tenants
    ADMIN = "admin"  # everything, of every tenant: drain, evict, policies, checks

    __hash__ = object.__hash__  # see store.protocol.types.Pin


#: The rights that no token of a tenant may have, with the reason.
OF_OPERATORS = {
    Right.ADMIN: "it sees all tenants",
    Right.METRICS: "it sees all tenants",
    Right.JOIN: "processes of the cluster hold the data of all tenants",
}


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant. ``quota_bytes`` on one node and ``cluster_quota_bytes`` on all nodes together; 0 means unlimited.

    ``shared_memory``: its clients may map a node's memory, which holds all tenants' data, and with the right to write
    can change it.
    """

    name: str
    quota_bytes: int = 0
    shared_memory: bool = False
    cluster_quota_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token, identified by its hash. ``tenant`` "" is an operator's. ``expires_unix_s`` None means no expiry."""

    name: str
    sha256: str
    rights: frozenset[Right]
    tenant: str = ""
    expires_unix_s: float | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """The caller as proved by its token. ``tenant`` "" is an operator acting for no tenant."""

    token_name: str
    rights: frozenset[Right]
    tenant: str = ""
    shared_memory: bool = False
    sha256: str = field(default="", repr=False)

    @property
    def scope(self) -> str:
        """The prefix of all keys of this caller."""
        return scope_of(self.tenant)

    def may(self, right: Right) -> bool:
        """Return whether the token grants ``right``; a process of the cluster stores KV."""
        implied = right is Right.KV and Right.JOIN in self.rights
        return implied or right in self.rights or Right.ADMIN in self.rights

    @property
    def sees_metrics(self) -> bool:
        """Whether the caller may see metrics and instances, which cover all tenants; processes of the cluster may."""
        return self.may(Right.METRICS) or self.may(Right.JOIN)

    def require(self, right: Right, what: str) -> None:
        """Raise Forbidden unless the token grants ``right``; ``what`` names the call."""
        if not self.may(right):
            has = ", ".join(sorted(each.value for each in self.rights)) or "no right"
            raise Forbidden(f"{what} needs the right {right.value!r}; token {self.token_name!r} has {has}")

    def scoped(self, key: str) -> str:
        """Return ``key`` as the store names it; raises InvalidRequest if it becomes too long."""
        scope = self.scope
        if scope and len(scope) + len(key) * 4 > MAX_KEY_BYTES and len(scope) + len(key.encode()) > MAX_KEY_BYTES:
            raise InvalidRequest(f"a key of tenant {self.tenant!r} has at most {MAX_KEY_BYTES - len(scope)} bytes")
        return scope + key

    def unscoped(self, key: str) -> str:
        """Undo ``scoped``; ``key`` must not belong to another tenant."""
        assert key.startswith(self.scope), "a key of another tenant"
        return key[len(self.scope) :]


#: Engines load anything stored under these prefixes as KV: our workers, vLLM, LMCache and SGLang.
KV_PREFIXES: Final = ("kv/", "lmcache/", "sgl/")


def is_kv(key: str) -> bool:
    """Return whether engines may load what is stored under ``key``, which may have a tenant's scope in front."""
    return (key.partition("/")[2] if key.startswith("@") else key).startswith(KV_PREFIXES)


def scope_of(tenant: str) -> str:
    """Return the prefix of all keys of ``tenant``; "" for the tenant ""."""
    return f"@{tenant}/" if tenant else ""


def tenant_of(key: str) -> str:
    """Return the tenant that owns ``key``, as the store names it; "" if it belongs to no tenant."""
    if not key.startswith("@"):
        return ""
    name, slash, _ = key[1:].partition("/")
    return name if slash else ""


def new_token() -> str:
    """Return a new random token."""
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


class TokenTable:
    """All tokens and tenants, validated. Immutable: a changed file makes another table."""

    def __init__(self, tokens: Iterable[TokenEntry], tenants: Mapping[str, Tenant]) -> None:
        self.tenants: dict[str, Tenant] = dict(tenants)
        self._by_hash: dict[str, TokenEntry] = {}
        self._by_id: dict[str, TokenEntry] = {}
        for token in tokens:
            self._add(token)
        if len(self.tenants) > MAX_TENANTS:
            raise ConfigError(f"{len(self.tenants)} tenants; the limit is {MAX_TENANTS}")

    def _add(self, token: TokenEntry) -> None:
        if not re.fullmatch(r"[0-9a-f]{64}", token.sha256):
            raise ConfigError(f"token {token.name!r}: sha256 is not 64 hexadecimal digits; see `tanghulu store token`")
        if token.sha256 in self._by_hash:
            raise ConfigError(f"tokens {self._by_hash[token.sha256].name!r} and {token.name!r} have the same sha256")
        for right, why in OF_OPERATORS.items():
            if token.tenant and right in token.rights:
                raise ConfigError(
                    f"token {token.name!r} of tenant {token.tenant!r}: the right {right.value!r} is for operators, "
                    f"because {why}; leave out the right or the tenant"
                )
        if not token.rights:
            raise ConfigError(f"token {token.name!r} has no rights; give at least one")
        if token.tenant:
            self.tenants.setdefault(token.tenant, Tenant(validate_tenant(token.tenant)))
        self._by_hash[token.sha256] = self._by_id[id_of(token.sha256)] = token

    def __len__(self) -> int:
        return len(self._by_hash)

    @property
    def tokens(self) -> list[TokenEntry]:
        return list(self._by_hash.values())

    def authenticate(
        self, credentials: Credentials, now_unix_s: float | None = None, addresses: Collection[str] = ()
    ) -> Identity:
        """Return the identity that ``credentials`` prove; raises Unauthorized stating what is missing.

        A derived token is accepted if it is for one of ``addresses``, those of this process.
        """
        if not credentials.token:
            raise Unauthorized("this process requires a token: pass token=..., --token or TANGHULU_TOKEN")
        entry = self._entry(credentials.token, addresses)
        now_unix_s = time.time() if now_unix_s is None else now_unix_s
        if entry.expires_unix_s is not None and entry.expires_unix_s <= now_unix_s:
            raise Unauthorized(f"token {entry.name!r} has expired; ask the store's operator for a new one")
        wanted = credentials.tenant
        if wanted and entry.tenant and wanted != entry.tenant:
            raise Unauthorized(f"token {entry.name!r} does not belong to tenant {wanted!r}")
        if wanted and wanted not in self.tenants:
            raise Unauthorized(f"tenant {wanted!r} is unknown")
        return self._identity(entry, entry.tenant or wanted)

    def _entry(self, shown: str, addresses: Collection[str]) -> TokenEntry:
        token_id = named_in(shown)
        entry = self._by_id.get(token_id) if token_id else self._by_hash.get(hash_of(shown))
        if entry is None:
            raise Unauthorized("unknown token; it may have been revoked or belong to another cluster")
        if token_id and not is_derived_from(entry.sha256, shown, addresses):
            raise Unauthorized(
                f"token {entry.name!r} was derived for another address than {' or '.join(sorted(addresses)) or 'none'}"
                "; does this process register the address under which others reach it? See --advertise-host"
            )
        return entry

    def _identity(self, entry: TokenEntry, tenant: str) -> Identity:
        trusted = not entry.tenant or self.tenants[entry.tenant].shared_memory
        reads = bool({Right.ADMIN, Right.READ} & entry.rights)  # mapped memory can be read, whatever else it allows
        return Identity(entry.name, entry.rights, tenant, trusted and reads, entry.sha256)

    def still_stands(self, identity: Identity, now_unix_s: float) -> bool:
        """Return whether the token behind ``identity`` is in this table with the same rights and has not expired."""
        entry = self._by_hash.get(identity.sha256)
        if entry is None or (entry.expires_unix_s is not None and entry.expires_unix_s <= now_unix_s):
            return False
        return (
            (not entry.tenant or entry.tenant == identity.tenant)
            and (identity.tenant in self.tenants or not identity.tenant)
            and self._identity(entry, identity.tenant) == identity
        )

    def check(self) -> None:
        for sha256, token in self._by_hash.items():
            assert token.sha256 == sha256
            assert not token.tenant or token.tenant in self.tenants
        assert {token.sha256 for token in self._by_id.values()} == set(self._by_hash)
        for name, tenant in self.tenants.items():
            assert tenant.name == name

    def __repr__(self) -> str:
        return f"TokenTable({len(self._by_hash)} tokens, {len(self.tenants)} tenants)"


def validate_tenant(name: str) -> str:
    """Return ``name`` if it is a valid tenant name; else raise ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"tenant {name!r}: a name must have 1 to 63 of a-z 0-9 _ . -, first a letter or digit")
    return name
