"""Queue pairs that connect in a thread: who is told, and who closes what nobody wants any more."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from tanghulu.errors import NodeUnavailable
from tanghulu.transfer_engine.transports.rdma.devices import LocalDevices
from tanghulu.transfer_engine.transports.rdma.mover import SetUp
from tanghulu.transfer_engine.transports.rdma.wire import QueuePairAddress

NO_ADDRESS = QueuePairAddress("::", 0, 0, 0, 0)


class SlowPair:
    """One whose kernel looks for the peer until it is told what it found."""

    def __init__(self) -> None:
        self.found = threading.Event()
        self.closed = threading.Event()
        self.reachable = True

    def connect(self, peer: Any) -> None:
        self.found.wait()
        if not self.reachable:
            raise NodeUnavailable("no route")

    def close(self) -> None:
        assert not self.closed.is_set(), "closed twice"
        self.closed.set()


class Devices(LocalDevices):
    """Counts its users, and tells when the last but the engine has gone."""

    def __init__(self) -> None:
        super().__init__([])
        self.left = threading.Event()

    def let_go(self) -> None:
        super().let_go()
        self.left.set()


@pytest.fixture
def pair() -> SlowPair:
    return SlowPair()


@pytest.fixture
def devices() -> Devices:
    return Devices()


@pytest.fixture
def woken() -> threading.Event:
    return threading.Event()


@pytest.fixture
def set_up(pair: SlowPair, devices: Devices, woken: threading.Event) -> SetUp:
    return SetUp(cast(Any, pair), NO_ADDRESS, devices, woken.set)


def test_it_tells_when_it_is_done(set_up: SetUp, pair: SlowPair, devices: Devices, woken: threading.Event):
    assert not set_up.done
    pair.found.set()
    assert woken.wait(30)
    assert set_up.done
    assert set_up.error is None
    assert devices.left.wait(30)
    assert not pair.closed.is_set()


def test_it_tells_why_it_failed(set_up: SetUp, pair: SlowPair, woken: threading.Event):
    pair.reachable = False
    pair.found.set()
    assert woken.wait(30)
    assert isinstance(set_up.error, NodeUnavailable)
    set_up.abandon()
    assert pair.closed.is_set()


@pytest.mark.parametrize("reachable", [True, False])
def test_what_is_abandoned_closes_itself_and_tells_nobody(
    set_up: SetUp, pair: SlowPair, devices: Devices, woken: threading.Event, reachable: bool
):
    pair.reachable = reachable
    set_up.abandon()
    assert not pair.closed.is_set()  # its thread is still inside
    pair.found.set()
    assert devices.left.wait(30)  # not before the pair is closed
    assert pair.closed.is_set()
    assert not woken.is_set()
