"""Virtual time and a simulated network for asyncio: the production's coroutines and protocols run on it unchanged.

`VirtualLoop` jumps to the next timer instead of waiting for it. Connections go through `Network`: bytes arrive in
order, after a delay; a link between two hosts can be slow or cut. A cut holds bytes back (as TCP would, trying again);
after ``Network.reset_s`` both ends see a reset. A connection can be torn at any time, with what is on its way lost.
Hosts are names; the current one is a context variable that tasks and callbacks inherit.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from heapq import heappop, heappush
from random import Random
from statistics import NormalDist
from typing import Any

#: How long bytes wait for a cut link before the connection is given up.
RESET_S = 2.0
#: A payload of this many bytes arrives behind its head, as over a socket; a shorter one together with it.
APART_BYTES = 32 << 10
#: Quantiles of the lognormal distribution that latencies are drawn from: a draw from them costs a fifth.
_SPREAD = [math.exp(NormalDist(0.0, 0.5).inv_cdf((number + 0.5) / 4096)) for number in range(4096)]
HOST: contextvars.ContextVar[str] = contextvars.ContextVar("host", default="outside")
#: The process that opens a connection, where it matters which of a host's it is.
PID: contextvars.ContextVar[int | None] = contextvars.ContextVar("pid", default=None)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time whose connections are `Network`'s.

    It has timers and callbacks alone, no files to look at, and keeps its timers as tuples, which are compared in C:
    asyncio's own way to the next callback costs more than most callbacks of a simulated life.
    """

    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self._now_s = 1000.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []  # a heap; of equal times the older is first
        self._numbers = itertools.count()
        self._stopped: dict[str, list[asyncio.Handle]] = {}  # what waits on hosts that stand still
        self.network = Network(self, rng)

    def stop_host(self, host: str) -> None:
        """Nothing happens on ``host`` until ``go_on``; what comes there waits, and so do its timers."""
        self._stopped.setdefault(host, [])

    def go_on(self, host: str) -> None:
        """Let everything happen, in order, that has waited on ``host``."""
        self._ready.extend(self._stopped.pop(host, ()))

    def all_go_on(self) -> None:
        """Let no host stand still."""
        for host in list(self._stopped):
            self.go_on(host)

    def _waits(self, handle: asyncio.Handle) -> bool:
        waiting = self._stopped.get(handle._context.get(HOST, ""))
        if waiting is not None:
            waiting.append(handle)
        return waiting is not None

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        """As asyncio's."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def _run_once(self) -> None:
        """Jump to the next timer if nothing else is to be done; then do what is due."""
        ready, timers = self._ready, self._timers
        while timers and timers[0][2].cancelled():
            heappop(timers)
        if not ready and not self._stopping:
            assert timers, "nothing will ever happen again: a coroutine waits for what nobody sends"
            self._now_s = max(self._now_s, timers[0][0])
        while timers and timers[0][0] <= self._now_s:
            ready.append(heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not (handle.cancelled() or (self._stopped and self._waits(handle))):
                handle._run()

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        """As asyncio's; there is one thread."""
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """At once: there are no threads in virtual time."""
        future = self.create_future()
        future.set_result(func(*args))
        return future

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:  # type: ignore[override]
        """Through the simulated network."""
        return await self.network.connect(protocol_factory, f"{host}:{port}")


class Pipe(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, network: Network, host: str, protocol: asyncio.BaseProtocol) -> None:
        super().__init__()
        self.host = host
        self.pid = PID.get()
        self.protocol: Any = protocol
        self.peer: Pipe
        self._network = network
        self._closing = False
        self._paused = False
        self._held: list[bytes | None] = []  # arrived while reading was paused; None is the end
        self.on_the_way: deque[tuple[float, float, bytes | None]] = deque()  # (sent, arrives, bytes), in order
        self.is_full = False
        self.lost = False
        self.context = contextvars.copy_context()

    # --- what protocols call

    def can_write_eof(self) -> bool:
        """Whether one direction can end alone."""
        return False

    def write(self, data: Any) -> None:
        if not (self._closing or self.lost):
            self._network.send(self, bytes(data))

    def writelines(self, parts: Iterable[Any]) -> None:
        head, *payload = [bytes(part) for part in parts]
        if sum(map(len, payload)) < APART_BYTES:
            self.write(b"".join((head, *payload)))
        else:
            self.write(head)
            self.write(b"".join(payload))

    def write_eof(self) -> None:
        return

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._network.send(self, None)
            self._network.loop.call_soon(self.lose, None, context=self.context)

    def abort(self) -> None:
        self._closing = True
        self._network.tear(self, ConnectionResetError("torn"))

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        held, self._held = self._held, []
        for data in held:
            self.receive(data)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.host if name == "peername" else default

    def set_write_buffer_limits(self, high: Any = None, low: Any = None) -> None:
        return

    def get_write_buffer_size(self) -> int:
        return 0

    # --- what the network calls

    def receive(self, data: bytes | None) -> None:
        """``data`` has arrived; None is the end."""
        if self.lost:
            return
        if self._paused:
            self._held.append(data)
        elif data is None:
            self._closing = True
            self.lose(None)
        elif isinstance(self.protocol, asyncio.BufferedProtocol):
            self._fill(data)
        else:
            self.protocol.data_received(data)

    def _fill(self, data: bytes) -> None:
        """As the kernel does for a protocol with a buffer of its own; what is left is another protocol's."""
        protocol: Any = self.protocol
        while data and self.protocol is protocol:
            buffer = protocol.get_buffer(len(data))
            count = min(len(buffer), len(data))
            buffer[:count], data = data[:count], data[count:]
            protocol.buffer_updated(count)
        if data:
            self.receive(data)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def lose(self, error: Exception | None) -> None:
        """The connection is over at this end."""
        if not self.lost:
            self._held.clear()
            self.lost = self._closing = True
            self._network.pipes.discard(self)
            self.protocol.connection_lost(error)


class Network:
    """Hosts, what listens on them, and the links between them."""

    def __init__(self, loop: VirtualLoop, rng: Random) -> None:
        self.loop = loop
        self._rng = rng
        self.listeners: dict[str, tuple[str, Callable[[], asyncio.Protocol], contextvars.Context]] = {}
        self.pipes: dict[Pipe, None] | set[Pipe] = _OrderedSet()
        self._cut: set[frozenset[str]] = set()
        self._slow: dict[str, float] = {}
        self.delay_s = 0.0005
        self.reset_s = RESET_S
        self.cuts_frames = False  # a torn connection brings a part of what was on its way
        #: Writes on their way on one connection before its writer is told to pause; None: it never is.
        self.most_on_the_way: int | None = None

    def listen(self, address: str, factory: Callable[[], asyncio.Protocol]) -> None:
        """The current host answers at ``address``."""
        self.listeners[address] = (HOST.get(), factory, contextvars.copy_context())

    def host_gone(self, host: str, *, silently: bool = False) -> None:
        """The host's process has ended: nobody listens, its connections are reset at the other ends.

        ``silently``: its kernel is gone too; the others hear nothing until they give up.
        """
        for address in [a for a, (owner, _, _) in self.listeners.items() if owner == host]:
            del self.listeners[address]
        self._end_pipes([p for p in self.pipes if p.host == host], silently=silently)

    def process_gone(self, pid: int) -> None:
        """One of a host's processes has ended: its connections are reset at the other ends."""
        self._end_pipes([p for p in self.pipes if p.pid == pid], silently=False)

    def _end_pipes(self, pipes: Iterable[Pipe], *, silently: bool) -> None:
        for pipe in pipes:
            host = pipe.host
            pipe.lost = True
            self.pipes.discard(pipe)
            wait_s = self.reset_s if silently else self.latency_s(host, pipe.peer.host)
            self._later(wait_s, pipe.peer, pipe.peer.lose, ConnectionResetError("the peer is gone"))

    # --- links

    def cut(self, one: str, other: str) -> None:
        """No bytes pass between the two."""
        self._cut.add(frozenset((one, other)))

    def mend(self, one: str, other: str) -> None:
        """Bytes pass again."""
        self._cut.discard(frozenset((one, other)))

    def is_cut(self, one: str, other: str) -> bool:
        """Whether the link is cut."""
        return frozenset((one, other)) in self._cut

    def slow(self, host: str, factor: float) -> None:
        """Everything from and to ``host`` takes ``factor`` times as long; 1 is normal."""
        self._slow[host] = factor

    def mend_all(self) -> None:
        """All links are whole and fast."""
        self._cut.clear()
        self._slow.clear()

    def latency_s(self, one: str, other: str) -> float:
        """A drawn latency of the link."""
        factor = max(self._slow.get(one, 1.0), self._slow.get(other, 1.0))
        return self.delay_s * factor * _SPREAD[int(self._rng.random() * len(_SPREAD))]

    # --- connections

    async def connect(self, factory: Callable[[], asyncio.BaseProtocol], address: str) -> tuple[Pipe, Any]:
        """Open a connection; OSError if nobody listens or the link stays cut."""
        host = HOST.get()
        given_up_s = self.loop.time() + self.reset_s
        found = self.listeners.get(address)
        await asyncio.sleep(self.latency_s(host, found[0] if found is not None else host))
        while found is not None and self.is_cut(host, found[0]):
            if self.loop.time() >= given_up_s:
                raise TimeoutError(f"no way from {host} to {address}")
            await asyncio.sleep(0.1)
        found = self.listeners.get(address)
        if found is None:
            raise ConnectionRefusedError(f"nobody listens at {address}")
        owner, make, context = found
        near = Pipe(self, host, factory())
        far = context.run(lambda: Pipe(self, owner, make()))
        near.peer, far.peer = far, near
        self.pipes.add(near)
        self.pipes.add(far)
        far.context.run(far.protocol.connection_made, far)
        near.protocol.connection_made(near)
        return near, near.protocol

    def send(self, pipe: Pipe, data: bytes | None) -> None:
        """``data`` (None: the end) is on its way to the other end."""
        now_s = self.loop.time()
        arrives_s = now_s + self.latency_s(pipe.host, pipe.peer.host)
        pipe.on_the_way.append((now_s, max(arrives_s, pipe.on_the_way[-1][1] if pipe.on_the_way else 0.0), data))
        if len(pipe.on_the_way) == 1:
            self.loop.call_at(arrives_s, self._arrive, pipe, context=pipe.peer.context)
        if self.most_on_the_way is not None and len(pipe.on_the_way) > self.most_on_the_way and not pipe.is_full:
            pipe.is_full = True
            self.loop.call_soon(self._pause, pipe, context=pipe.context)

    @staticmethod
    def _pause(pipe: Pipe) -> None:
        if pipe.is_full and not pipe.lost:
            pipe.protocol.pause_writing()

    def _took(self, pipe: Pipe) -> None:
        """One write less is on its way."""
        if pipe.is_full and not pipe.on_the_way:
            pipe.is_full = False
            if not pipe.lost:
                pipe.context.run(pipe.protocol.resume_writing)

    def _arrive(self, pipe: Pipe) -> None:
        """The first of what is on its way is there, unless the link is cut; the rest follows in order."""
        now_s = self.loop.time()
        while pipe.on_the_way and not pipe.peer.lost:
            sent_s, arrives_s, data = pipe.on_the_way[0]
            if arrives_s > now_s:
                self.loop.call_at(arrives_s, self._arrive, pipe, context=pipe.peer.context)
                return
            if self.is_cut(pipe.host, pipe.peer.host):
                if now_s > sent_s + self.reset_s:
                    self.tear(pipe, ConnectionResetError("the link is cut"))
                else:
                    self.loop.call_at(now_s + 0.1, self._arrive, pipe, context=pipe.peer.context)
                return
            pipe.on_the_way.popleft()
            pipe.peer.receive(data)
            self._took(pipe)

    def tear(self, pipe: Pipe, error: Exception) -> None:
        """Both ends lose the connection; what is on its way is lost with it, or a part of its first write arrives."""
        for end in (pipe, pipe.peer) if self.cuts_frames else ():
            data = end.on_the_way[0][2] if end.on_the_way else None
            if data and not self.is_cut(pipe.host, pipe.peer.host):
                end.on_the_way.clear()
                part = data[: int(self._rng.random() * len(data))]
                self.loop.call_soon(end.peer.receive, part, context=end.peer.context)
        self._later(0.0, pipe, pipe.lose, error)
        self._later(self.latency_s(pipe.host, pipe.peer.host), pipe.peer, pipe.peer.lose, error)

    def _later(self, seconds: float, pipe: Pipe, what: Callable[[Exception], None], error: Exception) -> None:
        self.loop.call_later(seconds, what, error, context=pipe.context)


class _OrderedSet(dict):  # type: ignore[type-arg]
    """A set that iterates in order of insertion, so that a seed always gives the same run."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)


def on_host(host: str, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task that runs on ``host``."""
    context = contextvars.copy_context()
    context.run(HOST.set, host)
    return asyncio.get_running_loop().create_task(coroutine, context=context)
