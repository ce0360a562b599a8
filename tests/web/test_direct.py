"""Direct routes answer as the application would, whatever their endpoints do."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
import structlog
from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from tanghulu.errors import Overloaded
from tanghulu.web import errors
from tanghulu.web.routes import DirectRoutes


def _routes() -> APIRouter:
    api = APIRouter()

    @api.post("/direct/echo")
    async def echo(request: Request) -> Response:
        return PlainTextResponse(await request.body())

    @api.post("/direct/full")
    async def full(request: Request) -> Response:
        raise Overloaded("all seats are taken")

    @api.post("/direct/broken")
    async def broken(request: Request) -> Response:
        raise ZeroDivisionError

    @api.post("/direct/cut")
    async def cut(request: Request) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"a beginning"
            raise ZeroDivisionError

        return StreamingResponse(pieces())

    @api.post("/other")
    async def other() -> dict[str, str]:
        return {"by": "the application"}

    return api


@pytest.fixture
def client() -> httpx.AsyncClient:
    app, api = FastAPI(), _routes()
    app.include_router(api)
    errors.install(app, "the test", lambda: 7)
    declared = [route for route in api.routes if isinstance(route, APIRoute)]
    direct = DirectRoutes(app, [route for route in declared if route.path.startswith("/direct/")])
    transport = httpx.ASGITransport(direct, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def test_an_endpoint_gets_its_request_and_gives_its_answer(client: httpx.AsyncClient) -> None:
    assert (await client.post("/direct/echo", content=b"hello")).text == "hello"


async def test_typed_errors_have_the_application_s_answer(client: httpx.AsyncClient) -> None:
    answer = await client.post("/direct/full")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert answer.json()["error"]["message"] == "all seats are taken"


async def test_a_bug_is_a_500_and_is_logged(client: httpx.AsyncClient) -> None:
    with structlog.testing.capture_logs() as lines:
        answer = await client.post("/direct/broken")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    assert [line["event"] for line in lines] == ["http.bug"]


async def test_an_answer_that_has_begun_gets_no_second_one(client: httpx.AsyncClient) -> None:
    assert (await client.post("/direct/cut")).text == "a beginning"


async def test_everything_else_is_the_application_s(client: httpx.AsyncClient) -> None:
    assert (await client.post("/other")).json() == {"by": "the application"}
    assert (await client.get("/direct/echo")).status_code == 405
    assert (await client.post("/direct/none")).status_code == 404
