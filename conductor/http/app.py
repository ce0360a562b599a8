"""The conductor's application: all its routes, the page at /docs, and hints for unknown routes.

The page shows the routes, the fields of their bodies, and a form to try them. It loads everything from the conductor,
so it works without internet access.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Final

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.responses import HTMLResponse

from tanghulu.conductor.http import admin_api, openai_api, openapi_document, sglang_api
from tanghulu.conductor.http.anthropic import answering as messages_api
from tanghulu.conductor.http.responses import routes as responses_api
from tanghulu.conductor.inference.service import Service
from tanghulu.version import __version__
from tanghulu.web import errors
from tanghulu.web.routes import DirectRoutes

#: Parts of APIs that are not served, and their alternatives.
_ABSENT: Final = {
    ("/v1/embeddings", "/encode"): "embeddings are not served: workers generate text; use another server for them",
    ("/v1/rerank", "/v1/score", "/classify"): "scoring is not served: workers generate text; use another server for it",
    ("/v1/audio",): "audio is not served: models read and write text only",
    ("/v1/images",): "images are not served: models read and write text only",
    ("/v1/responses",): "of the Responses API there is POST /v1/responses, and GET and DELETE of /v1/responses/ID",
    ("/v1/conversations", "/v1/assistants", "/v1/threads"): "conversations are not kept; use /v1/responses",
    ("/v1/files", "/v1/uploads", "/v1/batches"): "files are not kept; send texts in the request",
    ("/v1/fine_tuning", "/update_weights_from_disk"): "the models of workers do not change; start others",
    ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"): "adapters are not served; start workers with a merged model",
    ("/v1/messages",): "of the Messages API there are POST /v1/messages and POST /v1/messages/count_tokens",
    ("/v1/realtime", "/api/chat"): "this API is not served; use /v1/chat/completions",
    ("/api/generate",): "this API is not served; use /v1/completions",
    ("/api/tags",): "this API is not served; use /v1/models",
    ("/start_profile",): "use --trace of a worker",
}


def make_app(service: Service) -> DirectRoutes:
    """Build the HTTP application: all routes of the conductor, on ``service``; those of inference are direct."""
    app = FastAPI(
        title="tanghulu conductor", version=__version__, redirect_slashes=False, docs_url=None, redoc_url=None
    )
    routers = [each.router(service) for each in (openai_api, responses_api, messages_api, sglang_api, admin_api)]
    for router in routers:
        app.include_router(router)
    for path in ("/", "/docs"):
        app.add_api_route(path, _docs, include_in_schema=False)
    declared = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    paths = [route.path for route in declared]
    errors.install(app, "the conductor", service.retry_after_s, lambda method, path: explain(method, path, paths))
    openapi_document.install(app)
    return DirectRoutes(app, [route for route in declared if route.path in openapi_document.STREAMS])


async def _docs() -> HTMLResponse:
    """Return the page."""
    return HTMLResponse(docs_page())


@cache
def docs_page() -> str:
    """Return the text of the page."""
    return resources.files(__package__).joinpath("docs.html").read_text()


def explain(method: str, path: str, served: Sequence[str]) -> str:
    """Explain why ``path`` is not served, and suggest alternatives; ``served`` are the paths of all routes."""
    request = f"{method} {path[:128]}"
    for absent, why in _ABSENT.items():
        if any(path == each or path.startswith(f"{each}/") for each in absent):
            return f"{request}: {why}"
    named = [route for route in served if len(route) > 1 and "{" not in route]
    if f"/v1{path}" in named:
        return f"{request}: there is no such route; did you mean /v1{path}? A client's base URL ends in /v1"
    if path.removeprefix("/v1") in named:
        return f"{request}: there is no such route; did you mean {path.removeprefix('/v1')}?"
    near = difflib.get_close_matches(path[:128], named, 1, 0.8)
    hint = f"did you mean {near[0]}?" if near else "there is /v1/chat/completions and more; see /docs"
    return f"{request}: there is no such route; {hint}"
