"""What a simulated life has around it instead of what this process has: clocks, random ids, logs, the collector."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import secrets
import sys
from collections.abc import Iterator
from random import Random
from typing import Any, Protocol
from unittest import mock

import structlog

from tanghulu.errors import TanghuluError
from tanghulu.rpc import fast_server
from tanghulu.rpc.fast_server import FastServerProtocol
from tanghulu.runtime.clock import SystemClock


class World(Protocol):
    """A simulated life."""

    rng: Random
    loop: asyncio.AbstractEventLoop

    def clock_s(self) -> float:
        """The time by the clock of the host where something happens now."""

    def fail(self, error: BaseException) -> None:
        """Remember what went wrong."""


@contextlib.contextmanager
def collected_garbage() -> Iterator[None]:
    """What ends when its memory is collected ends at moments that the life itself determines, not those before it."""
    gc.collect()
    gc.freeze()  # what there is already need not be looked through again
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


@contextlib.contextmanager
def virtual_time(world: World) -> Iterator[None]:
    """Clocks and random ids are the world's; a handler's bug, which a server would log, is a failure."""
    draw = Random(world.rng.random())

    def internal(protocol: Any, frame: Any) -> None:
        world.fail(sys.exc_info()[1] or AssertionError(f"a handler of method {frame.method} failed"))
        protocol._send_error(frame.call_id, TanghuluError("internal"))

    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50), cache_logger_on_first_use=False)
    try:
        with (
            mock.patch.object(SystemClock, "now_s", property(lambda _: world.clock_s)),
            mock.patch.object(secrets, "randbits", draw.getrandbits),
            mock.patch.object(secrets, "token_hex", lambda n=16: f"{draw.getrandbits(8 * n):x}"),
            mock.patch.object(FastServerProtocol, "_internal", internal),
            mock.patch.object(fast_server, "perf_counter", world.loop.time),  # how long a step took on a busy machine
        ):
            yield
    finally:
        structlog.configure(**before)
