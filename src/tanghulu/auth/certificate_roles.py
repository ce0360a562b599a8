"""Roles of processes in their certificates, so that a stolen worker's key cannot act as a master.

A certificate of ``tanghulu certs init`` names its role in a URI, ``tanghulu://role/worker``, and its authority has the
URI ``tanghulu://role/authority``. A process whose authority or own certificate has such a URI requires each peer to
have the role that belongs at that place. Certificates of an operator's own authority, without URIs, are not checked.

gRPC verifies the names of a peer and hides its URIs. So ``tanghulu certs init`` gives each certificate one more name
per host, such as ``10-0-0-5.master.tanghulu`` for a master at 10.0.0.5. If the authority has its URI, gRPC's
connections verify that name instead. With ``--host '*'`` the name is ``*.master.tanghulu``: such a certificate is valid
for its role at any host, as pods need, whose addresses are not known in advance.
"""

from __future__ import annotations

import ipaddress
import re
import ssl
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from tanghulu.errors import Forbidden

URI: Final = "tanghulu://role/"
AUTHORITY: Final = "authority"
MASTER: Final = "master"
NODE: Final = "node"
WORKER: Final = "worker"
CONDUCTOR: Final = "conductor"
ROUTER: Final = "router"
GATEWAY: Final = "gateway"
CLIENT: Final = "client"
#: All roles in a cluster. Clients only connect; the others also listen.
ROLES: Final = (MASTER, NODE, WORKER, CONDUCTOR, ROUTER, GATEWAY, CLIENT)
_CERTIFICATE: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


#: Stands for the role of a certificate without one when a role is required.
NONE: Final = "none"


def name_for(host: str, role: str) -> str:
    """Return the name by which gRPC recognises a process of ``role`` at ``host``."""
    return f"{re.sub('[.:]', '-', host)}.{role}.tanghulu"


def _holds_for(certificate: Mapping[str, Any], host: str, roles: Iterable[str]) -> bool:
    """Return whether a certificate names ``host``, or any host of one of ``roles``."""
    names = certificate.get("subjectAltName", ())
    if any(("DNS", name_for("*", role)) in names for role in roles):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return any(kind == "DNS" and name.lower() == host.lower() for kind, name in names)
    return any(kind == "IP Address" and ipaddress.ip_address(name.strip()) == address for kind, name in names)


def has_roles(*paths: str) -> bool:
    """Return whether one of these PEM files contains a certificate with a role; raises OSError."""
    return any(_has_role(Path(path).read_text(errors="replace")) for path in paths if path)


def _has_role(pem: str) -> bool:
    return any(URI.encode() in ssl.PEM_cert_to_DER_cert(each) for each in _CERTIFICATE.findall(pem))


def roles_of(certificate: Mapping[str, Any] | None) -> set[str]:
    """Return the roles in a certificate as ``getpeercert`` returns it."""
    names = (certificate or {}).get("subjectAltName", ())
    return {name.removeprefix(URI) for kind, name in names if kind == "URI" and name.startswith(URI)}


def require_role(roles: Collection[str], expected: str, what: str) -> None:
    """Raise Forbidden if a peer's certificate has ``roles`` and ``expected`` is not among them."""
    if roles and expected not in roles:
        shown = ", ".join(sorted(roles))
        raise Forbidden(f"{what} requires a certificate with the role {expected}; the one presented has {shown}")


class RoleContext(ssl.SSLContext):
    """A context whose handshakes fail unless the peer has an expected role; ``expect`` sets which."""

    _expected: tuple[str, ...] = ()
    _required = False

    def expect(self, roles: tuple[str, ...], *, required: bool) -> None:
        """Refuse peers with other ``roles``, and those without a role if one is ``required``; () admits all roles."""
        self._expected, self._required = roles, required
        # ``check`` verifies the host: OpenSSL does not know the names that are valid for a role at any host.
        self.check_hostname = not (roles and required)

    def check(self, certificate: Mapping[str, Any] | None, host: str | None) -> None:
        """Raise SSLCertVerificationError if a peer's certificate has the wrong role or host."""
        roles = roles_of(certificate)
        if not self._expected or not (roles or self._required):
            return
        found = f"has the certificate of a {', '.join(sorted(roles))}" if roles else "has a certificate without a role"
        if roles & set(self._expected):
            if self.check_hostname or _holds_for(certificate or {}, host or "", self._expected):
                return
            found += f" at another host than {host}"
        error = ssl.SSLCertVerificationError(1, f"it {found}; a {' or '.join(self._expected)} is expected here")
        error.verify_code, error.verify_message = 1, str(error.strerror)
        raise error


class _CheckedObject(ssl.SSLObject):
    def do_handshake(self) -> None:
        super().do_handshake()
        _check(self)


class _CheckedSocket(ssl.SSLSocket):
    def do_handshake(self, block: bool = False) -> None:
        super().do_handshake(block)
        _check(self)


def _check(connection: ssl.SSLObject | ssl.SSLSocket) -> None:
    if isinstance(connection.context, RoleContext):
        connection.context.check(connection.getpeercert(), connection.server_hostname)


RoleContext.sslobject_class = _CheckedObject
RoleContext.sslsocket_class = _CheckedSocket
