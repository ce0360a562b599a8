"""The state of endpoints follows their health checks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tanghulu.conductor.endpoint_picker import endpoints
from tanghulu.conductor.endpoint_picker.endpoints import Endpoints
from tanghulu.conductor.engines.client import EngineGone
from tanghulu.errors import DeadlineExceeded

LATE, GONE = DeadlineExceeded("late"), EngineGone("gone")


class Answers:
    """A server's client that answers the health checks in turn, then never."""

    def __init__(self, *answers: Exception | bytes) -> None:
        self._answers: Iterator[Exception | bytes] = iter(answers)
        self.ended = asyncio.Event()

    async def call(self, path: str, **_: Any) -> bytes:
        assert path == "/health"
        answer = next(self._answers, None)
        if answer is None:
            self.ended.set()
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return b""

    async def close(self) -> None: ...


class Picker:
    """Records the reports of readiness."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def set_ready(self, _: str, ready: bool) -> None:
        self.seen.append(ready)

    def set_adapters(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("answers", "seen"),
    [
        ((b"", LATE, LATE, b"", LATE, LATE, LATE, LATE, b""), "YYYYYYNNY"),
        ((LATE, b"", GONE, LATE, b""), "NYNNY"),
    ],
)
async def test_a_server_is_lost_after_several_late_answers_or_one_refusal(monkeypatch, answers, seen):
    client, picker = Answers(*answers), Picker()
    monkeypatch.setattr(endpoints, "EngineClient", lambda server, tls: client)
    monkeypatch.setattr(endpoints, "served_models", lambda _: _no_models())
    followed = Endpoints(picker, None, ("/health", 1e-6), None, lambda: None)  # type: ignore[arg-type]
    watch = asyncio.create_task(followed._watch("a", None))  # type: ignore[arg-type]
    await client.ended.wait()
    watch.cancel()
    assert picker.seen == [each == "Y" for each in seen]


async def _no_models() -> tuple[str, str, int, dict[str, str]]:
    return "m", "", 0, {}
