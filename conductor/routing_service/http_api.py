"""The routing service over HTTP: JSON bodies under the names of the gRPC methods; hashes are hex, or 64-bit numbers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from tanghulu.conductor.http.reply import parse, read_body
from tanghulu.conductor.inference.schema import MAX_LABELS, at_most
from tanghulu.conductor.pool_router.relaying import Relay
from tanghulu.conductor.routing_service import types
from tanghulu.conductor.routing_service.generate import Generator
from tanghulu.conductor.routing_service.service import RoutingClient, RoutingQuery, RoutingService
from tanghulu.errors import InvalidRequest
from tanghulu.runtime.clock import Clock
from tanghulu.session.load import WorkerLoad
from tanghulu.types import InstanceId
from tanghulu.version import __version__
from tanghulu.web import errors
from tanghulu.web.routes import add_metrics, check_path, rest

Name = Annotated[str, Field(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=0, lt=1 << 32)]
Speed = Annotated[float, Field(ge=0)]
Hash = (
    Annotated[int, Field(ge=0, lt=1 << 64)] | Annotated[str, Field(min_length=2, max_length=2 * types.MAX_HASH_BYTES)]
)
Hashes = Annotated[list[Hash], Field(fail_fast=True)]


class StrictBody(BaseModel):
    """A body with strict types and no unknown fields: a misspelt field would silently have no effect."""

    model_config = ConfigDict(strict=True, extra="forbid")


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
    stored: Hashes = Field(default_factory=list)
    removed: Hashes = Field(default_factory=list)
    cleared: bool = False


class QuestionBody(StrictBody):
    """POST /best_worker, /overlaps, /potential_loads."""

    block_hashes: Hashes = Field(default_factory=list)
    tokens: Annotated[list[Count], Field(fail_fast=True)] | None = None
    num_tokens: Count = 0
    request_id: str = ""
    session: str = ""
    policy: str = ""
    weights: Annotated[dict[str, float], at_most(MAX_LABELS)] = Field(default_factory=dict)
    prefill_worker: str = ""
    decode_worker: str = ""
    explain: bool = False


class RequestBody(StrictBody):
    """POST /prefill_completed and /free."""

    request_id: Name


def make_app(
    service: RoutingService,
    hasher: types.Hasher,
    clock: Clock,
    registry: CollectorRegistry,
    max_body_bytes: int,
    generator: Generator,
) -> FastAPI:
    """Build all routes on ``service``."""
    app = FastAPI(title="tanghulu router", version=__version__, redirect_slashes=False)
    errors.install(app, "the router")
    _add_workers(app, service, max_body_bytes)
    _add_requests(app, service, hasher, clock, max_body_bytes)

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


def _add_workers(app: FastAPI, service: RoutingService, max_body_bytes: int) -> None:
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

    @app.put("/workers")
    async def put_worker(request: Request) -> dict[str, Any]:
        """Register a worker."""
        body = await parse(WorkerBody, await read_body(request, max_body_bytes))
        service.put_worker(InstanceId(body.worker), types.role_of(body.role), types.place_of(body.place), body.url)
        return {}

    @app.delete("/workers/" + rest("worker"))
    async def remove_worker(worker: str, request: Request) -> dict[str, Any]:
        """Remove a worker."""
        check_path(request)
        service.remove_worker(InstanceId(worker))
        return {}

    @app.post("/report_load")
    async def report_load(request: Request) -> dict[str, Any]:
        """Record a worker's own load figures."""
        body = await parse(LoadBody, await read_body(request, max_body_bytes))
        service.report(InstanceId(body.worker), WorkerLoad(**body.model_dump(exclude={"worker"})))
        return {}

    @app.post("/publish_events")
    async def publish_events(request: Request) -> dict[str, Any]:
        """Apply changes of a worker's cache."""
        body = await parse(EventsBody, await read_body(request, max_body_bytes))
        service.kv_event(InstanceId(body.worker), types.change_of(body))
        return {}

    @app.get("/dump_events")
    async def dump_events() -> list[dict[str, Any]]:
        """Return events that turn an empty index into this one."""
        return [{"worker": event.holder, "stored": [h.hex() for h in event.blocks]} for event in service.dump_events()]


def _add_requests(
    app: FastAPI, service: RoutingService, hasher: types.Hasher, clock: Clock, max_body_bytes: int
) -> None:
    async def parsed(request: Request) -> tuple[QuestionBody, RoutingQuery]:
        body = await parse(QuestionBody, await read_body(request, max_body_bytes))
        return body, types.query_of(hasher, body, _caller(request))

    @app.post("/best_worker")
    async def best_worker(request: Request) -> dict[str, Any]:
        """Return the best workers for a request; request_id adds it there, explain returns all candidates."""
        body, query = await parsed(request)
        best = service.best(query, clock.now_s(), body.request_id, body.explain, _caller(request))
        return {
            "prefill_worker": best.prefill,
            "decode_worker": best.decode,
            "overlap_blocks": best.overlap_blocks,
            "candidates": [
                {"worker": c.worker, "phase": c.phase, "score": c.score, **dict(c.terms)} for c in best.candidates
            ],
        }

    @app.post("/add_request")
    async def add_request(request: Request) -> dict[str, Any]:
        """Add a request already routed by the gateway: prefill_worker and possibly decode_worker are named."""
        body, query = await parsed(request)
        prefill, decode = InstanceId(body.prefill_worker), InstanceId(body.decode_worker or body.prefill_worker)
        if not body.request_id:
            raise InvalidRequest("add_request needs a request_id")
        service.add_request(body.request_id, query, prefill, decode, clock.now_s(), _caller(request))
        return {}

    @app.post("/prefill_completed")
    async def prefill_completed(request: Request) -> dict[str, Any]:
        """Record the first token of a request."""
        body = await parse(RequestBody, await read_body(request, max_body_bytes))
        service.prefill_completed(body.request_id, clock.now_s(), _caller(request))
        return {}

    @app.post("/free")
    async def free(request: Request) -> dict[str, Any]:
        """Record the end of a request."""
        body = await parse(RequestBody, await read_body(request, max_body_bytes))
        return {"freed": service.free(body.request_id, _caller(request))}

    @app.post("/overlaps")
    async def overlaps(request: Request) -> dict[str, int]:
        """Return the number of leading blocks each worker has or is computing."""
        _, query = await parsed(request)
        found = service.overlaps(query.hashes, clock.now_s())
        return {str(worker): num_blocks for worker, num_blocks in found.items()}

    @app.post("/potential_loads")
    async def potential_loads(request: Request) -> list[dict[str, Any]]:
        """Return the load each worker would have with the request."""
        _, query = await parsed(request)
        return [asdict(load) for load in service.potential_loads(query, clock.now_s())]


def _caller(request: Request) -> RoutingClient:
    return RoutingClient.of(request.scope.get("state", {}).get("api_key"))
