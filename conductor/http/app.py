"""The HTTP application of a conductor: all its routes on one Service."""

from __future__ import annotations

from fastapi import FastAPI

from tanghulu.conductor.http import admin_api, openai_api, sglang_api
from tanghulu.conductor.http.service import Service
from tanghulu.version import __version__
from tanghulu.web import errors


def make_app(service: Service) -> FastAPI:
    """All routes on ``service``."""
    app = FastAPI(title="tanghulu conductor", version=__version__, redirect_slashes=False)
    errors.install(app, "the conductor")
    app.include_router(openai_api.router(service))
    app.include_router(sglang_api.router(service))
    app.include_router(admin_api.router(service))
    return app
