"""TLS for connections between hosts: the files, and the contexts built from them. Unix sockets stay plain.

A listening process presents ``cert`` (its chain) and proves it by ``key``; a client verifies it, including the host's
name or address, against the authorities in ``ca``, or the system's. With ``mutual``, clients present a certificate
too, which the same ``ca`` must have signed. Replaced files are read again for new connections. Roles in certificates
are in ``certificate_roles``.
"""

from __future__ import annotations

import asyncio
import ssl
from functools import lru_cache
from pathlib import Path

import structlog

from tanghulu.auth.certificate_roles import RoleContext, has_roles
from tanghulu.auth.credentials import TlsFiles
from tanghulu.errors import ConfigError

_log = structlog.get_logger(__name__)

_HTTP2 = "h2"
#: ALPN of ports that understand HTTP/1.1 alone: a peer offering both must not begin with the other.
HTTP1 = "http/1.1"
#: Interval at which listeners check their files.
REFRESH_S = 30.0


class ServerTls:
    """The listening side's context. ``refresh`` reads replaced files again; open connections are unaffected.

    ``protocol`` is the protocol spoken inside.
    """

    def __init__(self, files: TlsFiles, *, mutual: bool, protocol: str = _HTTP2) -> None:
        if not (files.cert or files.key):
            raise ConfigError("--tls-ca and --tls-mutual require --tls-cert and --tls-key, to encrypt this port")
        if not (files.cert and files.key):
            raise ConfigError("--tls-cert and --tls-key must be given together")
        if mutual and not files.ca:
            raise ConfigError("--tls-mutual requires --tls-ca, the authority that signs clients' certificates")
        self._files = files
        #: Whether peers' certificates must name a role; see ``certificate_roles``.
        self.names_roles = has_roles(files.cert, files.ca)
        self._stamps = _stamps(files)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.set_alpn_protocols([protocol])
        _load(self.context, files)
        if mutual:
            self.context.verify_mode = ssl.CERT_REQUIRED

    def refresh(self) -> bool:
        """Read changed files; returns whether any had changed. Raises ConfigError if they are broken."""
        stamps = _stamps(self._files)
        if stamps == self._stamps:
            return False
        _load(self.context, self._files)
        self._stamps = stamps
        return True

    async def follow(self) -> None:
        """Use replaced certificates for new connections; runs until cancelled."""
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                if self.refresh():
                    _log.info("tls.reloaded")
            except ConfigError as error:
                _log.error("tls.not_reloaded", error=error.message)


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the context for connections opened by this process; raises ConfigError for files that do not match."""
    return _client_context(files, _stamps(files))


def _stamps(files: TlsFiles) -> tuple[int, ...]:
    """Return a value that changes when one of the files is replaced; raises ConfigError if one is missing."""
    try:
        return tuple(Path(path).stat().st_mtime_ns if path else 0 for path in (files.cert, files.key, files.ca))
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error


@lru_cache(maxsize=64)
def _client_context(files: TlsFiles, stamps: tuple[int, ...]) -> ssl.SSLContext:
    context = RoleContext(ssl.PROTOCOL_TLS_CLIENT)
    if not files.ca:
        context.load_default_certs()
    _load(context, files)
    context.expect(files.peers, required=has_roles(files.cert, files.ca))
    return context


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    if bool(files.cert) != bool(files.key):
        raise ConfigError("--tls-cert and --tls-key must be given together")
    try:
        if files.cert:
            context.load_cert_chain(files.cert, files.key)
        if files.ca:
            context.load_verify_locations(files.ca)
    except (ssl.SSLError, OSError) as error:
        named = ", ".join(filter(None, (files.cert, files.key, files.ca)))
        raise ConfigError(f"cannot use the TLS files {named}: {error.strerror or error}") from error
