"""The credentials that a process presents to its peers: the tenant it acts for, and the token that proves it.

Credentials travel with the address of the master (``types.Masters``), because a caller needs both. Empty credentials
are not sent. The token itself is sent only to addresses typed by an operator or a user; a process found by discovery
or named by a peer gets one derived for its address (``to``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from tanghulu.auth.derived_tokens import derive
from tanghulu.errors import ConfigError
from tanghulu.types import Address

AUTHORIZATION = "authorization"
TENANT = "tanghulu-tenant"
_BEARER = "Bearer "


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files, see ``tls``; "" for none. ``cert`` and ``key`` come together.

    ``peers`` are the accepted roles of the processes that this one connects to; () accepts any. See
    ``certificate_roles``.
    """

    cert: str = ""
    key: str = ""
    ca: str = ""
    peers: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.cert or self.key or self.ca)

    def to(self, *roles: str) -> TlsFiles:
        """Return these files for connections to processes of one of ``roles``."""
        return replace(self, peers=roles)


NO_TLS = TlsFiles()


@dataclass(frozen=True, slots=True)
class Credentials:
    """A tenant and its token. A tenant's own token needs no ``tenant``; an operator's without one acts for no tenant.

    ``tls`` without any file means unencrypted connections.
    """

    tenant: str = ""
    token: str = field(default="", repr=False)
    tls: TlsFiles = NO_TLS

    @property
    def shown(self) -> bool:
        """Whether the credentials are not empty."""
        return bool(self.token)

    def to(self, address: Address, unix_path: str | None = None) -> Credentials:
        """Return the credentials for a process found at ``address``: their token is valid only there.

        A caller dialling the Unix socket beside it passes its path, too: an instance could name another's address
        beside its own path.
        """
        return replace(self, token=derive(self.token, place_of(address, unix_path))) if self.token else self

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        if not self.token:
            return ()
        shown = ((AUTHORIZATION, _BEARER + self.token),)
        return (*shown, (TENANT, self.tenant)) if self.tenant else shown


def from_metadata(metadata: tuple[tuple[str, str | bytes], ...]) -> Credentials:
    """Return the credentials that a gRPC caller presented; empty ones if it presented none."""
    given = {key: value for key, value in metadata if isinstance(value, str)}
    authorization = given.get(AUTHORIZATION, "")
    token = authorization.removeprefix(_BEARER) if authorization.startswith(_BEARER) else ""
    return Credentials(given.get(TENANT, ""), token)


def read_token(text: str, what: str = "the token") -> str:
    """Return the token in ``text``, or in the file FILE if that is ``@FILE``; raises ConfigError naming ``what``."""
    if not text.startswith("@"):
        return _sendable(text, what)
    path = Path(text[1:])
    try:
        return _sendable(path.read_bytes().decode("utf-8-sig").strip(), f"{what} in {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {what} in {path}: {error}") from error


def _sendable(token: str, name: str) -> str:
    """Return ``token`` if headers and metadata can carry it unchanged; raises ConfigError."""
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"{name} contains characters other than printable ASCII; check how it was copied")
    return token


def place_of(address: Address, unix_path: str | None = None) -> str:
    """Return the place for which a token is derived."""
    return f"{address}|{unix_path}" if unix_path else str(address)


NOTHING_TO_SHOW = Credentials()
