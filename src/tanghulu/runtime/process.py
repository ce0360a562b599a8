"""The frame of every long-running process: event loop, signals, run directory, metrics, a line to its supervisor.

A component's ``serve(process, config)`` does the rest: it starts, calls ``process.ready(...)``, waits for
``process.stopping`` and closes what it opened. The supervisor of ``tanghulu up`` gives a child one end of a socket
pair (``--status-fd``): the child writes JSON lines (loading, ready, failed). The end of that stream means that the
supervisor died; then the child stops too, so that a killed supervisor leaves no process behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import functools
import gc
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import structlog
from prometheus_client import CollectorRegistry

from tanghulu.auth.api_keys import ApiKeysFile
from tanghulu.auth.credentials import NOTHING_TO_SHOW
from tanghulu.auth.tls import HTTP1, ServerTls
from tanghulu.auth.tokens import TokensFile
from tanghulu.errors import ConfigError, TanghuluError
from tanghulu.runtime import garbage
from tanghulu.runtime.config import MOST_PORT, describe, option
from tanghulu.runtime.limits import watch_descriptors
from tanghulu.runtime.master_options import HttpOptions, MasterOptions, TlsOptions
from tanghulu.runtime.metrics_server import MetricsAuthorizer, MetricsServer
from tanghulu.runtime.stalls import LoopWatch
from tanghulu.runtime.tasks import beside, cancelled
from tanghulu.runtime.telemetry import LOG_LEVELS, configure_log, new_registry
from tanghulu.types import Address, InstanceId, Place, Role, is_loopback

_log = structlog.get_logger(__name__)
T = TypeVar("T")
#: Directories of processes for their sockets, and the file in each that its process keeps locked.
_RUN_DIR, _LOCK = "tanghulu-", ".tanghulu.lock"
#: Offset of a process's metrics port from its port.
METRICS_OFFSET = 100
#: An unassigned address (RFC 5737).
_ELSEWHERE = "192.0.2.1"


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """The options of every process."""

    host: str = option("127.0.0.1", "address to listen on")
    advertise_host: str = option("", "address at which others reach this process; default: --host")
    metrics_port: int = option(-1, "port of GET /metrics; 0 picks one", least=-1, shown="--port + 100")
    tokens: Path | None = option(None, "require one of the tokens in this file")
    place: Place = option(Place.here(), "location of this process: zone/rack/host", shown="local/local/HOSTNAME")
    namespace: str = option("default", "instances see each other within one namespace")
    run_dir: Path | None = option(None, "directory of Unix sockets; default: a private temporary one")
    log_level: str = option("info", "lowest level to log", choices=LOG_LEVELS)
    status_fd: int = option(-1, "file descriptor of the supervisor's status stream", least=-1, hidden=True)

    @property
    def lets_everybody_in(self) -> bool:
        """Whether callers need neither a token nor a certificate."""
        return self.tokens is None and not getattr(self, "tls_mutual", False)

    @property
    def reachable_host(self) -> str:
        """Return the host to publish; if the process listens on a wildcard, this machine's own address."""
        if self.advertise_host:
            return self.advertise_host
        return own_address() if self.host in ("", "0.0.0.0", "::") else self.host


def own_address() -> str:
    """Return this machine's own address as others see it; raises ConfigError.

    The address of the machine's name, unless that is a loopback address, as Debian writes it into /etc/hosts: then
    the source address of outgoing packets. A machine without a route has the loopback alone.
    """
    named = ""
    with contextlib.suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
    if named and not is_loopback(named):
        return named
    found = _address_to_elsewhere() or named
    if not found:
        raise ConfigError(
            "this machine's name has no address and there is no route to other machines: set --advertise-host"
        )
    return found


def _address_to_elsewhere() -> str:
    """Return the source address for this machine's default route; "" without one. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ELSEWHERE, 9))
        except OSError:
            return ""
        address: str = probe.getsockname()[0]
        return address


class SupervisorLine:
    """The line to the supervisor; silent without one."""

    def __init__(self, fd: int, on_orphaned: Callable[[], None]) -> None:
        self._socket = socket.socket(fileno=fd) if fd >= 0 else None
        self._on_orphaned = on_orphaned
        self._loop: asyncio.AbstractEventLoop | None = None
        self.orphaned = False

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Detect the supervisor's death."""
        if self._socket is not None:
            self._socket.setblocking(False)
            loop.add_reader(self._socket.fileno(), self._read)
            self._loop = loop

    def _read(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError, ConnectionError):
            if self._socket.recv(4096):
                return
        self._unwatch()
        self.orphaned = True
        self._on_orphaned()

    def send(self, event: str, **values: Any) -> None:
        """Send ``event`` to the supervisor; its absence is not an error here."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.send(json.dumps({"event": event, **values}).encode() + b"\n")

    def close(self) -> None:
        """Close the line."""
        if self._socket is not None:
            self._unwatch()
            self._socket.close()

    def _unwatch(self) -> None:
        """Stop watching first: libuv aborts the process when it starts to watch a descriptor closed meanwhile."""
        if self._loop is not None and self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """Yield a private directory for sockets, removed after the block; those of killed processes are removed before."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_RUN_DIR}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # another user's, or locked: its process lives
            if lock.parent.lstat().st_uid == os.geteuid():
                with lock.open("r+") as held:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(lock.parent, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=_RUN_DIR))
    try:
        with (path / f"{_LOCK}.new").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            os.rename(path / f"{_LOCK}.new", path / _LOCK)  # invisible until it is locked
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def make_private(run_dir: Path) -> None:
    """Create the directory unless it exists; raises ConfigError if other users could replace its sockets."""
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = run_dir.lstat()
    except OSError as error:
        raise ConfigError(f"--run-dir {run_dir} cannot be made: {error.strerror}; choose another") from None
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"--run-dir {run_dir} is not a directory; choose another")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"--run-dir {run_dir} belongs to user {found.st_uid}, this process is user {os.geteuid()}: choose a "
            "directory owned by this user, or one that does not exist yet"
        )
    if found.st_mode & 0o077:
        raise ConfigError(
            f"--run-dir {run_dir} has mode {stat.S_IMODE(found.st_mode):04o}, so others reach its sockets: "
            f"chmod 700 {run_dir}, or choose one that does not exist yet"
        )


def _leave_nothing(run_dir: Path) -> None:
    """Remove the directory of a child whose supervisor died; the last child also removes the supervisor's."""
    shutil.rmtree(run_dir, ignore_errors=True)
    with contextlib.suppress(OSError):
        if [each.name for each in run_dir.parent.iterdir()] == [_LOCK]:
            shutil.rmtree(run_dir.parent)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end a process in order. SIGHUP, sent by a closed terminal, is left out under nohup."""
    always = (signal.SIGTERM, signal.SIGINT)
    return always if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*always, signal.SIGHUP)


class StoppedEarly(Exception):
    """The process was stopped before it served: an orderly end."""


@dataclass(eq=False)
class Process:
    """The running process, as seen by its ``serve``."""

    role: Role
    config: ProcessConfig
    run_dir: Path
    status: SupervisorLine
    registry: CollectorRegistry
    metrics_address: str
    generation: int
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    #: Returns whether somebody waits for this process, once it serves; see ``garbage``.
    serving: asyncio.Future[Callable[[], bool]] = field(default_factory=asyncio.Future)

    def instance_id(self, port: int) -> InstanceId:
        """Return a readable id of this process, never reused: ``node-7410-9f3c21``."""
        return InstanceId(f"{self.role.value}-{port}-{self.generation & 0xFFFFFF:06x}")

    async def unless_stopping(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``; if the process is stopped before, cancel ``work`` and raise StoppedEarly."""
        stopping = asyncio.create_task(self.stopping.wait())
        working = asyncio.create_task(work)
        try:
            await asyncio.wait({stopping, working}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise StoppedEarly
            return working.result()
        finally:
            await cancelled(stopping, working)

    def progress(self, what: str, fraction: float) -> None:
        """Report the progress of a long start (0..1) to the supervisor."""
        self.status.send("loading", what=what, fraction=round(fraction, 3))

    def alive(self) -> None:
        """Report to the supervisor that the process works; after the first report it must continue to do so."""
        self.status.send("alive")

    def ready(self, instance_id: str, address: Address, busy: Callable[[], bool] | None = None) -> None:
        """Report to the supervisor that the process serves; called once.

        ``busy`` returns whether somebody waits now, for processes with a better measure than their CPU time.
        """
        self.serving.set_result(busy or garbage.CpuUse().busy)
        self.status.send("ready", name=instance_id, address=str(address), metrics_address=self.metrics_address)
        _log.info("process.ready", instance=instance_id, address=str(address), metrics=self.metrics_address)


P = TypeVar("P", bound=ProcessConfig)
Serve = Callable[[Process, P], Awaitable[None]]


@functools.cache
def host_id() -> str:
    """Return the kernel's boot and its IPC namespace: equal for processes that can share memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/ipc').st_ino}"


def run(role: Role, config: P, serve: Serve[P]) -> None:
    """Run ``serve`` until SIGTERM, SIGINT or the supervisor's end; exits 1 with the message of a typed error."""
    configure_log(role.value, config.log_level)
    _log.info("process.starting", **describe(config))
    if config.lets_everybody_in and not is_loopback(config.host):
        _log.warning(
            "process.open_to_everybody",
            host=config.host,
            hint="anyone who can connect may use it: set keys, tokens or mutual TLS",
        )
    import uvloop

    gc.collect()  # garbage of the imports; from here on nothing visits it
    try:
        uvloop.run(_run(role, _with_credentials(config), serve))
    except TanghuluError as error:
        _log.error("process.failed", code=error.code, error=error.message)
        print(f"tanghulu {role.value}: {error.message}", file=sys.stderr)
        sys.exit(1)


def _with_credentials(config: P) -> P:
    """Join the credentials in ``config`` to its master's address, if it has one."""
    if not isinstance(config, MasterOptions):
        return config
    shown = dataclasses.replace(config, master=config.master.showing(config.credentials))
    return cast(P, shown)


def _metrics_server(
    registry: CollectorRegistry, config: ProcessConfig, authorizer: MetricsAuthorizer | None, tls: ServerTls | None
) -> MetricsServer:
    """Serve metrics at ``--metrics-port``; by default 100 above ``--port``, or anywhere if that is taken."""
    if config.metrics_port >= 0:
        return MetricsServer(registry, config.host, config.metrics_port, authorizer, tls)
    port: int = getattr(config, "port", 0)
    if port and port + METRICS_OFFSET <= MOST_PORT:
        with contextlib.suppress(ConfigError):
            return MetricsServer(registry, config.host, port + METRICS_OFFSET, authorizer, tls)
        _log.warning("process.metrics_port_taken", port=port + METRICS_OFFSET, hint="set --metrics-port")
    return MetricsServer(registry, config.host, 0, authorizer, tls)


async def _run(role: Role, config: P, serve: Serve[P]) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    status = SupervisorLine(config.status_fd, stopping.set)
    status.watch(loop)
    for number in stop_signals():
        loop.add_signal_handler(number, stopping.set)
    stack = contextlib.ExitStack()
    run_dir = config.run_dir or stack.enter_context(private_directory())
    make_private(run_dir)
    registry = new_registry()
    metrics = None
    try:
        tls = _metrics_tls(config)
        authorizer = _metrics_authorizer(config)
        metrics = _metrics_server(registry, config, authorizer, tls)
        generation = secrets.randbits(48)
        metrics_address = Address(config.reachable_host, metrics.port)
        if authorizer is not None:
            authorizer.answer_at(metrics_address)
        process = Process(role, config, run_dir, status, registry, str(metrics_address), generation, stopping)
        with LoopWatch(registry):
            async with beside(_collect_garbage(process), watch_descriptors()):
                await serve(process, config)
    except StoppedEarly:
        _log.info("process.stopped_early")
    except TanghuluError as error:
        status.send("failed", code=error.code, message=error.message)
        raise
    finally:
        if metrics is not None:
            metrics.close()
        stack.close()
        if status.orphaned:
            _leave_nothing(run_dir)
        status.close()
        _log.info("process.stopped")


def _metrics_authorizer(config: ProcessConfig) -> MetricsAuthorizer | None:
    """Return the authorizer of a process's metrics; None admits everybody who reaches the port."""
    keys = config.api_keys if isinstance(config, HttpOptions) else None
    if config.tokens is None and keys is None:
        return None
    own = config.credentials if isinstance(config, MasterOptions) else NOTHING_TO_SHOW
    tokens = None if config.tokens is None else TokensFile(config.tokens)
    return MetricsAuthorizer(tokens, None if keys is None else ApiKeysFile(keys), own)


def _metrics_tls(config: ProcessConfig) -> ServerTls | None:
    """Return the TLS context of the metrics port, for every process that has a certificate."""
    if not isinstance(config, TlsOptions) or not config.tls_cert:
        return None
    return ServerTls(config.tls, mutual=getattr(config, "tls_mutual", False), protocol=HTTP1)


async def _collect_garbage(process: Process) -> None:
    """Keep full collections out of the way once the process serves."""
    busy = await process.serving
    garbage.begin()
    await garbage.keep_collecting(busy)
