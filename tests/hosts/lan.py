"""Hosts on one bridge: each has its own network, mounts, host name, shared memory, processes, /tmp and /dev/shm.

A host is a process that waits for the end of its standard input, and with it go all processes of the host, also when
the tests are killed. The test itself calls from a further host, whose network its threads enter.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

_T = TypeVar("_T")
ROOT = Path(__file__).parents[2]
_NETWORK = "10.78.0"
_GATEWAY = 254
_CLONE_NEWNET = 0x40000000
#: Nobody has it: what is sent there is swallowed by the bridge, and nobody is told.
_NOBODY = "02:00:00:00:00:01"
_START_S = 30.0

#: $1: the host's name, $2: where its /tmp is built, the rest: directories below /tmp that stay in sight.
_HOST = """
set -e
hostname "$1"
ip link set lo up
mount -t tmpfs tmpfs /dev/shm
stage="$2"
mount -t tmpfs tmpfs "$stage"
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$1" > "$stage/.hosts"
mount --bind "$stage/.hosts" /etc/hosts
shift 2
for seen in "$@"; do
    mkdir -p "$stage/${seen#/tmp/}"
    mount --bind "$seen" "$stage/${seen#/tmp/}"
done
mount --move "$stage" /tmp
echo ready
exec cat
"""
_SWITCH = f"""
set -e
ip link set lo up
ip link add lan type bridge
ip address add {_NETWORK}.{_GATEWAY}/24 dev lan
ip link set lan up
echo ready
exec cat
"""


class _Isolated:
    """A process that keeps namespaces alive; its end is that of all processes in them."""

    def __init__(self, namespaces: tuple[str, ...], script: str, *words: str) -> None:
        shell = ("sh", "-c", script, "sh", *words)
        self.popen = subprocess.Popen(
            ("unshare", *namespaces, "--fork", "--kill-child", *shell), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.popen.stdout is not None
        assert self.popen.stderr is not None
        if self.popen.stdout.readline() != "ready\n":
            raise OSError(self.popen.stderr.read().strip())
        self.pid = child_of(self.popen.pid)

    def end(self) -> None:
        with self.popen as popen:
            popen.kill()


class Host:
    """One host; ``address`` is how the others reach it."""

    def __init__(self, name: str, number: int, switch: _Isolated, seen: tuple[str, ...]) -> None:
        self.name, self.address = name, f"{_NETWORK}.{number}"
        stage = tempfile.mkdtemp(prefix="th-stage-")
        try:
            everything = ("--mount", "--uts", "--ipc", "--net", "--pid", "--mount-proc")
            self._process = _Isolated(everything, _HOST, name, stage, *seen)
        finally:
            os.rmdir(stage)
        self.pid, port = self._process.pid, f"p{number}"
        run("ip", "link", "add", "eth0", "netns", str(self.pid), "type", "veth",
            "peer", "name", port, "netns", str(switch.pid))  # fmt: skip
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")
        at_switch = ("nsenter", f"--net=/proc/{switch.pid}/ns/net", "ip", "link", "set", port)
        run(*at_switch, "master", "lan")
        run(*at_switch, "up")
        self.run("ip", "route", "add", "default", "via", f"{_NETWORK}.{_GATEWAY}")

    def __repr__(self) -> str:
        return f"<host {self.name} {self.address}>"

    @property
    def inside(self) -> tuple[str, ...]:
        """The beginning of a command that runs on this host, as this process's child's child."""
        return ("nsenter", "--target", str(self.pid), "--mount", "--uts", "--ipc", "--net", "--pid")

    def run(self, *words: str, timeout_s: float = 120.0) -> str:
        """Run a command here; returns what it printed."""
        return run(*self.inside, *words, timeout_s=timeout_s)

    def tanghulu(self, *words: str, timeout_s: float = 120.0) -> str:
        return self.run(sys.executable, "-m", "tanghulu", *words, timeout_s=timeout_s)

    def swallow(self, other: Host) -> None:
        """From now on nothing that is sent from here to ``other`` arrives, and nobody is told."""
        self.run("ip", "neigh", "replace", other.address, "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent")

    def heal(self, other: Host) -> None:
        self.run("ip", "neigh", "del", other.address, "dev", "eth0")

    def end(self) -> None:
        self._process.end()


class Lan:
    """The bridge and its hosts by name; a context manager. Calls of the test come from a host of its own."""

    def __init__(self, *names: str, seen: tuple[Path, ...] = ()) -> None:
        """``seen``: directories that all hosts share with this one although they lie below its /tmp."""
        self._names = names
        needed = (ROOT, Path(sys.prefix), Path(sys.base_prefix), *seen)
        self._seen = tuple(str(each) for each in dict.fromkeys(needed) if Path("/tmp") in each.parents)
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._switch = _Isolated(("--net",), _SWITCH)
            stack.callback(self._switch.end)
            self.hosts: dict[str, Host] = {}
            for number, name in enumerate(self._names, 1):
                self.hosts[name] = Host(name, number, self._switch, self._seen)
                stack.callback(self.hosts[name].end)
            self._ends = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.close()

    def part(self, one: str, other: str) -> None:
        """Swallow all that two hosts send each other."""
        self.hosts[one].swallow(self.hosts[other])
        self.hosts[other].swallow(self.hosts[one])

    def join(self, one: str, other: str) -> None:
        self.hosts[one].heal(self.hosts[other])
        self.hosts[other].heal(self.hosts[one])

    def call(self, function: Callable[[], _T]) -> _T:
        """Call ``function`` in a thread whose sockets are on the bridge, and so are those of the threads it starts."""
        with ThreadPoolExecutor(1, "on the bridge", self._enter) as thread:
            return thread.submit(function).result()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine whose sockets are on the bridge."""
        return self.call(functools.partial(asyncio.run, work))

    def _enter(self) -> None:
        """Have this thread, and no other, open its sockets on the bridge."""
        libc = ctypes.CDLL(None, use_errno=True)
        fd = os.open(f"/proc/{self._switch.pid}/ns/net", os.O_RDONLY)
        try:
            if libc.setns(fd, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(fd)


def run(*words: str, timeout_s: float = 20.0) -> str:
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{' '.join(words)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def child_of(pid: int) -> int:
    """The one child of ``pid``; 0 if there is none."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else 0
    return 0


def missing() -> str:
    """Why there can be no hosts here, or nothing."""
    if os.geteuid() != 0 or not all(shutil.which(each) for each in ("ip", "unshare", "nsenter")):
        return "needs root, ip, unshare and nsenter (apt-get install iproute2 util-linux)"
    try:
        with Lan("probe"):
            return ""
    except (OSError, AssertionError) as error:
        return f"needs namespaces, veth and a bridge: {error}"
