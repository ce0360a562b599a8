"""The OpenAPI document: the bodies read by the routes themselves, and every status they return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from tanghulu.conductor.http.anthropic.bodies import CountTokensBody, MessagesBody
from tanghulu.conductor.http.responses.bodies import ResponsesBody
from tanghulu.conductor.inference.body import Body
from tanghulu.conductor.inference.schema import (
    AbortBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
)
from tanghulu.conductor.route_rights import CONDUCTOR
from tanghulu.web.access import Need
from tanghulu.web.errors import is_anthropic

#: Body of each route that has one.
BODIES: Final[Mapping[str, type[Body]]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/generate": GenerateBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/abort_request": AbortBody,
}
STREAMS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate")
_OF_BODIES: Final = {
    "408": "The body came too slowly",
    "413": "The body is too long",
    "415": "The body is not JSON",
}
#: For a route that counts against the limits of its key, and for one that may find the queue full.
_OF_INFERENCE: Final = {"429": "Too many requests; Retry-After says when to come back"}
_OF_ALL: Final = {
    "400": "Something in the request is wrong; the error names it",
    "401": "A key is needed, or the key is unknown (with --api-keys)",
    "403": "The key does not allow this",
    "404": "There is no such model, response or request",
    "500": "An error of the conductor; its log has the trace",
    "503": "No worker is there, or the conductor is full or stopping; Retry-After says when to come back",
    "504": "It took longer than it may",
}
_OF_GENERATION: Final = {"422": "Several workers in a row died under the request; it is not tried again"}
_OF_MESSAGES: Final = {"529": "The queue of the conductor is full; Retry-After says when to come back"}
#: Answers other than JSON.
_TEXTS: Final = {"/metrics": "text/plain"}
_TEXT: Final = {"type": "string"}
_TEXT_OR_NULL: Final = {"type": ["string", "null"]}


def _object(**fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an object that has all of ``fields``."""
    return {"type": "object", "required": list(fields), "properties": fields}


_ERROR: Final = _object(error=_object(message=_TEXT, type=_TEXT, code=_TEXT, param=_TEXT_OR_NULL))
_ANTHROPIC_ERROR: Final = _object(
    type={"const": "error"},
    error=_object(type=_TEXT, message=_TEXT, details=_object(error_code=_TEXT)),
    request_id=_TEXT_OR_NULL,
)


def install(app: FastAPI) -> None:
    """Have ``app`` serve the document."""
    made: dict[str, Any] = {}

    def document() -> dict[str, Any]:
        if not made:
            made.update(_document(app))
        return made

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's documented way to change it


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    wanted = [(model, "validation") for model in dict.fromkeys(BODIES.values())]
    _, definitions = models_json_schema(wanted, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    schemas.clear()
    schemas.update(definitions["$defs"])
    schemas.update(Error=_ERROR, AnthropicError=_ANTHROPIC_ERROR)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _complete(path, operation)
    return document


def _complete(path: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's default status; here it is 400
    body = BODIES.get(path)
    errors = _OF_ALL | _OF_BODIES if body is not None or path == "/route" else _OF_ALL
    shape = "AnthropicError" if is_anthropic({"path": path}) else "Error"
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape}"}}}
    if CONDUCTOR.of(path) is Need.INFERENCE:
        errors = errors | _OF_INFERENCE
    if path in STREAMS:
        errors = errors | _OF_GENERATION | (_OF_MESSAGES if is_anthropic({"path": path}) else {})
    for status, text in errors.items():
        responses.setdefault(status, {"description": text, "content": content})
    if body is not None:
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if path in _TEXTS:
        responses["200"]["content"] = {_TEXTS[path]: {"schema": {"type": "string"}}}
    if path in STREAMS:
        responses["200"]["content"] = {"application/json": {}, "text/event-stream": {}}
