"""The page as an answer, and its data as server-sent events. No script, style or picture comes from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any

import msgspec
from starlette.responses import HTMLResponse, Response, StreamingResponse

#: Seconds between two events of a stream.
PERIOD_S = 1.0
#: Points of a chart, and rows of a possibly long list.
MAX_POINTS = 100
MAX_SHOWN = 50


def page() -> Response:
    """Return the page; the policy in its header allows exactly its own script and style."""
    text, policy = _page()
    return HTMLResponse(text, headers={"content-security-policy": policy, "cache-control": "no-cache"})


def once(state: Mapping[str, Any]) -> Response:
    """Return the page's data as JSON."""
    return Response(msgspec.json.encode(state), media_type="application/json")


def stream(state: Callable[[], Awaitable[Mapping[str, Any]]], goes_on: Callable[[], Awaitable[bool]]) -> Response:
    """Return the page's data as server-sent events. ``goes_on`` waits for the next, and returns if there is one."""

    async def events() -> AsyncIterator[bytes]:
        while True:
            yield b"data: " + msgspec.json.encode(await state()) + b"\n\n"
            if not await goes_on():
                return

    return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-cache"})


@cache
def _page() -> tuple[str, str]:
    text = resources.files(__package__).joinpath("page.html").read_text()
    sources = {
        kind: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'"
            for part in re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        )
        for kind in ("script", "style")
    }
    policy = f"default-src 'none'; connect-src 'self'; script-src {sources['script']}; style-src {sources['style']}"
    return text, f"{policy}; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
