"""The credentials that a process shows to its peers: the tenant it acts for, and the token that proves it.

Credentials travel with the address of the master (``types.Masters``), because a caller
needs both. Empty credentials are not sent. The token itself goes only to addresses that an operator or a user has
typed; a process that was found, by discovery or named by a peer, gets one derived for its address (``to``).
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
    """Paths of PEM files, see ``tls``; "" where there is none. ``cert`` and ``key`` come together.

    ``peers`` are the roles, one of which each process that this one connects to must have; () for any. See
    ``certificate_roles``.
    """

    cert: str = ""
    key: str = ""
    ca: str = ""
    peers: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.cert or self.key or self.ca)

    def to(self, *roles: str) -> TlsFiles:
        """For connections to processes of one of ``roles``."""
        return replace(self, peers=roles)


NO_TLS = TlsFiles()


@dataclass(frozen=True, slots=True)
class Credentials:
    """A tenant and its token. A tenant's own token needs no ``tenant``; an operator's without one acts for nobody.

    ``tls`` without any file: connections are not encrypted.
    """

    tenant: str = ""
    token: str = field(default="", repr=False)
    tls: TlsFiles = NO_TLS

    @property
    def shown(self) -> bool:
        """Whether the credentials are not empty."""
        return bool(self.token)

    def to(self, address: Address, unix_path: str | None = None) -> Credentials:
        """The credentials to show to a process that was found at ``address``: their token is of use there alone.

        Whoever dials the Unix socket beside it gives its path, too: an instance could name another's address beside a
        path of its own.
        """
        return replace(self, token=derive(self.token, place_of(address, unix_path))) if self.token else self

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        if not self.token:
            return ()
        shown = ((AUTHORIZATION, _BEARER + self.token),)
        return (*shown, (TENANT, self.tenant)) if self.tenant else shown


def from_metadata(metadata: tuple[tuple[str, str | bytes], ...]) -> Credentials:
    """The credentials that a gRPC caller showed; empty ones if it showed none."""
    given = {key: value for key, value in metadata if isinstance(value, str)}
    authorization = given.get(AUTHORIZATION, "")
    token = authorization.removeprefix(_BEARER) if authorization.startswith(_BEARER) else ""
    return Credentials(given.get(TENANT, ""), token)


def read_token(text: str, what: str = "the token") -> str:
    """The token in ``text``, or in the file FILE if ``text`` is ``@FILE``; raises ConfigError that says ``what``."""
    if not text.startswith("@"):
        return _sendable(text, what)
    path = Path(text[1:])
    try:
        return _sendable(path.read_bytes().decode("utf-8-sig").strip(), f"{what} in {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {what} in {path}: {error}") from error


def _sendable(token: str, name: str) -> str:
    """``token``, which headers and metadata take as it is; raises ConfigError."""
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(
            f"{name} has characters that are not printable ASCII, which no token has; was it copied whole?"
        )
    return token


def place_of(address: Address, unix_path: str | None = None) -> str:
    """The place for which a token is derived."""
    return f"{address}|{unix_path}" if unix_path else str(address)


NOTHING_TO_SHOW = Credentials()
