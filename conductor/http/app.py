"""The HTTP application and the server that runs it inside the conductor's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from tanghulu.conductor.http import admin_api, errors, openai_api, sglang_api
from tanghulu.conductor.http.service import Service
from tanghulu.errors import ConfigError
from tanghulu.types import Address
from tanghulu.version import __version__

_BACKLOG = 2048
#: Longer than clients keep idle connections, so that none of them sends into one that is being closed.
_KEEP_ALIVE_S = 75


def make_app(service: Service) -> FastAPI:
    """All routes on ``service``."""
    app = FastAPI(title="tanghulu conductor", version=__version__, redirect_slashes=False)
    errors.install(app)
    app.include_router(openai_api.router(service))
    app.include_router(sglang_api.router(service))
    app.include_router(admin_api.router(service))
    return app


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts on host:port (0 picks one). Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
    return listener


def address_of(listener: socket.socket) -> Address:
    """Where ``listener`` listens."""
    host, port = listener.getsockname()[:2]
    return Address(host, port)


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers (the process has its own), and without waking up ten times a second."""

    def __init__(self, app: FastAPI, grace_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                http="httptools",
                ws="none",
                timeout_graceful_shutdown=max(1, round(grace_s)),
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                server_header=False,
                date_header=False,
            )
        )
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Accept no more connections, let the open requests end, then end ``serve``."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Wait for ``stop``; there is nothing to do meanwhile."""
        await self._stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield
