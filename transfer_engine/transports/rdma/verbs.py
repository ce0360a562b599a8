"""Devices, memory regions and queue pairs of libibverbs, as far as this engine needs them.

Owns the translation: into the library's calls, and its errors into typed ones. The library is a system package (Debian:
libibverbs1 and ibverbs-providers), no dependency; it is loaded on the first use of rdma.

Settings of a queue pair, and their origin (docs/rdma.md has the measurements):

* ``timeout`` 14 and ``retry_cnt`` 3: a packet without acknowledgement is an error after 4.096 us * 2^14 * (3 + 1) =
  268 ms. 7 retries never ended on soft-RoCE, and timeout 10 failed healthy links of an emulated machine.
* RNR retries do not matter: one-sided operations need no receive to be posted.

RC does not bound the duration of an operation (a peer whose link is down may yield no completion at all), so nobody
here waits for the device: each poster has its own deadline, and ends with ``QueuePair.close``.

Work requests and completions are laid out in memory of ``PostRing`` and ``CompletionRing``, as the device reads and
writes them.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tanghulu.errors import NodeUnavailable, TransferFailed
from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.transfer_engine.transports.rdma import abi
from tanghulu.transfer_engine.transports.rdma.wire import QueuePairAddress

ACK_TIMEOUT = 14
RETRY_COUNT = 3
#: READs that a queue pair may have under way, in either direction.
MAX_READS = 8
PORT = 1
_MAX_GIDS = 256
_HOP_LIMIT = 64
#: Codes of 0.64 ms and of "for ever"; both matter to two-sided operations only.
_RNR_TIMER, _RNR_RETRY = 12, 6


class DeviceInfo(NamedTuple):
    """A device whose port is up: its name and the address under which peers reach it."""

    name: str
    gid: str
    gid_index: int
    lid: int
    mtu: int


class DeviceProbe(NamedTuple):
    """Result of the rdma probe: the usable devices by name, or the reason for none."""

    devices: tuple[DeviceInfo, ...]
    reason: str


def probe() -> DeviceProbe:
    """Look for the library and for devices; never raises. Queries the kernel anew each time."""
    found: list[DeviceInfo] = []
    reasons: list[str] = []
    try:
        names = _device_names()
    except OSError as error:
        return DeviceProbe((), f"no RDMA device: {error}")
    for name in names:
        try:
            found.append(_describe(name))
        except NodeUnavailable as error:
            reasons.append(f"{name}: {error.message}")
    return DeviceProbe(tuple(found), "" if found else "; ".join(reasons) or "no RDMA device")


class Device:
    """An open device with its protection domain; everything made from it is closed before it."""

    def __init__(self, info: DeviceInfo) -> None:
        """Open the device; raises NodeUnavailable if it cannot be opened."""
        self.info = info
        self._verbs = abi.library()
        self._regions: dict[int, Any] = {}  # the pinned ones, by the address of the library's structure
        self._lock = threading.RLock()  # the collector may drop a region while its device is closed
        self._context = _open(info.name)
        self._domain = self._verbs.ibv_alloc_pd(self._context)
        if not self._domain:
            error = _last_error()
            self._verbs.ibv_close_device(self._context)
            raise NodeUnavailable(f"RDMA device {info.name} cannot make a protection domain: {error}")

    def register(self, address: int, size_bytes: int, *, remote: bool, writable: bool = True) -> MemoryRegion:
        """Pin memory for the device; ``remote`` lets peers with the key read and write it. Slow: once per arena.

        ``writable=False`` for memory that is only sent. Raises TransferFailed if the kernel refuses (memlock limit).
        Other threads run meanwhile.
        """
        access = abi.ACCESS_LOCAL_WRITE if writable else 0
        if remote:
            access |= abi.ACCESS_REMOTE_READ | abi.ACCESS_REMOTE_WRITE
        region = self._verbs.ibv_reg_mr(self._domain, address, size_bytes, access)
        if not region:
            raise TransferFailed(
                f"{self.info.name} cannot register {size_bytes} bytes ({_last_error()}); is `ulimit -l` too low?"
            )
        key = ctypes.addressof(region.contents)
        with self._lock:
            self._regions[key] = region
        return MemoryRegion(region.contents.lkey, region.contents.rkey, lambda: self._unpin(key))

    def try_dmabuf(self, fd: int, address: int, size_bytes: int) -> None:
        """Register another device's memory by its dmabuf, and release it; raises TransferFailed if impossible."""
        access = abi.ACCESS_LOCAL_WRITE | abi.ACCESS_REMOTE_READ | abi.ACCESS_REMOTE_WRITE
        try:
            region = abi.register_dmabuf(self._verbs)(self._domain, 0, size_bytes, address, fd, access)
        except AttributeError:
            raise TransferFailed("this libibverbs does not support dmabufs; install rdma-core 34 or newer") from None
        if not region:
            raise TransferFailed(f"{self.info.name} cannot register a dmabuf: {_last_error()}")
        self._verbs.ibv_dereg_mr(region)

    def queue_pair(self, max_works: int) -> QueuePair:
        """Return a fresh reliable connection's end; raises TransferFailed if the device has none left."""
        return QueuePair(self._verbs, self.info, self._context, self._domain, max_works)

    def close(self) -> None:
        """Unpin remaining registrations and close the device; its queue pairs are closed already."""
        with self._lock:
            while self._regions:
                self._verbs.ibv_dereg_mr(self._regions.popitem()[1])
            self._verbs.ibv_dealloc_pd(self._domain)
            self._verbs.ibv_close_device(self._context)

    def _unpin(self, key: int) -> None:
        with self._lock:
            region = self._regions.pop(key, None)
            if region is not None:
                self._verbs.ibv_dereg_mr(region)


class MemoryRegion:
    """Registered memory; the owner of the memory keeps it alive until ``close``, or until this object is dropped."""

    def __init__(self, local_key: int, remote_key: int, unpin: Callable[[], None]) -> None:
        self.local_key, self.remote_key = local_key, remote_key
        self._unpin: Callable[[], None] | None = unpin

    def close(self) -> None:
        """Unpin."""
        unpin, self._unpin = self._unpin, None
        if unpin is not None:
            unpin()

    def __del__(self) -> None:
        self.close()


class QueuePair:
    """One end of a reliable connection with its own completion queue and channel; used by one thread at a time."""

    def __init__(self, verbs: Any, info: DeviceInfo, context: Any, domain: int, max_works: int) -> None:
        self._verbs, self._info = verbs, info
        self._channel: Any = None
        self._queue: Any = None
        self._pair: Any = None
        self._pair_address = 0
        self._fd = -1
        self._armed = False
        try:
            self._create(context, domain, max_works)
        except TransferFailed:
            self.close()
            raise
        operations = context.contents.ops
        self._call_poll = abi.POLL(operations.poll_cq)
        self._call_notify = abi.NOTIFY(operations.req_notify_cq)
        self._call_post = abi.POST(operations.post_send)
        self._ring = PostRing(max_works)
        self._rejected = ctypes.c_void_p()
        self._ended = CompletionRing(max_works)

    def _create(self, context: Any, domain: int, max_works: int) -> None:
        self._channel = self._made(self._verbs.ibv_create_comp_channel(context), "completion channel")
        self._fd = self._channel.contents.fd
        os.set_blocking(self._fd, False)
        self._queue = self._made(
            self._verbs.ibv_create_cq(context, max_works + 1, None, self._channel, 0), "completion queue"
        )
        capacity = abi.Capacity(send_wr=max_works, recv_wr=1, send_sge=1, recv_sge=1)
        start = abi.QueuePairStart(send_cq=self._queue, recv_cq=self._queue, cap=capacity, qp_type=abi.QPT_RC)
        self._pair = self._made(self._verbs.ibv_create_qp(domain, ctypes.byref(start)), "queue pair")
        self._pair_address = ctypes.addressof(self._pair.contents)

    def _made(self, thing: Any, name: str) -> Any:
        if not thing:
            raise TransferFailed(f"{self._info.name} cannot make a {name}: {_last_error()}")
        return thing

    @property
    def address(self) -> QueuePairAddress:
        """Address for a connecting peer; the first packet number is as random as the pair's number."""
        info, number = self._info, self._pair.contents.qp_num
        return QueuePairAddress(info.gid, info.lid, number, number & 0xFFFFFF, info.mtu)

    def connect(self, peer: QueuePairAddress) -> None:
        """Make the pair ready to receive and send; raises NodeUnavailable if the device has no route to the peer.

        The kernel resolves the peer's link address, for up to a second; other threads run meanwhile.
        """
        mine = self.address
        reach = abi.ACCESS_LOCAL_WRITE | abi.ACCESS_REMOTE_READ | abi.ACCESS_REMOTE_WRITE
        attributes = abi.Attributes(
            port_num=PORT, qp_access_flags=reach, dest_qp_num=peer.number, path_mtu=min(mine.mtu, peer.mtu),
            rq_psn=peer.first_packet, sq_psn=mine.first_packet, max_rd_atomic=MAX_READS, max_dest_rd_atomic=MAX_READS,
            min_rnr_timer=_RNR_TIMER, timeout=ACK_TIMEOUT, retry_cnt=RETRY_COUNT, rnr_retry=_RNR_RETRY,
        )  # fmt: skip
        handle = attributes.ah_attr
        handle.dlid, handle.is_global, handle.port_num = peer.lid, 1, PORT
        handle.grh.sgid_index, handle.grh.hop_limit = self._info.gid_index, _HOP_LIMIT
        ctypes.memmove(handle.grh.dgid, ipaddress.IPv6Address(peer.gid).packed, 16)
        for state, mask in ((abi.QPS_INIT, abi.INIT_MASK), (abi.QPS_RTR, abi.RTR_MASK), (abi.QPS_RTS, abi.RTS_MASK)):
            attributes.qp_state = state
            fault = self._verbs.ibv_modify_qp(self._pair, ctypes.byref(attributes), mask)
            if fault:
                raise NodeUnavailable(f"{self._info.name} cannot reach {peer.gid}: {os.strerror(fault)}")

    def post(self, works: Sequence[WorkRequest], signalled: Sequence[bool]) -> None:
        """Hand a chain to the device; works selected by ``signalled``, including the last, signal their end.

        Raises TransferFailed; then none, some or all of them were taken, and the pair must be closed.
        """
        self._ring.fill(works, signalled)
        fault = self._call_post(self._pair_address, self._ring.address, ctypes.byref(self._rejected))
        if fault:
            raise TransferFailed(f"{self._info.name} rejects work requests: {os.strerror(abs(fault))}")

    def poll(self) -> list[WorkCompletion]:
        """Return operations ended since the last call, in order; never waits. Of unsignalled ones only failures.

        Raises TransferFailed if the queue is broken.
        """
        num = self._call_poll(self._queue, self._ended.max_works, self._ended.address)
        if num < 0:
            raise TransferFailed(f"{self._info.name}'s completion queue is broken")
        return self._ended.take(num) if num else []

    def fileno(self) -> int:
        """Return a descriptor, readable after ``arm`` when something ended."""
        return self._fd

    def arm(self) -> None:
        """Make the next completion wake the descriptor; poll once more afterwards."""
        if not self._armed:
            self._call_notify(self._queue, 0)
            self._armed = True

    def woken(self) -> None:
        """Take the event of the readable descriptor."""
        queue, context = ctypes.c_void_p(), ctypes.c_void_p()
        if self._verbs.ibv_get_cq_event(self._channel, ctypes.byref(queue), ctypes.byref(context)) == 0:
            self._verbs.ibv_ack_cq_events(self._queue, 1)
            self._armed = False

    def flush(self, last_work: int, timeout_s: float) -> bool:
        """Force the error state, and wait until the last posted work has ended; return whether it did in time.

        Destroying a pair with works under way is allowed, but drivers are used to idle ones.
        """
        self._fail(self._pair)
        until_s = time.monotonic() + timeout_s
        waiter = select.poll()
        waiter.register(self._fd, select.POLLIN)
        while True:
            self.arm()
            if any(each.work_id == last_work for each in self.poll()):
                return True
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            if waiter.poll(left_s * 1000):
                self.woken()

    def close(self) -> None:
        """Destroy the pair: when this returns, the device touches no memory through it any more."""
        pair, self._pair = self._pair, None
        queue, self._queue = self._queue, None
        channel, self._channel = self._channel, None
        if pair:
            self._fail(pair)
            self._verbs.ibv_destroy_qp(pair)
        if queue:
            self._verbs.ibv_destroy_cq(queue)
        if channel:
            self._verbs.ibv_destroy_comp_channel(channel)

    def _fail(self, pair: Any) -> None:
        """End posted works as flushed; refused if the pair was never connected, which does not matter."""
        self._verbs.ibv_modify_qp(pair, ctypes.byref(abi.Attributes(qp_state=abi.QPS_ERR)), abi.MASK_STATE)


def _last_error() -> str:
    return os.strerror(ctypes.get_errno())


def _device_names() -> list[str]:
    """Return the names; raises OSError if the library is missing or finds no device."""
    verbs = abi.library()
    num = ctypes.c_int()
    devices = verbs.ibv_get_device_list(ctypes.byref(num))
    if not devices:
        number = ctypes.get_errno()
        unloaded = "; load its driver: modprobe ib_uverbs" if number == errno.ENOSYS else ""
        raise OSError(f"the kernel lists none ({os.strerror(number)}{unloaded})")
    try:
        return sorted(verbs.ibv_get_device_name(devices[n]).decode() for n in range(num.value))
    finally:
        verbs.ibv_free_device_list(devices)


def _open(name: str) -> Any:
    """Return the device's context; raises NodeUnavailable."""
    verbs = abi.library()
    num = ctypes.c_int()
    devices = verbs.ibv_get_device_list(ctypes.byref(num))
    try:
        for n in range(num.value if devices else 0):
            if verbs.ibv_get_device_name(devices[n]).decode() == name:
                context = verbs.ibv_open_device(devices[n])
                if not context:
                    raise NodeUnavailable(f"RDMA device {name} cannot be opened: {_last_error()}")
                return context
    finally:
        if devices:
            verbs.ibv_free_device_list(devices)
    raise NodeUnavailable(f"RDMA device {name} is gone")


def _describe(name: str) -> DeviceInfo:
    """Describe the device; raises NodeUnavailable if it is not usable."""
    verbs, context, port = abi.library(), _open(name), abi.Port()
    try:
        fault = verbs.ibv_query_port(context, PORT, ctypes.byref(port))
        if fault or port.state != abi.PORT_ACTIVE:
            raise NodeUnavailable(os.strerror(fault) if fault else "its port is not active")
        index, gid = _best_gid(context)
        return DeviceInfo(name, gid, index, port.lid, port.active_mtu)
    finally:
        verbs.ibv_close_device(context)


def _best_gid(context: Any) -> tuple[int, str]:
    """Return the best GID: for RoCE version 2 with a routable IPv4 or IPv6 address; InfiniBand has one for all."""
    entries = (abi.Gid * _MAX_GIDS)()
    num = abi.library()._ibv_query_gid_table(context, entries, _MAX_GIDS, 0, ctypes.sizeof(abi.Gid))
    best: tuple[int, int, str] | None = None
    for entry in entries[: max(0, num)]:
        address = ipaddress.IPv6Address(bytes(entry.gid))
        routable = address.ipv4_mapped is not None or not address.is_link_local
        rank = 2 * (entry.gid_type == abi.GID_TYPE_ROCE_V2) + routable
        if entry.port_num == PORT and (best is None or rank > best[0]):
            best = (rank, entry.gid_index, str(address))
    if best is None:
        raise NodeUnavailable("its port has no GID")
    return best[1], best[2]


#: Interval of signalled completions, in works and in bytes; the last work of every chain also signals. This gives fewer
#: completions to poll, no waiting in vain, and visible progress (a path without any is presumed dead).
SIGNAL_WORKS = 8
SIGNAL_BYTES = 1 << 20
_ACCESS_FAULTS = ("REM_ACCESS_ERR", "REM_INV_REQ_ERR", "LOC_PROT_ERR")


class WorkRequest(NamedTuple):
    """One one-sided operation. ``local_key`` covers the local range, ``remote_key`` the remote one."""

    work_id: int
    opcode: Opcode
    local_address: int
    local_key: int
    remote_address: int
    remote_key: int
    length: int


class WorkCompletion(NamedTuple):
    """The end of one signalled operation; ``fault`` is empty when it succeeded, and then all before it did too."""

    work_id: int
    fault: str
    access: bool


def choose_signalled(lengths: Sequence[int]) -> list[bool]:
    """Choose works of one chain that signal their end. Example of 1 MiB each: all; 64 KiB: every 8th and the last."""
    signalled: list[bool] = []
    num_works = num_bytes = 0
    for length in lengths:
        num_works, num_bytes = num_works + 1, num_bytes + length
        signalled.append(num_works == SIGNAL_WORKS or num_bytes >= SIGNAL_BYTES)
        if signalled[-1]:
            num_works = num_bytes = 0
    signalled[-1] = True
    return signalled


class PostRing:
    """Memory in which a chain of work requests is laid out for the device, one call for all of them.

    The device has taken what it needs when the call returns, so every chain begins in the first place. Example of three
    works: place 0 points to 1, 1 to 2, and 2 to nothing.
    """

    def __init__(self, max_works: int) -> None:
        size_bytes = abi.SEND_REQUEST.size
        self._memory = ctypes.create_string_buffer(max_works * size_bytes)
        self.address = ctypes.addressof(self._memory)
        self._places = [(n * size_bytes, self.address + n * size_bytes) for n in range(max_works)]
        self._size_bytes = size_bytes

    def fill(self, works: Sequence[WorkRequest], signalled: Sequence[bool]) -> None:
        """Lay out the chain; works whose ``signalled`` is true will signal their end."""
        pack, memory, size_bytes, last = abi.SEND_REQUEST.pack_into, self._memory, self._size_bytes, len(works) - 1
        read, write = abi.WR_RDMA_READ, abi.WR_RDMA_WRITE
        for number, (work, signals, (offset, address)) in enumerate(zip(works, signalled, self._places, strict=False)):
            pack(
                memory, offset, work.work_id, 0 if number == last else address + size_bytes, address + abi.SGE_OFFSET,
                1, read if work.opcode is Opcode.READ else write, abi.SEND_SIGNALED if signals else 0,
                work.remote_address, work.remote_key, work.local_address, work.length, work.local_key,
            )  # fmt: skip


class CompletionRing:
    """Memory into which the device's completions are polled."""

    def __init__(self, max_works: int) -> None:
        self.max_works = max_works
        self._memory = ctypes.create_string_buffer(max_works * abi.COMPLETION.size)
        self._view = memoryview(self._memory).cast("B")
        self.address = ctypes.addressof(self._memory)

    def take(self, num: int) -> list[WorkCompletion]:
        """Return the first ``num``, as left by the last poll."""
        return [_completed(*each) for each in abi.COMPLETION.iter_unpack(self._view[: num * abi.COMPLETION.size])]


def _completed(work_id: int, status: int) -> WorkCompletion:
    if status == 0:
        return WorkCompletion(work_id, "", False)
    fault = abi.STATUS[status] if 0 < status < len(abi.STATUS) else f"status {status}"
    return WorkCompletion(work_id, fault, fault in _ACCESS_FAULTS)
