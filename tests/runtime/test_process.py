"""The address under which a process says that others reach it."""

from __future__ import annotations

import socket

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
