"""A process of a simulated cluster: everything that it has begun ends with it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tests.virtual.loop import HOST, Network
from tests.virtual.threads import OWNER

T = TypeVar("T")


class Process:
    """What runs in its ``context`` (tasks, callbacks, threads) is its own, and never runs again when it is killed."""

    def __init__(self, host: str, network: Network) -> None:
        self.host = host
        self.network = network
        self.loop = network.loop
        self.alive = True
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.context = contextvars.copy_context()
        self.context.run(HOST.set, host)
        self.context.run(OWNER.set, self)

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call ``function`` as this process does."""
        return self.context.copy().run(function, *args)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run ``coroutine`` in this process."""
        return self.loop.create_task(coroutine, context=self.context.copy())

    def kill(self, *, silently: bool = False) -> None:
        """The process is gone at once, in the middle of whatever it did; ``silently``: its host, too."""
        self.alive = False
        self.network.host_gone(self.host, silently=silently)
        for task in list(self.tasks):
            if task is not asyncio.current_task():
                task.cancel()


def make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, context: Any = None) -> asyncio.Task[Any]:
    """The loop's task factory: each process knows its tasks."""
    owner = (context.get(OWNER) if context is not None else OWNER.get()) or None
    task = asyncio.Task(coroutine, loop=loop, context=context)
    if isinstance(owner, Process):
        owner.tasks[task] = None
        task.add_done_callback(lambda ended: owner.tasks.pop(ended, None))
    return task
