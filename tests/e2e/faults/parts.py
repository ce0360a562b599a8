"""One process of a cluster under test: started, signalled, held, hung, and started again where it was."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.e2e.faults.network import BreakablePath
from tests.free_ports import free_port

START_DEADLINE_S = 240.0
END_DEADLINE_S = 60.0
#: Workers listen at the first and are known to others under the second, where the path to them begins.
OWN_HOST, KNOWN_HOST = "127.0.0.1", "127.0.0.2"
FAULTS = ("SIGKILL", "SIGTERM", "SIGSTOP", "hung engine", "cut", "black hole")


class Part:
    """One process, by its command and flags; it keeps its port and its log over restarts."""

    def __init__(self, folder: Path, name: str, command: str, *flags: str, port: int = 0) -> None:
        self.name, self.command, self.port = name, command, port or free_port()
        self.flags = ["--port", str(self.port), *flags]
        self.log_path = folder / f"{name}.log"
        self.run_dir = Path(tempfile.mkdtemp(prefix="th-"))
        self.id = self._metrics_port = ""
        self.num_starts = 0
        self.popen: subprocess.Popen[bytes] | None = None
        self._tracer: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<{self.name} {self.id}>"

    @property
    def program(self) -> list[str]:
        return [sys.executable, "-m", "tanghulu"]

    @property
    def known_host(self) -> str:
        """Where tests reach it."""
        return OWN_HOST

    @property
    def address(self) -> str:
        return f"{self.known_host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self.known_host}:{self._metrics_port}/metrics"

    @property
    def pid(self) -> int:
        assert self.popen is not None
        return self.popen.pid

    @property
    def alive(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def log(self) -> str:
        return f"== {self.name}\n{self.log_path.read_text(errors='replace')[-4000:]}"

    # --- start and end

    def spawn(self) -> None:
        """Start the process; it is not ready yet."""
        assert not self.alive, f"{self} runs already"
        self.num_starts += 1
        self._status, theirs = socket.socketpair()
        self._status.settimeout(START_DEADLINE_S)
        fd = theirs.fileno()
        command = [*self.program, *self.command.split(), *self.flags]
        command += ["--run-dir", str(self.run_dir), "--status-fd", str(fd)]
        with self.log_path.open("ab") as log:
            self.popen = subprocess.Popen(command, pass_fds=[fd], stdout=log, stderr=log)
        theirs.close()

    def wait_ready(self) -> None:
        """Wait until the process says that it serves."""
        with self._status.makefile() as lines:
            for line in lines:
                message = json.loads(line)
                if message["event"] == "ready":
                    self.id, self._metrics_port = message["name"], message["metrics_address"].rpartition(":")[2]
                    return
        raise AssertionError(f"{self.name} did not start\n{self.log()}")

    def start(self) -> None:
        self.spawn()
        self.wait_ready()

    def wait_ended(self, deadline_s: float = END_DEADLINE_S) -> int:
        """Wait for the end of a process that was told to; returns its exit code."""
        assert self.popen is not None
        code = self.popen.wait(deadline_s)
        self._status.close()
        return code

    def end(self) -> None:
        """SIGTERM to whatever is left, SIGKILL to what does not go; takes its run directory along."""
        self.let_go()
        if self.popen is not None and self.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.go_on()
                self.terminate()
            try:
                self.popen.wait(END_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.kill()
                self.popen.wait()
                raise AssertionError(f"{self} did not end\n{self.log()}") from None
            finally:
                self._status.close()
        shutil.rmtree(self.run_dir, ignore_errors=True)

    # --- faults

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def stop(self) -> None:
        """SIGSTOP."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def hang(self) -> None:
        """Stop the engine's thread alone, as a call to a GPU does that never returns: a tracer holds it."""
        if self._tracer is not None:  # that it does already
            return
        tasks = Path(f"/proc/{self.pid}/task")
        engine = next(task.name for task in tasks.iterdir() if (task / "comm").read_text().strip() == "engine")
        self._tracer = subprocess.Popen([sys.executable, "-c", _HOLD, engine], stdout=subprocess.PIPE)
        assert self._tracer.stdout is not None
        assert self._tracer.stdout.readline() == b"held\n", "ptrace is not allowed here"

    def let_go(self) -> None:
        """End the tracer of `hang`, if there is one; the engine goes on."""
        if self._tracer is not None:
            assert self._tracer.stdout is not None
            self._tracer.kill()
            self._tracer.wait()
            self._tracer.stdout.close()
            self._tracer = None

    def _signal(self, number: int) -> None:
        os.kill(self.pid, number)


class Worker(Part):
    """A worker behind a path that can be broken; ``hold`` stops a mock engine before a step (docs/workers.md)."""

    def __init__(self, folder: Path, name: str, role: str, *flags: str) -> None:
        self.holds = folder / f"{name}.hold"
        self.holds.mkdir()
        away = ("--host", OWN_HOST, "--advertise-host", KNOWN_HOST)
        held = ("--debug", f"mock_hold={self.holds}") if "mock" in flags else ()
        super().__init__(folder, name, role, *away, *held, *flags)
        self.role = role
        self.path = BreakablePath((KNOWN_HOST, self.port), (OWN_HOST, self.port))

    def hold(self, moment: str) -> None:
        (self.holds / moment).touch()

    def is_held(self, moment: str) -> bool:
        return (self.holds / f"{moment}.held").exists()

    def release(self) -> None:
        """Let the engine go on, whatever holds it or was to hold it."""
        for file in self.holds.iterdir():
            file.unlink(missing_ok=True)

    def suffer(self, fault: str) -> None:
        """Break in one of the ``FAULTS``; whatever else held back its path is over."""
        match fault:
            case "SIGKILL":
                self.kill()
            case "SIGTERM":
                self.terminate()
            case "SIGSTOP":
                self.stop()
            case "hung engine":
                self.hang()
            case "cut":
                self.path.cut()
            case "black hole":
                self.path.black_hole()
        if fault != "black hole":
            self.path.heal()

    def recover(self, fault: str) -> None:
        """Be right again behind ``fault``, by a new process where the old one ended or hangs."""
        self.path.heal()
        if fault == "SIGSTOP":
            self.go_on()
        if fault == "hung engine":
            self.kill()
        self.let_go()
        if fault in ("SIGKILL", "SIGTERM", "hung engine"):
            code = self.wait_ended()
            assert fault != "SIGTERM" or code == 0, self.log()
            self.start()

    def end(self) -> None:
        self.release()
        super().end()
        self.path.close()


class Together:
    """Parts that are started side by side and ended in order; a context manager."""

    def __init__(self, *parts: Part) -> None:
        self.parts = parts

    def __enter__(self) -> Self:
        try:
            for part in self.parts:
                part.spawn()
            for part in self.parts:
                part.wait_ready()
        except BaseException:  # an interrupt, too: processes would stay behind; raised on
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        with contextlib.ExitStack() as stack:
            for part in self.parts:  # the last one ends first
                stack.callback(part.end)


_HOLD = """
import ctypes, os, sys
libc, thread = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])
assert libc.ptrace(16, thread, 0, 0) == 0, os.strerror(ctypes.get_errno())
os.waitpid(thread, 0x40000000)
print("held", flush=True)
os.waitpid(thread, 0x40000000)  # that it is killed: before its tracer knows, its process does not end
"""
