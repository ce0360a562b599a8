"""Routes that are called as they are: nothing stands between the server and an endpoint that makes its own answer.

An endpoint that takes a request and returns a response leaves an application's layers nothing to do: no parameter to
check, nothing to convert. They take a tenth of the time that a streamed answer costs. The routes are declared with the
application's others, which has their documents, and its handlers answer what an endpoint raises.
"""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.types import Message, Receive, Scope, Send


class DirectRoutes:
    """``routes`` of ``app``, of fixed paths, past its layers; everything else is the application's."""

    def __init__(self, app: FastAPI, routes: Iterable[APIRoute]) -> None:
        self.app = app
        self._routes = {(method, route.path): route for route in routes for method in route.methods or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if route is None:
            await self.app(scope, receive, send)
            return
        scope["route"], begun = route, False

        async def send_noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        request = Request(scope, receive)
        try:
            answer = await route.endpoint(request)
            await answer(scope, receive, send_noted)
        except Exception as error:
            if begun or not await self._answer(error, request, send):
                raise

    async def _answer(self, error: Exception, request: Request, send: Send) -> bool:
        """Answer ``error`` by the application's handler of its kind; False for a bug, which is raised on."""
        handlers = self.app.exception_handlers
        kind = next(kind for kind in type(error).__mro__ if kind in handlers)
        answer = await handlers[kind](request, error)  # type: ignore[misc]
        await answer(request.scope, request.receive, send)
        return kind is not Exception
