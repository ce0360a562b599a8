"""Threads in virtual time: production code that waits, sleeps and holds locks runs on it unchanged.

A thread is a greenlet that the event loop resumes, so only one runs at a time, and which one is determined by the
seed. It gives way where a thread would wait: in `Condition.wait`, `Event.wait`, a lock that is taken, a future's
result, `sleep`. `waiting_for` runs a coroutine from a thread, as a blocking call of its driver would. Waking one takes
a moment, drawn anew each time, so that threads meet in many orders.

`patched` puts these in the place of ``threading``, ``time`` and ``ThreadPoolExecutor`` in the modules that are named.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import types
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from random import Random
from typing import Any, Protocol
from unittest import mock

from greenlet import GreenletExit, getcurrent, greenlet

#: The longest that waking a thread takes, in seconds.
_WAKE_S = 3e-4


class Owner(Protocol):
    """The process that a thread belongs to: what it has when it is not alive any more never runs again."""

    alive: bool


#: The process that starts threads now.
OWNER: contextvars.ContextVar[Owner | None] = contextvars.ContextVar("owner", default=None)


class Threads:
    """All threads of a simulated life; has what modules ask of ``threading``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rng: Random) -> None:
        self._loop = loop
        self._rng = rng
        self._hub = getcurrent()
        self._owners: dict[greenlet, Owner | None] = {}
        self.Lock = lambda: Lock(self)
        self.Condition = lambda: Condition(self)
        self.Event = lambda: Event(self)

    def Thread(self, target: Callable[[], None], name: str = "", daemon: bool = True) -> Thread:
        """As ``threading.Thread``."""
        return Thread(self, target)

    def executor(self, num_threads: int, name: str = "") -> Executor:
        """As ``ThreadPoolExecutor``."""
        return Executor(self, num_threads)

    def get_native_id(self) -> int:
        """No thread that the kernel knows."""
        return -1

    # --- switching

    def spawn(self, run: Callable[[], None]) -> greenlet:
        """Run ``run`` as a thread of the current process, soon."""
        thread = greenlet(run, self._hub)
        thread.gr_context = contextvars.copy_context()
        self._owners[thread] = OWNER.get()
        self.wake(thread)
        return thread

    def park(self) -> None:
        """Give way until somebody wakes the current thread."""
        assert getcurrent() is not self._hub, "the event loop must not wait"
        self._hub.switch()

    @contextlib.contextmanager
    def resumed_after(self, timeout: float | None, thread: greenlet, waiting: deque[greenlet]) -> Iterator[None]:
        """Let ``thread``, which parks now, go on after ``timeout`` seconds, unless it has left ``waiting`` by then."""

        def expire() -> None:
            if thread in waiting:
                waiting.remove(thread)
                self._resume(thread)

        timer = None if timeout is None else self._loop.call_later(timeout, expire)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()

    def wake(self, thread: greenlet) -> None:
        """Let ``thread`` go on, soon."""
        self._loop.call_later(self._rng.random() * _WAKE_S, self._resume, thread)

    def _resume(self, thread: greenlet) -> None:
        owner = self._owners.get(thread)
        if not thread.dead and (owner is None or owner.alive):
            thread.switch()
        if thread.dead:
            self._owners.pop(thread, None)

    def sleep(self, seconds: float) -> None:
        """As ``time.sleep``, in a thread."""
        self._loop.call_later(seconds, self._resume, getcurrent())
        self.park()

    def waiting_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run ``coroutine`` in the event loop and wait for its result in the current thread."""
        thread, task = getcurrent(), self._loop.create_task(coroutine)
        task.add_done_callback(lambda _: self.wake(thread))
        while not task.done():
            self.park()
        return task.result()

    async def run(self, function: Callable[[], Any]) -> Any:
        """Call ``function``, which may wait, in a thread; returns its result."""
        done: asyncio.Future[Any] = self._loop.create_future()

        def call() -> None:
            try:
                done.set_result(function())
            except Exception as error:  # noqa: BLE001 - raised where it is awaited
                done.set_exception(error)

        self.spawn(call)
        return await done

    def num_alive(self, owner: Owner) -> int:
        """Threads of ``owner`` that have not ended."""
        return sum(each is owner and not thread.dead for thread, each in self._owners.items())

    def close(self) -> None:
        """End all threads, wherever they are."""
        for thread in list(self._owners):
            with contextlib.suppress(Exception):
                thread.throw(GreenletExit)
        self._owners.clear()


class Thread:
    """As ``threading.Thread``."""

    def __init__(self, threads: Threads, target: Callable[[], None]) -> None:
        self._threads, self._target = threads, target
        self._thread: greenlet | None = None
        self._ended = Event(threads)

    def start(self) -> None:
        self._thread = self._threads.spawn(self._run)

    def _run(self) -> None:
        try:
            self._target()
        finally:
            self._ended.set()

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.dead

    def join(self, timeout: float | None = None) -> None:
        assert timeout is None, "nobody gives a thread up here"
        self._ended.wait()


class Condition:
    """As ``threading.Condition``. Nobody else runs between two waits, so its lock is nothing."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._waiting: deque[greenlet] = deque()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def wait(self, timeout: float | None = None) -> None:
        thread = getcurrent()
        self._waiting.append(thread)
        with self._threads.resumed_after(timeout, thread, self._waiting):
            self._threads.park()

    def notify(self) -> None:
        if self._waiting:
            self._threads.wake(self._waiting.popleft())


class Lock:
    """As ``threading.Lock``; first come, first served."""

    def __init__(self, threads: Threads) -> None:
        self._free = Condition(threads)
        self._taken = False

    def __enter__(self) -> None:
        while self._taken:
            self._free.wait()
        self._taken = True

    def __exit__(self, *_: object) -> None:
        self._taken = False
        self._free.notify()


class Event:
    """As ``threading.Event``."""

    def __init__(self, threads: Threads) -> None:
        self._changed = Condition(threads)
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        while self._changed._waiting:
            self._changed.notify()

    def wait(self) -> None:
        while not self._set:
            self._changed.wait()


class _Future:
    """The result of one call in an executor."""

    def __init__(self, threads: Threads) -> None:
        self._done = Event(threads)
        self._outcome: tuple[Any, Exception | None] = None, None

    def run(self, function: Callable[[], Any]) -> None:
        try:
            self._outcome = function(), None
        except Exception as error:  # noqa: BLE001 - raised where the result is asked for
            self._outcome = None, error
        self._done.set()

    def result(self) -> Any:
        self._done.wait()
        value, error = self._outcome
        if error is not None:
            raise error
        return value


class Executor:
    """As ``ThreadPoolExecutor``."""

    def __init__(self, threads: Threads, num_threads: int) -> None:
        self._threads, self._num_threads = threads, num_threads
        self._calls: deque[tuple[_Future, Callable[[], Any]]] = deque()
        self._num_running = 0
        self._all_done = Condition(threads)
        self._closed = False

    def submit(self, function: Callable[..., Any], *args: Any, **named: Any) -> _Future:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = _Future(self._threads)
        self._calls.append((future, lambda: function(*args, **named)))
        if self._num_running < self._num_threads:
            self._num_running += 1
            self._threads.spawn(self._run)
        return future

    def _run(self) -> None:
        while self._calls:
            future, call = self._calls.popleft()
            future.run(call)
        self._num_running -= 1
        self._all_done.notify()

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        self._closed = True
        if cancel_futures:
            self._calls.clear()
        while wait and self._num_running:
            self._all_done.wait()


@contextlib.contextmanager
def patched(threads: Threads, loop: asyncio.AbstractEventLoop, *modules: types.ModuleType) -> Iterator[None]:
    """Let ``modules`` find threads and time of the simulation in the place of their own, inside the block."""
    time = types.SimpleNamespace(monotonic=loop.time, sleep=threads.sleep)
    instead = {"threading": threads, "time": time, "ThreadPoolExecutor": threads.executor}
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name, value in instead.items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, value))
        yield
