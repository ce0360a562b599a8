"""The credentials that a process shows to its peers: the tenant it acts for, and the token that proves it.

Credentials travel with the address of the master (``types.Masters``), because a caller
needs both. Empty credentials are not sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tanghulu.errors import ConfigError

AUTHORIZATION = "authorization"
TENANT = "tanghulu-tenant"
_BEARER = "Bearer "


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files, see ``tls``; "" where there is none. ``cert`` and ``key`` come together."""

    cert: str = ""
    key: str = ""
    ca: str = ""

    def __bool__(self) -> bool:
        return bool(self.cert or self.key or self.ca)


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

    @property
    def tls_between(self) -> TlsFiles:
        """The TLS files between workers, conductors and routers, which listen, too: with a certificate of their own."""
        return self.tls if self.tls.cert else NO_TLS

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


NOTHING_TO_SHOW = Credentials()
