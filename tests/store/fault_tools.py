"""What the tests of real faults share: values that name their key, calls that must end in time, stopped processes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tanghulu.errors import TanghuluError
from tanghulu.store.client import Client

MIB = 1 << 20
DEADLINE_S = 2.0
#: What a call may take beyond its deadline on a machine that does other things too.
SLACK_S = 5.0


def value(key: str, size: int = MIB) -> bytes:
    """What stands under ``key``, and under no other."""
    return random.Random(key).randbytes(4096) * (size // 4096)


def timed(call: Callable[[], object], deadline_s: float = DEADLINE_S) -> object:
    """The result or the typed error of ``call``, which must end by its deadline."""
    started = time.monotonic()
    try:
        result = call()
    except TanghuluError as error:
        result = error
    assert time.monotonic() - started < deadline_s + SLACK_S, result
    return result


def read(client: Client, key: str, size: int = MIB) -> TanghuluError | None:
    """Get ``key``: the right bytes, or a typed error by the deadline."""

    def get() -> None:
        with client.get(key, deadline_s=DEADLINE_S) as chunk:
            assert bytes(chunk) == value(key, size), f"wrong bytes of {key}"

    outcome = timed(get)
    assert outcome is None or isinstance(outcome, TanghuluError)
    return outcome


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def child(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A client in a process of its own; it says what it does line by line, and is killed at the end."""
    source = "import os, random, sys, time\nimport tanghulu\nMIB = 1 << 20\n" + code
    command = [sys.executable, "-c", source, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


@dataclass
class Background:
    """Calls ``step`` again and again in a thread until the block ends; remembers what it raised and its longest gap."""

    step: Callable[[], object]
    passing: tuple[type[TanghuluError], ...] = ()
    num_done: int = 0
    longest_s: float = 0.0
    errors: list[Exception] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)

    def __enter__(self) -> Background:
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            started = time.monotonic()
            try:
                self.step()
                self.num_done += 1
            except self.passing as error:
                self.passed_over.append(error.code)
            except Exception as error:  # noqa: BLE001 - whatever it is, the test is to see it
                self.errors.append(error)
                return
            self.longest_s = max(self.longest_s, time.monotonic() - started)
