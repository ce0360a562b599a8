"""The address under which a process says that others reach it, and its line to its supervisor."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tanghulu.errors import ConfigError
from tanghulu.runtime import process
from tanghulu.runtime.process import ProcessConfig, own_address


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
