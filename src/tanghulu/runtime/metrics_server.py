"""GET /metrics and /live on a process's --metrics-port, in its own threads, so that a busy loop is still observed.

If the process was started with ``--tokens`` or ``--api-keys``, callers of /metrics must present one that may see them,
or the token that the process itself presents to its master. If it has a certificate, the port speaks TLS, and with
``--tls-mutual`` /metrics is for callers with a certificate. /live is for orchestrators, which have none of these: it
shows that the process runs, and nothing else.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, make_server

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from tanghulu.auth.api_keys import ApiKeysFile, KeyRight
from tanghulu.auth.credentials import Credentials
from tanghulu.auth.derived_tokens import is_token
from tanghulu.auth.tls import REFRESH_S as TLS_REFRESH_S
from tanghulu.auth.tls import ServerTls
from tanghulu.auth.tokens import TokensFile
from tanghulu.errors import ConfigError, Forbidden, Unauthorized
from tanghulu.types import Address

_log = structlog.get_logger(__name__)
_HANDSHAKE_S: Final = 10.0
_REFRESH_S: Final = 1.0
_CERTIFIED: Final = "tanghulu.certified"
#: Maximum connections, each with a thread; a new one evicts the oldest.
MAX_CONNECTIONS: Final = 64


class MetricsAuthorizer:
    """Authorizes readers of a process's metrics: by its tokens, its API keys, or ``own``, its own credentials."""

    def __init__(self, tokens: TokensFile | None, keys: ApiKeysFile | None, own: Credentials) -> None:
        self._tokens, self._keys, self._own = tokens, keys, own
        self._addresses: list[str] = []
        self._refreshed_s = time.monotonic()

    def answer_at(self, address: Address) -> None:
        """Accept tokens derived for ``address``, under which others find these metrics."""
        self._addresses = [str(address)]
        if self._tokens is not None:
            self._tokens.answer_at(address)

    def admit(self, authorization: str) -> None:
        """Check the header of a request; raises Unauthorized, Forbidden."""
        self._refresh()
        scheme, _, shown = authorization.strip().partition(" ")
        shown = shown.strip() if scheme.lower() == "bearer" else ""
        if not shown:
            raise Unauthorized("metrics need a token: send the header Authorization: Bearer TOKEN")
        if self._own.token and is_token(self._own.token, shown, self._addresses):
            return
        found: list[bool] = []
        with contextlib.suppress(Unauthorized):
            if self._tokens is not None:
                found.append(self._tokens.authenticate(Credentials(token=shown)).sees_metrics)
        with contextlib.suppress(Unauthorized):
            if self._keys is not None:
                found.append(self._keys.table.authenticate(shown).may(KeyRight.METRICS))
        if not found:
            raise Unauthorized("the token is not valid for this process")
        if not any(found):
            raise Forbidden("metrics cover all tenants: the token needs the right 'metrics'")

    def _refresh(self) -> None:
        now_s = time.monotonic()
        if now_s - self._refreshed_s >= _REFRESH_S:
            self._refreshed_s = now_s
            for file in (self._tokens, self._keys):
                if file is not None:
                    file.refresh()


class MetricsServer:
    """The server, from its construction until ``close``. Raises ConfigError if the port is taken."""

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        authorizer: MetricsAuthorizer | None = None,
        tls: ServerTls | None = None,
    ) -> None:
        mutual = tls is not None and tls.context.verify_mode is ssl.CERT_REQUIRED
        if tls is not None and mutual:  # the handshake accepts everybody, for /live
            tls.context.verify_mode = ssl.CERT_OPTIONAL
        try:
            app = _guarded(make_wsgi_app(registry), authorizer, needs_certificate=mutual)
            self._server = make_server(host, port, app, _server_class(host), handler_class=_Handler)
        except OSError as error:
            raise ConfigError(f"cannot serve metrics on {host}:{port}: {error.strerror}") from error
        self._server.tls, self._server.tls_refreshed_s = tls, time.monotonic()
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(WSGIRequestHandler):
    """Without log lines, and with a time limit."""

    timeout = _HANDSHAKE_S

    def get_environ(self) -> dict[str, Any]:
        """Return the request's environment, with whether the caller has presented a certificate."""
        certified = isinstance(self.connection, ssl.SSLSocket) and bool(self.connection.getpeercert())
        return {**super().get_environ(), _CERTIFIED: certified}

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing per request."""


class _Server(ThreadingWSGIServer):
    """One thread per connection, which also does the TLS handshake, so that nobody else waits for a slow client."""

    daemon_threads = True
    tls: ServerTls | None = None
    tls_refreshed_s = 0.0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lock = threading.Lock()
        self._open: dict[Any, socket.socket] = {}

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start serving a connection; the oldest is evicted if there are too many."""
        with self._lock:
            self._open[client_address] = request
            oldest = self._open.pop(next(iter(self._open))) if len(self._open) > MAX_CONNECTIONS else None
        if oldest is not None:
            with contextlib.suppress(OSError):  # it has just ended
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection."""
        try:
            if self.tls is not None:
                request = self._encrypted(request, client_address, self.tls)
            if request is not None:
                super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.pop(client_address, None)

    def _encrypted(self, request: Any, client_address: Any, tls: ServerTls) -> ssl.SSLSocket | None:
        """Return the connection after the TLS handshake; None if that fails."""
        self._follow_files(tls)
        wrapped: ssl.SSLSocket | None = None
        try:
            request.settimeout(_HANDSHAKE_S)
            wrapped = tls.context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
            with self._lock:
                if client_address in self._open:
                    self._open[client_address] = wrapped
            wrapped.do_handshake()
        except OSError as error:  # a failed wrap has closed the socket
            _log.debug("metrics.handshake_failed", peer=str(client_address), error=str(error))
            if wrapped is not None:
                wrapped.close()
            return None
        return wrapped

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a broken or foreign connection briefly."""
        _log.debug("metrics.connection_failed", peer=str(client_address))

    def _follow_files(self, tls: ServerTls) -> None:
        """Use replaced certificates for new connections."""
        now_s = time.monotonic()
        if now_s - self.tls_refreshed_s >= TLS_REFRESH_S:
            self.tls_refreshed_s = now_s
            try:
                tls.refresh()
            except ConfigError as error:
                _log.error("metrics.certificates_not_replaced", error=error.message)


class _ServerOverIpv6(_Server):
    address_family = socket.AF_INET6


def _server_class(host: str) -> type[_Server]:
    return _ServerOverIpv6 if ":" in host else _Server


def _guarded(
    app: Callable[..., Iterable[bytes]], authorizer: MetricsAuthorizer | None, *, needs_certificate: bool
) -> Callable[..., Iterable[bytes]]:
    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/live":
            start_response("200 OK", [("content-type", "text/plain")])
            return [b"live\n"]
        try:
            if needs_certificate and not environ[_CERTIFIED]:
                raise Forbidden("metrics need a client certificate here (--tls-mutual)")
            if authorizer is not None:
                authorizer.admit(environ.get("HTTP_AUTHORIZATION", ""))
        except Unauthorized as error:
            status = 403 if isinstance(error, Forbidden) else 401
            headers = [("content-type", "text/plain; charset=utf-8"), ("www-authenticate", "Bearer")]
            start_response(f"{status} {http.client.responses[status]}", headers)
            return [error.message.encode() + b"\n"]
        return app(environ, start_response)

    return guarded
