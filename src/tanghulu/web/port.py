"""What an HTTP port asks of its clients, as the options of its process say: keys, certificates, a bound on connections.

One for each of the conductor and the routers.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import Any

from starlette.types import ASGIApp

from tanghulu.auth.api_keys import ApiKeysFile
from tanghulu.auth.key_limits import KeyAccounts
from tanghulu.runtime.descriptors import allow_descriptors
from tanghulu.runtime.master_options import HttpOptions
from tanghulu.web.authorizer import HttpAuthorizer, RouteRights
from tanghulu.web.own_site import OwnSite, listed
from tanghulu.web.server import HttpServer, follow_files


class HttpPort:
    """Reads the files that ``options`` name; raises ConfigError for one that is not good.

    It listens on ``host``; ``origins`` are those of other sites whose pages may use it.
    """

    def __init__(self, options: HttpOptions, host: str, origins: Iterable[str] = ()) -> None:
        self._host, self._names, self._origins = host, listed(options.allowed_hosts), tuple(origins)
        self.keys = None if options.api_keys is None else ApiKeysFile(options.api_keys)
        self.tls = options.http_tls()
        self._max_connections = options.max_connections
        self._authorizer: HttpAuthorizer | None = None

    def authorized(self, app: ASGIApp, rights: RouteRights, accounts: KeyAccounts | None = None) -> ASGIApp:
        """``app`` for callers with a key, where keys are asked for, and for no page of another site."""
        if self.keys is not None:
            app = self._authorizer = HttpAuthorizer(app, self.keys, rights, accounts)
        return OwnSite(app, self._host, self._names, self._origins)

    def server(self, app: ASGIApp, grace_s: float) -> HttpServer:
        """The server of ``app``, which is what ``authorized`` gave, or has it inside."""
        allow_descriptors(self._max_connections)
        tls = None if self.tls is None else self.tls.context
        return HttpServer(app, grace_s, tls=tls, max_connections=self._max_connections)

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """What is to run as long as the server does: files that change are read again."""
        found: list[Coroutine[Any, Any, None]] = []
        if self._authorizer is not None:
            found.append(self._authorizer.watch())
        if self.tls is not None:
            found.append(follow_files(self.tls))
        return found
