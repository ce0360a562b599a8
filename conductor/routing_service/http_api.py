"""The routing service over HTTP: JSON bodies under the names of the gRPC methods; hashes are hex, or 64-bit numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Request
from msgspec import Meta, Struct
from prometheus_client import CollectorRegistry
from starlette.responses import Response

from tanghulu.conductor.http.reply import read_body
from tanghulu.conductor.inference.json_marks import check_marks
from tanghulu.conductor.pool_router.relaying import Relay
from tanghulu.conductor.routing_service.api import MAX_HASH_BYTES, RouterApi
from tanghulu.conductor.routing_service.generate import Generator
from tanghulu.conductor.routing_service.service import Best, RoutingClient, RoutingService
from tanghulu.conductor.text.preparing import INLINE_BYTES, made_ready
from tanghulu.errors import InvalidRequest
from tanghulu.types import InstanceId
from tanghulu.version import __version__
from tanghulu.web import errors
from tanghulu.web.routes import add_metrics, check_path, rest

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Count = Annotated[int, Meta(ge=0, lt=1 << 32)]
Speed = Annotated[float, Meta(ge=0)]
Hash = int | Annotated[str, Meta(min_length=2, max_length=2 * MAX_HASH_BYTES)]


class StrictBody(Struct, forbid_unknown_fields=True):
    """A body without unknown fields: a misspelt field would silently have no effect."""


class WorkerBody(StrictBody):
    """PUT /workers."""

    worker: Name
    role: str = "worker"
    place: str = ""
    url: str = ""


class LoadBody(StrictBody):
    """POST /report_load."""

    worker: Name
    num_running: Count = 0
    num_waiting: Count = 0
    blocks_total: Count = 0
    blocks_free: Count = 0
    prefill_tokens_waiting: Count = 0
    prefill_tokens_per_s: Speed = 0.0
    decode_step_s: Speed = 0.0
    store_bytes_per_s: Speed = 0.0


class EventsBody(StrictBody):
    """POST /publish_events; ``cleared`` comes before ``stored``."""

    worker: Name
    stored: list[Hash] = []
    removed: list[Hash] = []
    cleared: bool = False


class MediaBody(StrictBody):
    """An item of ``media``."""

    identifier: Name
    offset: Count
    length: Count


class QuestionBody(StrictBody):
    """POST /best_worker, /overlaps, /potential_loads."""

    block_hashes: list[Hash] = []
    tokens: list[Count] = []
    num_tokens: Count = 0
    request_id: str = ""
    session: str = ""
    policy: str = ""
    weights: dict[str, float] = {}
    prefill_worker: str = ""
    decode_worker: str = ""
    explain: bool = False
    cache_salt: str = ""
    lora: str = ""
    lora_path: str = ""
    media: list[MediaBody] = []


class RequestBody(StrictBody):
    """POST /prefill_completed and /free."""

    request_id: Name


def make_app(api: RouterApi, registry: CollectorRegistry, max_body_bytes: int, generator: Generator) -> FastAPI:
    """Build all routes on ``api``."""
    app, service = FastAPI(title="tanghulu router", version=__version__, redirect_slashes=False), api.service
    errors.install(app, "the router")

    def add(path: str, model: type[StrictBody], call: Callable[..., Any], method: str = "POST") -> None:
        async def route(request: Request) -> Any:
            body = await read_body(request, max_body_bytes)
            parsed = await made_ready(len(body) > INLINE_BYTES, _parse, model, body)
            return _shown(call(parsed, _caller(request)))

        app.add_api_route(path, route, methods=[method], name=call.__name__, description=call.__doc__)

    add("/workers", WorkerBody, api.put_worker, "PUT")
    add("/report_load", LoadBody, api.report_load)
    add("/publish_events", EventsBody, api.publish_events)
    add("/best_worker", QuestionBody, api.best_worker)
    add("/add_request", QuestionBody, api.add_request)
    add("/prefill_completed", RequestBody, api.prefill_completed)
    add("/free", RequestBody, api.free)
    add("/overlaps", QuestionBody, api.overlaps)
    add("/potential_loads", QuestionBody, api.potential_loads)
    _add_workers(app, service)

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        """Forward the request to the best worker, and stream its answer."""
        return Relay(generator.generate(await read_body(request, max_body_bytes), _caller(request)))

    @app.get("/health")
    @app.get("/live")
    @app.get("/ready")
    async def live() -> dict[str, Any]:
        """Respond if the process is alive."""
        return {"status": "ok", "workers": len(service.workers), "requests": service.num_requests}

    add_metrics(app, registry)
    return app


def _add_workers(app: FastAPI, service: RoutingService) -> None:
    @app.get("/workers")
    async def workers() -> list[dict[str, Any]]:
        """Return all workers, with their blocks used by requests in progress and their blocks in the index."""
        return [
            {
                "worker": target.id,
                "role": target.role.value,
                "place": str(target.place),
                "url": target.url,
                "active_blocks": target.num_blocks,
                "cached_blocks": service.index.num_blocks_of(target.id),
            }
            for target in service.workers
        ]

    @app.delete("/workers/" + rest("worker"))
    async def remove_worker(worker: str, request: Request) -> dict[str, Any]:
        """Remove a worker."""
        check_path(request)
        service.remove_worker(InstanceId(worker))
        return {}

    @app.get("/dump_events")
    async def dump_events() -> list[dict[str, Any]]:
        """Return events that turn an empty index into this one."""
        return [{"worker": event.holder, "stored": [h.hex() for h in event.blocks]} for event in service.dump_events()]


def _parse(model: type[StrictBody], body: bytes) -> StrictBody:
    check_marks(body)
    try:
        return msgspec.json.decode(body, type=model)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is malformed: {error}") from None


def _shown(result: Any) -> Any:
    """Return the result of a method as JSON's types."""
    if not isinstance(result, Best):
        return {} if result is None else result
    return {
        "prefill_worker": result.prefill,
        "decode_worker": result.decode,
        "overlap_blocks": result.overlap_blocks,
        "candidates": [
            {"worker": c.worker, "phase": c.phase, "score": c.score, **dict(c.terms)} for c in result.candidates
        ],
    }


def _caller(request: Request) -> RoutingClient:
    return RoutingClient.of(request.scope.get("state", {}).get("api_key"))
