"""The options by which a process learns where its master is and what to show there."""

from __future__ import annotations

from dataclasses import dataclass

from tanghulu.auth.credentials import Credentials, TlsFiles, read_token
from tanghulu.auth.tls import ServerTls
from tanghulu.errors import ConfigError
from tanghulu.masters import Masters
from tanghulu.runtime.config import option

#: Of --master, in every process that has one.
MASTER_HELP = "the master: host:port, several as host:port,host:port, or etcd://host:port[,host:port][/namespace]"

TENANT_HELP = "act for this tenant (needed with an operator's token only)"
TLS_CERT_HELP = "certificate chain (PEM) to show to others"
TLS_KEY_HELP = "its private key (PEM)"
TLS_CA_HELP = "authorities (PEM) by which the others' certificates are verified; default: the system's"
TOKEN_HELP = "what to show to a master and nodes with --tokens; @FILE reads it from a file"


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """The options that name TLS files; without any, connections are not encrypted."""

    tls_cert: str = option("", TLS_CERT_HELP, metavar="FILE")
    tls_key: str = option("", TLS_KEY_HELP, metavar="FILE")
    tls_ca: str = option("", TLS_CA_HELP, metavar="FILE")

    @property
    def tls(self) -> TlsFiles:
        """The files as one value."""
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_ca)


@dataclass(frozen=True, kw_only=True)
class PortOptions(TlsOptions):
    """The options of a port that a master or a node listens on: TLS, and the number of connections."""

    max_connections: int = option(16384, "connections of the fast lane, and as many of gRPC, that are let in")
    tls_mutual: bool = option(False, "let in only who shows a certificate that --tls-ca has signed")

    def __post_init__(self) -> None:
        if self.max_connections < 1:
            raise ConfigError(f"--max-connections {self.max_connections} lets nobody in")

    def server_tls(self) -> ServerTls | None:
        """The TLS context to listen with; None without files. Raises ConfigError."""
        return ServerTls(self.tls, mutual=self.tls_mutual) if self.tls or self.tls_mutual else None


@dataclass(frozen=True, kw_only=True)
class MasterOptions(TlsOptions):
    """The options of every process that asks a master."""

    master: Masters = option(Masters.parse("127.0.0.1:7400"), MASTER_HELP)
    tenant: str = option("", TENANT_HELP)
    token: str = option("", TOKEN_HELP)

    @property
    def credentials(self) -> Credentials:
        """The credentials to show to the master; raises ConfigError for a file that cannot be read."""
        return Credentials(self.tenant, read_token(self.token), self.tls)
