"""The tokens file is looked at beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import pytest

from tanghulu.auth.tokens import TokensFile
from tanghulu.rpc import authorizer
from tanghulu.rpc.fast_server import FastService


async def test_a_disk_that_takes_its_time_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on, looked = threading.Event(), threading.Event(), threading.Event()
    let_on: list[bool] = []

    class SlowFile:
        def refresh(self) -> bool:
            begun.set()
            let_on.append(goes_on.wait(10))  # by the loop, unless that stands still here
            looked.set()
            return False

    monkeypatch.setattr(authorizer, "REFRESH_S", 0.001)
    file: Any = SlowFile()
    watching = asyncio.create_task(authorizer.Authorizer(cast(TokensFile, file)).watch(FastService()))
    assert await asyncio.to_thread(begun.wait, 10)
    goes_on.set()
    assert await asyncio.to_thread(looked.wait, 30)
    watching.cancel()
    assert let_on[0]
