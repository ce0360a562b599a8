"""The one file that touches pyverbs: devices, memory regions and queue pairs, as far as this engine needs them.

Owns nothing but the translation: into pyverbs, and its exceptions into typed errors. pyverbs is a system package
(Debian: python3-pyverbs), no dependency; it is looked for when somebody first asks for rdma. Its extension modules fit
every CPython of the version that they were built for, so a virtual environment borrows them from the system's folder
without putting the rest of that folder on its path.

Settings of a queue pair, and where they come from (docs/rdma.md has the measurements):

* ``timeout`` 14 and ``retry_cnt`` 3: a packet without acknowledgement is an error after 4.096 us * 2^14 * (3 + 1) =
  268 ms. 7 retries never ended on soft-RoCE, and timeout 10 failed healthy links of an emulated machine.
* RNR retries do not matter: one-sided operations need no receive to be posted.

RC does not bound how long an operation takes (a peer whose link is down may yield no completion at all), so nobody here
waits for the device: whoever posts has a deadline of his own, and ends with ``QueuePair.close``.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import ipaddress
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tanghulu.errors import NodeUnavailable, TransferFailed
from tanghulu.transfer_engine.opcode import Opcode
from tanghulu.transfer_engine.rdma_wire import QueuePairAddress

ACK_TIMEOUT = 14
RETRY_COUNT = 3
#: READs that a queue pair has under way at once, in either direction.
MAX_READS = 8
PORT = 1
_SYSTEM_FOLDER = Path("/usr/lib/python3/dist-packages")
_MAX_GIDS = 64
_ROCE_V2 = 2
#: A completion channel's descriptor is found by looking what is new, so nobody else may open or close one meanwhile.
_descriptors = threading.Lock()
_pyverbs_lock = threading.Lock()


class DeviceInfo(NamedTuple):
    """A device whose port is up: its name and the address under which peers reach it."""

    name: str
    gid: str
    gid_index: int
    lid: int
    mtu: int


class Probe(NamedTuple):
    """What rdma can do here: the usable devices by name, and if there are none, why."""

    devices: tuple[DeviceInfo, ...]
    reason: str


class Work(NamedTuple):
    """One one-sided operation. ``local_key`` covers the local range, ``remote_key`` the remote one."""

    work_id: int
    opcode: Opcode
    local_address: int
    local_key: int
    remote_address: int
    remote_key: int
    length: int


class Completed(NamedTuple):
    """The end of one signalled operation; ``fault`` is empty when it succeeded, and then all before it did too."""

    work_id: int
    fault: str
    flushed: bool
    access: bool


def probe() -> Probe:
    """Look for pyverbs and for devices; never raises. The kernel is asked anew each time."""
    try:
        _load()
        device = _module("device")
        names = sorted(each.name.decode() for each in device.get_device_list())
    except ImportError as error:
        return Probe((), f"pyverbs cannot be imported ({error}): install python3-pyverbs and use the system's CPython")
    except _error() as error:
        return Probe((), f"no RDMA device: {error}")
    found: list[DeviceInfo] = []
    reasons: list[str] = []
    for name in names:
        try:
            found.append(_describe(name))
        except (NodeUnavailable, _error()) as error:
            reasons.append(f"{name}: {error}")
    return Probe(tuple(found), "" if found else "; ".join(reasons) or "no RDMA device")


class Device:
    """An open device with its protection domain; everything made from it is closed before it."""

    def __init__(self, info: DeviceInfo) -> None:
        """Raises NodeUnavailable if the device cannot be opened."""
        self.info = info
        try:
            with _descriptors:
                self._context = _module("device").Context(name=info.name)
            self._domain = _module("pd").PD(self._context)
        except _error() as error:
            raise NodeUnavailable(f"RDMA device {info.name} cannot be opened: {error}") from error

    def register(self, address: int, size_bytes: int, *, remote: bool, writable: bool = True) -> MemoryRegion:
        """Pin memory for the device; ``remote`` lets peers with the key read and write it. Slow: once per arena.

        ``writable=False`` for memory that is only sent. Raises TransferFailed if the kernel refuses (memlock limit).
        """
        enums = _module("enums")
        access = enums.IBV_ACCESS_LOCAL_WRITE if writable else 0
        if remote:
            access |= enums.IBV_ACCESS_REMOTE_READ | enums.IBV_ACCESS_REMOTE_WRITE
        try:
            return MemoryRegion(_module("mr").MR(self._domain, size_bytes, access, address=address))
        except _error() as error:
            raise TransferFailed(
                f"{self.info.name} cannot register {size_bytes} bytes ({error}); is `ulimit -l` too low?"
            ) from error

    def queue_pair(self, max_works: int) -> QueuePair:
        """A fresh reliable connection's end; raises TransferFailed if the device has none left."""
        try:
            return QueuePair(self.info, self._context, self._domain, max_works)
        except _error() as error:
            raise TransferFailed(f"{self.info.name} gives no queue pair: {error}") from error

    def close(self) -> None:
        """Close the device; its regions and queue pairs are closed already."""
        self._domain.close()
        with _descriptors:
            self._context.close()


class MemoryRegion:
    """Registered memory; the owner of the memory keeps it alive until ``close``."""

    def __init__(self, region: Any) -> None:
        self.local_key: int = region.lkey
        self.remote_key: int = region.rkey
        self._region = region

    def close(self) -> None:
        """Unpin."""
        self._region.close()


class QueuePair:
    """One end of a reliable connection with a completion queue and channel of its own; used by one thread at a time."""

    def __init__(self, info: DeviceInfo, context: Any, domain: Any, max_works: int) -> None:
        self._info = info
        self._enums = enums = _module("enums")
        self._wr = _module("wr")
        self._channel, self._fd = _open_channel(context)
        self._queue = _module("cq").CQ(context, max_works + 1, None, self._channel, 0)
        self._armed = False
        self._closed = False
        qp = _module("qp")
        capacity = qp.QPCap(max_send_wr=max_works, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        start = qp.QPInitAttr(qp_type=enums.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=capacity, sq_sig_all=0)
        self._qp = qp.QP(domain, start)
        self._qp_module = qp

    @property
    def address(self) -> QueuePairAddress:
        """What the peer needs in order to connect; the first packet number is as random as the pair's number."""
        info = self._info
        return QueuePairAddress(info.gid, info.lid, self._qp.qp_num, self._qp.qp_num & 0xFFFFFF, info.mtu)

    def connect(self, peer: QueuePairAddress) -> None:
        """Make it ready to receive and to send; raises NodeUnavailable if the device knows no way to the peer."""
        enums, addr, mine = self._enums, _module("addr"), self.address
        attributes = self._qp_module.QPAttr(port_num=PORT)
        attributes.pkey_index = 0
        attributes.qp_access_flags = (
            enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_READ | enums.IBV_ACCESS_REMOTE_WRITE
        )
        attributes.dest_qp_num = peer.number
        attributes.path_mtu = min(mine.mtu, peer.mtu)
        attributes.rq_psn, attributes.sq_psn = peer.first_packet, mine.first_packet
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = MAX_READS
        attributes.min_rnr_timer = 12
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = ACK_TIMEOUT, RETRY_COUNT, 6
        try:
            route = addr.GlobalRoute(
                dgid=addr.GID(ipaddress.IPv6Address(peer.gid).exploded), sgid_index=self._info.gid_index, hop_limit=64
            )
            attributes.ah_attr = addr.AHAttr(gr=route, is_global=1, port_num=PORT, dlid=peer.lid)
            self._qp.to_rts(attributes)
        except _error() as error:
            raise NodeUnavailable(f"{self._info.name} cannot reach {peer.gid}: {error}") from error

    def post(self, works: Sequence[Work], signal_every: int) -> None:
        """Hand a chain to the device; each ``signal_every``-th and the last tell their end.

        Raises TransferFailed; then none, some or all of them were taken, and the pair is to be closed.
        """
        enums, wr = self._enums, self._wr
        chain: list[Any] = []  # keeps every work request alive until it is posted
        for number in range(len(works) - 1, -1, -1):
            work = works[number]
            told = number == len(works) - 1 or (number + 1) % signal_every == 0
            request = wr.SendWR(
                wr_id=work.work_id,
                opcode=enums.IBV_WR_RDMA_READ if work.opcode is Opcode.READ else enums.IBV_WR_RDMA_WRITE,
                num_sge=1,
                sg=[wr.SGE(work.local_address, work.length, work.local_key)],
                send_flags=enums.IBV_SEND_SIGNALED if told else 0,
                next_wr=chain[-1] if chain else None,
            )
            request.set_wr_rdma(work.remote_key, work.remote_address)
            chain.append(request)
        try:
            self._qp.post_send(chain[-1])
        except _error() as error:
            raise TransferFailed(f"{self._info.name} takes no work: {error}") from error

    def poll(self, max_entries: int) -> list[Completed]:
        """What ended since, in order; never waits. Unsignalled works appear only when they failed."""
        enums = self._enums
        ended: list[Completed] = []
        for each in self._queue.poll(max_entries)[1]:
            status = each.status
            if status == enums.IBV_WC_SUCCESS:
                ended.append(Completed(each.wr_id, "", False, False))
                continue
            access = status in (enums.IBV_WC_REM_ACCESS_ERR, enums.IBV_WC_REM_INV_REQ_ERR, enums.IBV_WC_LOC_PROT_ERR)
            ended.append(Completed(each.wr_id, _status(enums, status), status == enums.IBV_WC_WR_FLUSH_ERR, access))
        return ended

    def fileno(self) -> int:
        """Readable after ``arm`` when something ended."""
        return self._fd

    def arm(self) -> None:
        """Make the next completion wake the descriptor; poll once more afterwards."""
        if not self._armed:
            self._queue.req_notify()
            self._armed = True

    def woken(self) -> None:
        """The descriptor is readable: take the event."""
        self._channel.get_cq_event(self._queue)
        self._queue.ack_events(1)
        self._armed = False

    def fail(self) -> None:
        """Force the error state: what is posted ends as flushed."""
        attributes = self._qp_module.QPAttr(qp_state=self._enums.IBV_QPS_ERR)
        try:
            self._qp.modify(attributes, self._enums.IBV_QP_STATE)
        except _error():
            pass  # it is in that state, or its device is gone: closing follows

    def close(self) -> None:
        """Destroy it: when this returns, the device touches no memory through it any more."""
        if self._closed:
            return
        self._closed = True
        self._qp.close()
        self._queue.close()
        with _descriptors:
            self._channel.close()


def _load() -> None:
    """Make ``import pyverbs`` work; raises ImportError if there is none for this interpreter."""
    with _pyverbs_lock:
        if "pyverbs" in sys.modules:
            return
        if importlib.util.find_spec("pyverbs") is None:
            package = _SYSTEM_FOLDER / "pyverbs" / "__init__.py"
            if not package.exists():
                raise ImportError("no module named pyverbs")
            spec = importlib.util.spec_from_file_location(
                "pyverbs", package, submodule_search_locations=[str(package.parent)]
            )
            assert spec is not None, "a file has a spec"
            assert spec.loader is not None, "a file has a loader"
            module = importlib.util.module_from_spec(spec)
            sys.modules["pyverbs"] = module
            spec.loader.exec_module(module)
        try:
            importlib.import_module("pyverbs.device")
        except ImportError:
            del sys.modules["pyverbs"]
            raise


def _module(name: str) -> Any:
    return importlib.import_module(f"pyverbs.{name}")


def _error() -> type[Exception]:
    error: type[Exception] = _module("pyverbs_error").PyverbsError
    return error


def _status(enums: Any, status: int) -> str:
    for name, value in vars(enums).items():
        if name.startswith("IBV_WC_") and value == status and ("ERR" in name):
            return str(name).removeprefix("IBV_WC_")
    return f"status {status}"


def _describe(name: str) -> DeviceInfo:
    with _descriptors:
        context = _module("device").Context(name=name)
        try:
            port = context.query_port(PORT)
            if port.state != _module("enums").IBV_PORT_ACTIVE:
                raise NodeUnavailable("its port is not active")
            index, gid = _best_gid(context)
            return DeviceInfo(name, gid, index, port.lid, port.active_mtu)
        finally:
            context.close()


def _best_gid(context: Any) -> tuple[int, str]:
    """RoCE wants version 2 with a routable IPv4 or IPv6 address; InfiniBand has one GID for all."""
    best: tuple[int, int, str] | None = None
    for entry in context.query_gid_table(_MAX_GIDS):
        if entry.port_num != PORT:
            continue
        gid = str(context.query_gid(PORT, entry.gid_index))
        address = ipaddress.IPv6Address(gid)
        rank = 2 * (entry.gid_type == _ROCE_V2) + (address.ipv4_mapped is not None or not address.is_link_local)
        if best is None or rank > best[0]:
            best = (rank, entry.gid_index, gid)
    if best is None:
        raise NodeUnavailable("its port has no GID")
    return best[1], best[2]


def _open_channel(context: Any) -> tuple[Any, int]:
    """A completion channel and its descriptor, which pyverbs does not tell: it is the one that was not there before."""
    with _descriptors:
        before = _event_descriptors()
        channel = _module("cq").CompChannel(context)
        fresh = _event_descriptors() - before
    if len(fresh) != 1:
        channel.close()
        raise TransferFailed(f"{len(fresh)} descriptors appeared with a completion channel, not one")
    fd = fresh.pop()
    os.set_blocking(fd, False)
    return channel, fd


def _event_descriptors() -> set[int]:
    found: set[int] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if "infinibandevent" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
        except FileNotFoundError:
            continue  # another thread closed it
    return found
