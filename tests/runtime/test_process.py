"""The address under which a process says that others reach it, and its line to its supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tanghulu.errors import ConfigError, Overloaded
from tanghulu.runtime import limits, process
from tanghulu.runtime.process import ProcessConfig, own_address
from tanghulu.runtime.tasks import beside
from tanghulu.runtime.telemetry import RareLog
from tests.free_ports import free_port


def _machine(monkeypatch: pytest.MonkeyPatch, named: str, elsewhere: str) -> None:
    def by_name(name: str) -> str:
        if not named:
            raise OSError("no address")
        return named

    monkeypatch.setattr(socket, "gethostbyname", by_name)
    monkeypatch.setattr(process, "_address_to_elsewhere", lambda: elsewhere)


@pytest.mark.parametrize(
    ("named", "elsewhere", "found"),
    [
        ("10.0.0.5", "192.168.0.5", "10.0.0.5"),
        ("127.0.1.1", "192.168.0.5", "192.168.0.5"),  # as Debian writes it into /etc/hosts
        ("", "192.168.0.5", "192.168.0.5"),
        ("127.0.1.1", "", "127.0.1.1"),
    ],
)
def test_others_are_told_an_address_that_they_can_reach(
    monkeypatch: pytest.MonkeyPatch, named: str, elsewhere: str, found: str
) -> None:
    _machine(monkeypatch, named, elsewhere)
    assert own_address() == ProcessConfig(host="0.0.0.0").reachable_host == found


def test_a_machine_without_any_address_has_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, "", "")
    with pytest.raises(ConfigError, match="--advertise-host"):
        own_address()


def test_the_way_to_elsewhere_sends_nothing_and_is_no_loopback() -> None:
    assert not process._address_to_elsewhere().startswith("127.")


#: Ends before its event loop has looked at anything, as a process does that refuses its configuration.
_SHORT = """
import asyncio, sys
import uvloop
from tanghulu.runtime.process import SupervisorLine

async def main():
    line = SupervisorLine(int(sys.argv[1]), lambda: None)
    line.watch(asyncio.get_running_loop())
    line.send("failed")
    line.close()

uvloop.run(main())
print("the end")
"""


def test_a_process_that_fails_at_once_ends_in_order_under_its_supervisor() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", _SHORT, str(theirs.fileno())]
        done = subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (0, "the end\n"), done
        assert ours.recv(100) == b'{"event": "failed"}\n'


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_a_process_ends_in_order_and_ignores_signals_that_ask_for_nothing(ending: signal.Signals) -> None:
    def not_under_nohup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    command = [sys.executable, "-m", "tanghulu", "master", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=not_under_nohup) as running:
        assert running.stderr is not None
        while "process.ready" not in running.stderr.readline():
            assert running.poll() is None
        for number in (signal.SIGUSR1, signal.SIGUSR2, ending):
            running.send_signal(number)
        assert "process.stopped" in running.stderr.read()
    assert running.returncode == 0


@pytest.mark.parametrize("is_taken", [False, True])
def test_an_open_process_says_so_and_serves_metrics_100_above_its_port(is_taken: bool) -> None:
    port = free_port()
    with contextlib.ExitStack() as stack:
        if is_taken:
            stack.enter_context(socket.create_server(("0.0.0.0", port + 100)))
        command = [sys.executable, "-m", "tanghulu", "master", "--host", "0.0.0.0", "--port", str(port)]
        running = stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        stack.callback(running.terminate)
        assert running.stderr is not None
        lines = [running.stderr.readline()]
        while "process.ready" not in lines[-1]:
            assert running.poll() is None, lines
            lines.append(running.stderr.readline())
        assert any("process.open_to_everybody" in line for line in lines)
        assert any("process.metrics_port_taken" in line for line in lines) is is_taken
        assert (f":{port + 100}" in lines[-1]) is not is_taken


def test_a_process_under_nohup_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)
    assert signal.SIGHUP not in process.stop_signals()


@pytest.mark.parametrize("limit", [16, 24, 40])
def test_with_too_few_descriptors_a_start_is_refused_in_a_sentence(limit: int) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    command = [sys.executable, "-m", "tanghulu", "node", "--port", "0", "--memory", "1MiB"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=few)
    assert (done.returncode, done.stderr.count("\n")) == (7, 1)
    assert f"this process may open {limit} files and needs at least 64" in done.stderr


async def test_the_last_descriptors_refuse_connections_and_say_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (128, 128))
    monkeypatch.setattr(limits, "_rare_log", RareLog(limits._log))
    with capture_logs() as logs:
        limits.refuse_last_descriptors(119)
        for number in (120, 127):
            with pytest.raises(Overloaded, match="has none left for a connection"):
                limits.refuse_last_descriptors(number)
    assert [line["event"] for line in logs] == ["process.out_of_descriptors"]


async def test_a_process_that_can_open_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_rare_log", RareLog(limits._log))
    with capture_logs() as logs:
        async with beside(limits.watch_descriptors()):
            await asyncio.sleep(0)
            assert logs == []

        def nothing(*_: object) -> int:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(os, "open", nothing)
        async with beside(limits.watch_descriptors()):
            await asyncio.sleep(0)
    assert [line["event"] for line in logs] == ["process.out_of_descriptors"]


def test_the_directory_of_a_killed_process_goes_with_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    command = [sys.executable, "-m", "tanghulu", "master", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as killed:
        assert killed.stderr is not None
        while "process.ready" not in killed.stderr.readline():
            assert killed.poll() is None
        [left] = tmp_path.glob("tanghulu-*")
        with process.private_directory() as own:
            assert sorted(tmp_path.glob("tanghulu-*")) == sorted((left, own)), "one that runs keeps its own"
        killed.kill()
    assert [*tmp_path.glob("tanghulu-*")] == [left]
    with process.private_directory() as own:
        assert [*tmp_path.glob("tanghulu-*")] == [own]
    assert not [*tmp_path.glob("tanghulu-*")]
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_a_run_directory_is_this_user_s_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = tmp_path / "new" / "run"
    process.make_private(new)
    assert new.stat().st_mode & 0o777 == 0o700
    process.make_private(new)
    new.chmod(0o755)
    with pytest.raises(ConfigError, match=f"has mode 0755.*chmod 700 {new}"):
        process.make_private(new)
    (tmp_path / "link").symlink_to(new)
    with pytest.raises(ConfigError, match="is not a directory"):
        process.make_private(tmp_path / "link")
    new.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=r"belongs to user \d+"):
        process.make_private(new)
