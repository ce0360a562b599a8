"""The conductor's application: all its routes, the page at /docs, and hints for routes that are not there.

The page has the routes, the fields of their bodies, and a form to try them. It asks nobody but the conductor for
anything, so it works where there is no internet.
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
from tanghulu.conductor.http.responses import routes as responses_api
from tanghulu.conductor.inference.service import Service
from tanghulu.version import __version__
from tanghulu.web import errors
from tanghulu.web.routes import DirectRoutes

#: Parts of APIs that are not served, and what to do instead.
_ABSENT: Final = {
    "/v1/responses": "of the Responses API there is POST /v1/responses, and GET and DELETE of /v1/responses/ID",
    "/v1/conversations": "conversations are not kept; use /v1/responses with previous_response_id",
    "/v1/embeddings": "embeddings are not served: workers generate text; use another server for them",
    "/v1/rerank": "reranking is not served: workers generate text; use another server for it",
    "/v1/score": "scoring is not served: workers generate text; use another server for it",
    "/v1/audio": "audio is not served: models here read and write text alone",
    "/v1/images": "images are not served: models here read and write text alone",
    "/v1/moderations": "nothing is moderated here",
    "/v1/files": "files are not kept; send texts in the request",
    "/v1/uploads": "files are not kept; send texts in the request",
    "/v1/batches": "batches are not kept; send the requests one by one, with a lower priority",
    "/v1/fine_tuning": "models are not trained here",
    "/v1/assistants": "assistants are not kept; use /v1/chat/completions",
    "/v1/threads": "threads are not kept; use /v1/chat/completions with all messages, their prefix is cached",
    "/v1/realtime": "there are no realtime sessions; use /v1/chat/completions with stream",
    "/v1/messages": "Anthropic's API is not served; use /v1/chat/completions",
    "/v1/load_lora_adapter": "no adapters are served; start workers with the merged model",
    "/v1/unload_lora_adapter": "no adapters are served; start workers with the merged model",
    "/api/chat": "ollama's API is not served; use /v1/chat/completions",
    "/api/generate": "ollama's API is not served; use /v1/completions",
    "/api/tags": "ollama's API is not served; use /v1/models",
    "/encode": "embeddings are not served: workers generate text; use another server for them",
    "/classify": "classification is not served: workers generate text; use another server for it",
    "/start_profile": "use --trace of a worker",
    "/update_weights_from_disk": "a worker's weights do not change; start others",
}


def make_app(service: Service) -> DirectRoutes:
    """Build the HTTP application: all routes of the conductor, on ``service``; those of inference are direct."""
    app = FastAPI(
        title="tanghulu conductor", version=__version__, redirect_slashes=False, docs_url=None, redoc_url=None
    )
    routers = [each.router(service) for each in (openai_api, responses_api, sglang_api, admin_api)]
    for router in routers:
        app.include_router(router)
    for path in ("/", "/docs"):
        app.add_api_route(path, _docs, include_in_schema=False)
    declared = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    paths = [route.path for route in declared]
    errors.install(
        app,
        "the conductor",
        service.retry_after_s,
        lambda method, path: explain(method, path, paths),
    )
    openapi_document.install(app)
    return DirectRoutes(app, [route for route in declared if route.path in openapi_document.STREAMS])


async def _docs() -> HTMLResponse:
    """The page."""
    return HTMLResponse(docs_page())


@cache
def docs_page() -> str:
    """The text of the page."""
    return resources.files(__package__).joinpath("docs.html").read_text()


def explain(method: str, path: str, served: Sequence[str]) -> str:
    """Why there is nothing at ``path``, and where to go; ``served`` are the paths of all routes."""
    asked = f"{method} {path[:128]}"
    for absent, why in _ABSENT.items():
        if path == absent or path.startswith(f"{absent}/"):
            return f"{asked}: {why}"
    named = [route for route in served if len(route) > 1 and "{" not in route]
    if f"/v1{path}" in named:
        return f"{asked}: there is no such route; did you mean /v1{path}? A client's base URL ends in /v1"
    if path.removeprefix("/v1") in named:
        return f"{asked}: there is no such route; did you mean {path.removeprefix('/v1')}?"
    near = difflib.get_close_matches(path[:128], named, 1, 0.8)
    hint = f"did you mean {near[0]}?" if near else "there is /v1/chat/completions and more; see /docs"
    return f"{asked}: there is no such route; {hint}"
