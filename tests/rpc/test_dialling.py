"""A connection that cannot be used is closed before the error is raised."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tanghulu.auth.credentials import TlsFiles
from tanghulu.errors import ConfigError, NodeUnavailable, TanghuluError
from tanghulu.rpc import dialling
from tanghulu.types import Address


@pytest.mark.parametrize("fault", ["certificates", "peer"])
def test_nothing_stays_open_after_a_failure(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = TlsFiles(ca=str(tmp_path / "missing.pem"))
    expected: type[TanghuluError] = ConfigError
    if fault == "peer":

        def gone(*_: object) -> None:
            raise OSError("the peer has reset it")

        monkeypatch.setattr(dialling, "unpace_within_machine", gone)
        tls, expected = TlsFiles(), NodeUnavailable
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        host, port = server.getsockname()
        with pytest.raises(expected):
            dialling.dial(Address(host, port), None, tls=tls)
        accepted, _ = server.accept()
        with accepted:
            accepted.settimeout(10)
            assert accepted.recv(1) == b""
