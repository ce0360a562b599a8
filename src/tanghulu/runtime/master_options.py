"""The options of a process for its master's address and its credentials."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from tanghulu.auth.certificate_roles import CONDUCTOR, ROUTER
from tanghulu.auth.cluster_secret import HELP as SECRET_HELP
from tanghulu.auth.cluster_secret import ClusterSecret, read_cluster_secret
from tanghulu.auth.credentials import Credentials, TlsFiles, read_token
from tanghulu.auth.tls import HTTP1, ServerTls, client_context
from tanghulu.errors import ConfigError
from tanghulu.masters import Masters
from tanghulu.runtime.config import option

#: Help of --master, in every process that has one.
MASTER_HELP = "the master: host:port, several as host:port,host:port, or etcd://host:port[,host:port][/namespace]"

TENANT_HELP = "tenant to act for; needed with an operator's token only"
TLS_CERT_HELP = "certificate chain (PEM) of this process"
TLS_KEY_HELP = "its private key (PEM)"
TLS_CA_HELP = "certificate authorities (PEM) trusted for peers; default: the system's"
TOKEN_HELP = "token for a master and nodes with --tokens; @FILE reads it from a file"


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """The options that name TLS files; without any, connections are unencrypted."""

    tls_cert: str = option("", TLS_CERT_HELP, metavar="FILE")
    tls_key: str = option("", TLS_KEY_HELP, metavar="FILE")
    tls_ca: str = option("", TLS_CA_HELP, metavar="FILE")

    @property
    def tls(self) -> TlsFiles:
        """The files as one value."""
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_ca)


@dataclass(frozen=True, kw_only=True)
class PortOptions(TlsOptions):
    """The options of a port of a master or a node: TLS, and the number of connections."""

    max_connections: int = option(16384, "limit on connections")
    tls_mutual: bool = option(False, "require client certificates signed by --tls-ca")

    def __post_init__(self) -> None:
        if self.max_connections < 1:
            raise ConfigError(f"--max-connections {self.max_connections} must be at least 1")

    def server_tls(self) -> ServerTls | None:
        """Return the TLS context for listening; None without files. Raises ConfigError."""
        return ServerTls(self.tls, mutual=self.tls_mutual) if self.tls or self.tls_mutual else None


@dataclass(frozen=True, kw_only=True)
class ServerOptions(TlsOptions):
    """The options of an HTTP port: TLS, and the number of connections."""

    tls_mutual: bool = option(False, "require client certificates signed by --tls-ca")
    allowed_hosts: str = option(
        "", "host names accepted on a loopback port, for example behind a proxy: a.example,b.example"
    )
    max_connections: int = option(
        4096, "limit on client connections; idle ones are closed for new ones, further clients get 503", least=1
    )

    @property
    def scheme(self) -> str:
        """Scheme of the port's URLs."""
        return "https" if self.tls_cert else "http"

    def http_tls(self) -> ServerTls | None:
        """Return the TLS context of the HTTP port; None without a certificate. Raises ConfigError."""
        if not (self.tls_cert or self.tls_key or self.tls_mutual):
            return None
        return ServerTls(self.tls, mutual=self.tls_mutual, protocol=HTTP1)


@dataclass(frozen=True, kw_only=True)
class HttpOptions(ServerOptions):
    """The options of an HTTP port for clients with API keys."""

    api_keys: Path | None = option(None, "require one of the API keys in this file")

    @property
    def lets_everybody_in(self) -> bool:
        """Whether callers need neither an API key nor a certificate."""
        return self.api_keys is None and not self.tls_mutual


@dataclass(frozen=True, kw_only=True)
class HttpClientOptions:
    """The options of commands that call a conductor over HTTP."""

    api_key: str = option("", "API key for a conductor with --api-keys; @FILE reads it from a file")
    tls_ca: str = option("", TLS_CA_HELP, metavar="FILE")

    @property
    def shown(self) -> dict[str, str]:
        """Return the headers that carry the key; raises ConfigError for an unreadable file."""
        key = read_token(self.api_key)
        return {"authorization": f"Bearer {key}"} if key else {}

    @property
    def verified_by(self) -> ssl.SSLContext:
        """Return the context that verifies the conductor's certificate."""
        return client_context(TlsFiles(ca=self.tls_ca).to(CONDUCTOR, ROUTER))


@dataclass(frozen=True, kw_only=True)
class MasterOptions(TlsOptions):
    """The options of every process that uses a master."""

    master: Masters = option(Masters.parse("127.0.0.1:7400"), MASTER_HELP)
    tenant: str = option("", TENANT_HELP)
    token: str = option("", TOKEN_HELP)

    @property
    def credentials(self) -> Credentials:
        """Return the credentials for the master; raises ConfigError for an unreadable file."""
        return Credentials(self.tenant, read_token(self.token), self.tls)


@dataclass(frozen=True, kw_only=True)
class SecretOptions:
    """The option of every process that names blocks or moves KV to and from the store."""

    cluster_secret: str = option("", SECRET_HELP, metavar="@FILE")

    def shared_secret(self) -> ClusterSecret:
        """Return the secret; raises ConfigError for an unreadable file or a short secret."""
        return read_cluster_secret(self.cluster_secret)
