"""QueuePair and Device over a stand-in of the library with its structures: what they ask, what errors become."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from tanghulu.errors import NodeUnavailable, TransferFailed
from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.transfer_engine.transports.rdma import abi
from tanghulu.transfer_engine.transports.rdma import verbs as rdma_verbs
from tanghulu.transfer_engine.transports.rdma.verbs import Device, DeviceInfo, QueuePair, WorkCompletion, WorkRequest
from tanghulu.transfer_engine.transports.rdma.wire import QueuePairAddress

INFO = DeviceInfo("fake0", "::ffff:10.0.0.1", 1, 0, 5)
PEER = QueuePairAddress("::ffff:10.0.0.2", 3, 77, 88, 4)
WORKS = [WorkRequest(n, Opcode.WRITE, 4096 * n, 1, 8192 * n, 2, 10) for n in (1, 2, 3)]


class FakeVerbs:
    """The library's functions that a device and a queue pair use; ``failing`` names those that refuse."""

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.log: list[str] = []
        self.states: list[tuple[int, int]] = []  # (state, mask) of every modify
        self.attributes = abi.Attributes()
        self.chains: list[list[int]] = []  # ids
        self.done: list[tuple[int, int]] = []  # (id, status) that poll tells
        self.broken = 0
        self._functions = abi.POLL(self._poll), abi.NOTIFY(self._notify), abi.POST(self._post)
        poll, notify, post = (ctypes.cast(each, ctypes.c_void_p).value for each in self._functions)
        operations = abi._Operations(poll_cq=poll, req_notify_cq=notify, post_send=post)
        self.context = ctypes.pointer(abi.VerbsContext(ops=operations))
        self._channel = abi.CompletionChannel(fd=os.eventfd(0))
        self._pair = abi.Pair(qp_num=0x1000007)
        self._regions: list[abi.Region] = []

    def __getattr__(self, name: str) -> Any:
        """Functions that only end something."""
        if not name.startswith("ibv_de") and name not in ("ibv_close_device", "ibv_ack_cq_events"):
            raise AttributeError(name)
        return lambda *_: self.log.append(name.removeprefix("ibv_"))

    def _make(self, name: str, thing: Any) -> Any:
        if name in self.failing:
            ctypes.set_errno(errno.ENOMEM)
            return None
        return thing

    def ibv_alloc_pd(self, context: Any) -> Any:
        return self._make("pd", 5)

    def ibv_reg_mr(self, domain: int, address: int, size_bytes: int, access: int) -> Any:
        self._regions.append(abi.Region(lkey=access, rkey=9))
        return self._make("mr", ctypes.pointer(self._regions[-1]))

    def ibv_create_comp_channel(self, context: Any) -> Any:
        return self._make("channel", ctypes.pointer(self._channel))

    def ibv_create_cq(self, *_: Any) -> Any:
        return self._make("cq", 6)

    def ibv_create_qp(self, *_: Any) -> Any:
        return self._make("qp", ctypes.pointer(self._pair))

    def ibv_modify_qp(self, pair: Any, attributes: Any, mask: int) -> int:
        self.attributes = abi.Attributes.from_buffer_copy(attributes._obj)
        self.states.append((self.attributes.qp_state, mask))
        return errno.EHOSTUNREACH if f"state {self.attributes.qp_state}" in self.failing else 0

    def ibv_get_cq_event(self, *_: Any) -> int:
        os.eventfd_read(self._channel.fd)
        return 0

    def wake(self) -> None:
        os.eventfd_write(self._channel.fd, 1)

    def _poll(self, queue: int, num: int, memory: int) -> int:
        if self.broken:
            return -1
        taken, self.done = self.done[:num], self.done[num:]
        data = b"".join(struct.pack("<Qi", *each) + bytes(36) for each in taken)
        ctypes.memmove(memory, data, len(data))
        return len(taken)

    def _notify(self, queue: int, solicited: int) -> int:
        self.log.append("notify")
        return 0

    def _post(self, pair: int, chain: int, rejected: int) -> int:
        if "post" in self.failing:
            return errno.ENOMEM
        ids = []
        while chain:
            work_id, chain = struct.unpack("<QQ", ctypes.string_at(chain, 16))
            ids.append(work_id)
        self.chains.append(ids)
        return 0


@pytest.fixture
def verbs() -> Iterator[FakeVerbs]:
    verbs = FakeVerbs()
    yield verbs
    os.close(verbs._channel.fd)


@pytest.fixture
def pair(verbs: FakeVerbs) -> QueuePair:
    return QueuePair(verbs, INFO, verbs.context, 5, 4)


def test_a_pair_connects(pair: QueuePair, verbs: FakeVerbs):
    assert pair.address == QueuePairAddress(INFO.gid, 0, 0x1000007, 7, 5)
    pair.connect(PEER)
    assert verbs.states == [(1, abi.INIT_MASK), (2, abi.RTR_MASK), (3, abi.RTS_MASK)]
    asked = verbs.attributes
    assert (asked.dest_qp_num, asked.rq_psn, asked.sq_psn, asked.path_mtu) == (77, 88, 7, 4)
    assert (asked.timeout, asked.retry_cnt) == (rdma_verbs.ACK_TIMEOUT, rdma_verbs.RETRY_COUNT)
    handle = asked.ah_attr
    assert (handle.is_global, handle.dlid, handle.grh.sgid_index) == (1, 3, 1)
    assert bytes(handle.grh.dgid)[-4:] == bytes([10, 0, 0, 2])


def test_a_peer_that_cannot_be_reached(pair: QueuePair, verbs: FakeVerbs):
    verbs.failing.add("state 2")
    with pytest.raises(NodeUnavailable, match=r"fake0 cannot reach ::ffff:10.0.0.2: No route to host"):
        pair.connect(PEER)


def test_works_and_their_ends(pair: QueuePair, verbs: FakeVerbs):
    pair.post(WORKS, [False, True, True])
    pair.post(WORKS[:1], [True])
    assert verbs.chains == [[1, 2, 3], [1]]
    verbs.done = [(2, 0), (3, 12), (4, 5), (5, 5), (6, 5)]
    assert pair.poll() == [
        WorkCompletion(2, "", False), WorkCompletion(3, "RETRY_EXC_ERR", False),
        WorkCompletion(4, "WR_FLUSH_ERR", False), WorkCompletion(5, "WR_FLUSH_ERR", False),
    ]  # fmt: skip
    assert [each.work_id for each in pair.poll()] == [6]
    assert pair.poll() == []


def test_a_device_that_takes_nothing(pair: QueuePair, verbs: FakeVerbs):
    verbs.failing.add("post")
    with pytest.raises(TransferFailed, match="rejects work requests: Cannot allocate"):
        pair.post(WORKS, [True] * 3)
    verbs.broken = 1
    with pytest.raises(TransferFailed, match="broken"):
        pair.poll()


def test_it_is_armed_once_until_it_woke(pair: QueuePair, verbs: FakeVerbs):
    pair.arm()
    pair.arm()
    assert verbs.log == ["notify"]
    verbs.wake()
    pair.woken()
    pair.arm()
    assert verbs.log == ["notify", "ack_cq_events", "notify"]


def test_flush_waits_for_the_last_work(pair: QueuePair, verbs: FakeVerbs):
    verbs.done = [(1, 5), (2, 5), (3, 5)]
    assert pair.flush(3, 5.0)
    assert verbs.states == [(abi.QPS_ERR, abi.MASK_STATE)]
    verbs.done = [(4, 5)]
    assert not pair.flush(5, 0.01)


def test_it_is_closed_once_in_the_right_order(pair: QueuePair, verbs: FakeVerbs):
    pair.close()
    pair.close()
    assert verbs.states == [(abi.QPS_ERR, abi.MASK_STATE)]
    assert verbs.log == ["destroy_qp", "destroy_cq", "destroy_comp_channel"]


@pytest.mark.parametrize(
    ("failing", "destroyed"),
    [("channel", []), ("cq", ["destroy_comp_channel"]), ("qp", ["destroy_cq", "destroy_comp_channel"])],
)
def test_what_was_made_is_destroyed_when_the_rest_fails(verbs: FakeVerbs, failing: str, destroyed: list[str]):
    verbs.failing.add(failing)
    with pytest.raises(TransferFailed, match=r"fake0 cannot make a .*: Cannot allocate memory"):
        QueuePair(verbs, INFO, verbs.context, 5, 4)
    assert verbs.log == destroyed


@pytest.fixture
def device(verbs: FakeVerbs, monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(abi, "library", lambda: verbs)
    monkeypatch.setattr(rdma_verbs, "_open", lambda name: verbs.context)
    return Device(INFO)


def test_a_device_unpins_what_is_left(device: Device, verbs: FakeVerbs):
    first, second = device.register(4096, 10, remote=True), device.register(8192, 10, remote=False, writable=False)
    assert (first.local_key, second.local_key) == (7, 0)  # what the fake was asked to allow
    first.close()
    first.close()
    assert verbs.log == ["dereg_mr"]
    device.close()
    assert verbs.log == ["dereg_mr", "dereg_mr", "dealloc_pd", "close_device"]
    second.close()  # its device is gone, and so is the pin
    del first, second
    assert verbs.log.count("dereg_mr") == 2


def test_a_region_ends_with_its_last_user(device: Device, verbs: FakeVerbs):
    device.register(4096, 10, remote=True)
    assert verbs.log == ["dereg_mr"]


def test_a_device_that_refuses(device: Device, verbs: FakeVerbs):
    verbs.failing.add("mr")
    with pytest.raises(TransferFailed, match=r"fake0 cannot register 10 bytes .Cannot allocate memory"):
        device.register(4096, 10, remote=True)
    verbs.failing.add("pd")
    with pytest.raises(NodeUnavailable, match="protection domain"):
        Device(INFO)
    assert verbs.log == ["close_device"]


def test_a_machine_without_the_library(monkeypatch: pytest.MonkeyPatch):
    abi.library.cache_clear()
    monkeypatch.setattr(abi, "LIBRARY", "libibverbs.so.none")
    assert rdma_verbs.probe().devices == ()
    assert "libibverbs.so.none" in rdma_verbs.probe().reason
