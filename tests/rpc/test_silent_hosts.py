"""Hosts that answer nothing: how a caller finds out, and that it is told apart from a process that is gone."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from tanghulu.errors import NodeUnavailable, PeerSilent
from tanghulu.rpc import dialling, sockets
from tanghulu.rpc.fast_client import FastConnection
from tanghulu.types import Address
from tests.free_ports import free_port


@contextlib.contextmanager
def out_of_reach() -> Iterator[Address]:
    """An address whose kernel answers no more connections: the backlog is full."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(listener.getsockname())
        yield Address(*listener.getsockname())


def test_a_host_that_lets_nobody_in_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling, "REACH_S", 0.05)
    with out_of_reach() as address, pytest.raises(PeerSilent):
        FastConnection(address)


def test_a_host_that_refuses_is_not() -> None:
    with pytest.raises(NodeUnavailable) as raised:
        FastConnection(Address("127.0.0.1", free_port()))
    assert not isinstance(raised.value, PeerSilent)


def test_who_had_no_time_learns_nothing_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with out_of_reach() as address, pytest.raises(NodeUnavailable) as raised:
        FastConnection(address, timeout_s=0.05)
    assert not isinstance(raised.value, PeerSilent)


def test_the_kernel_is_asked_to_look_and_its_word_is_found_without_a_call() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = FastConnection(Address(*server.getsockname()), dead_s=sockets.SILENT_HOST_S)
        own, peer = connection._socket, server.accept()[0]
        assert isinstance(own, socket.socket)
        assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == sockets.SILENT_HOST_S * 1000
        assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection.failure() is None
        peer.close()
        reason = connection.failure()
        while reason is None:  # the end travels through the kernel
            reason = connection.failure()
        assert isinstance(reason, NodeUnavailable)
        assert not isinstance(reason, PeerSilent), "the process hung up; its host is well"
        assert connection.closed


def test_a_kernel_that_asked_in_vain_means_silence() -> None:
    assert dialling.is_silence(TimeoutError(110, "Connection timed out"))
    assert dialling.is_silence(OSError(113, "No route to host"))
    assert not dialling.is_silence(ConnectionResetError(104, "reset"))
