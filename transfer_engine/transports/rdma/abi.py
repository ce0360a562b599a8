"""Binary interface of libibverbs, as far as this engine needs it: structures, constants, function signatures.

Owns the library's loading and nothing else; only ``verbs`` uses it. Layouts and numbers are those of
infiniband/verbs.h, which its authors keep compatible since IBVERBS_1.1;
``tests/transfer_engine/transports/test_rdma_works.py`` compares them with a compiler's view of that header. It uses
ctypes because slow calls (registering memory, connecting a queue pair, which resolves the peer's address) then let
other threads run, because every CPython supports it, and because a chain of work requests is bytes filled in place and
handed over in one call.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ssize_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any

LIBRARY = "libibverbs.so.1"

ACCESS_LOCAL_WRITE, ACCESS_REMOTE_WRITE, ACCESS_REMOTE_READ = 1, 2, 4
PORT_ACTIVE = 4
GID_TYPE_ROCE_V2 = 2
QPT_RC = 2
QPS_INIT, QPS_RTR, QPS_RTS, QPS_ERR = 1, 2, 3, 6
WR_RDMA_WRITE, WR_RDMA_READ = 0, 4
SEND_SIGNALED = 2

MASK_STATE, MASK_ACCESS, MASK_PKEY, MASK_PORT, MASK_AV, MASK_MTU = 1, 8, 16, 32, 128, 256
MASK_TIMEOUT, MASK_RETRY, MASK_RNR_RETRY, MASK_RQ_PSN, MASK_MAX_READS = 512, 1024, 2048, 4096, 8192
MASK_RNR_TIMER, MASK_SQ_PSN, MASK_MAX_DEST_READS, MASK_DEST = 32768, 65536, 131072, 1 << 20
#: Attributes that RC requires on its way from RESET over INIT and RTR to RTS.
INIT_MASK = MASK_STATE | MASK_PKEY | MASK_PORT | MASK_ACCESS
RTR_MASK = MASK_STATE | MASK_AV | MASK_MTU | MASK_DEST | MASK_RQ_PSN | MASK_MAX_DEST_READS | MASK_RNR_TIMER
RTS_MASK = MASK_STATE | MASK_TIMEOUT | MASK_RETRY | MASK_RNR_RETRY | MASK_SQ_PSN | MASK_MAX_READS

#: enum ibv_wc_status, in order.
STATUS = (
    "SUCCESS", "LOC_LEN_ERR", "LOC_QP_OP_ERR", "LOC_EEC_OP_ERR", "LOC_PROT_ERR", "WR_FLUSH_ERR", "MW_BIND_ERR",
    "BAD_RESP_ERR", "LOC_ACCESS_ERR", "REM_INV_REQ_ERR", "REM_ACCESS_ERR", "REM_OP_ERR", "RETRY_EXC_ERR",
    "RNR_RETRY_EXC_ERR", "LOC_RDD_VIOL_ERR", "REM_INV_RD_REQ_ERR", "REM_ABORT_ERR", "INV_EECN_ERR",
    "INV_EEC_STATE_ERR", "FATAL_ERR", "RESP_TIMEOUT_ERR", "GENERAL_ERR",
)  # fmt: skip

#: struct ibv_send_wr for RDMA (id, next, sg_list, num_sge, opcode, send_flags, remote address, rkey), then its one
#: struct ibv_sge (address, length, lkey).
SEND_REQUEST = struct.Struct("<QQQiiI4xQI76xQII")
SGE_OFFSET = 128
#: struct ibv_wc: id, status; the rest is ignored.
COMPLETION = struct.Struct("<Qi36x")


class CompletionChannel(ctypes.Structure):
    """struct ibv_comp_channel."""

    _fields_ = [("context", c_void_p), ("fd", c_int), ("refcnt", c_int)]


class Region(ctypes.Structure):
    """struct ibv_mr."""

    _fields_ = [
        ("context", c_void_p), ("pd", c_void_p), ("addr", c_void_p), ("length", c_size_t), ("handle", c_uint32),
        ("lkey", c_uint32), ("rkey", c_uint32),
    ]  # fmt: skip


class Capacity(ctypes.Structure):
    """struct ibv_qp_cap."""

    _fields_ = [(name, c_uint32) for name in ("send_wr", "recv_wr", "send_sge", "recv_sge", "inline_data")]


class QueuePairStart(ctypes.Structure):
    """struct ibv_qp_init_attr."""

    _fields_ = [
        ("qp_context", c_void_p), ("send_cq", c_void_p), ("recv_cq", c_void_p), ("srq", c_void_p), ("cap", Capacity),
        ("qp_type", c_int), ("sq_sig_all", c_int),
    ]  # fmt: skip


class Pair(ctypes.Structure):
    """The front of struct ibv_qp."""

    _fields_ = [
        ("context", c_void_p), ("qp_context", c_void_p), ("pd", c_void_p), ("send_cq", c_void_p),
        ("recv_cq", c_void_p), ("srq", c_void_p), ("handle", c_uint32), ("qp_num", c_uint32),
    ]  # fmt: skip


class GlobalRoute(ctypes.Structure):
    """struct ibv_global_route."""

    _fields_ = [
        ("dgid", c_uint64 * 2), ("flow_label", c_uint32), ("sgid_index", c_uint8), ("hop_limit", c_uint8),
        ("traffic_class", c_uint8),
    ]  # fmt: skip


class AddressHandle(ctypes.Structure):
    """struct ibv_ah_attr."""

    _fields_ = [
        ("grh", GlobalRoute), ("dlid", c_uint16), ("sl", c_uint8), ("src_path_bits", c_uint8), ("static_rate", c_uint8),
        ("is_global", c_uint8), ("port_num", c_uint8),
    ]  # fmt: skip


class Attributes(ctypes.Structure):
    """struct ibv_qp_attr."""

    _fields_ = [
        ("qp_state", c_int), ("cur_qp_state", c_int), ("path_mtu", c_int), ("path_mig_state", c_int),
        ("qkey", c_uint32), ("rq_psn", c_uint32), ("sq_psn", c_uint32), ("dest_qp_num", c_uint32),
        ("qp_access_flags", c_uint32), ("cap", Capacity), ("ah_attr", AddressHandle), ("alt_ah_attr", AddressHandle),
        ("pkey_index", c_uint16), ("alt_pkey_index", c_uint16), ("en_sqd_async_notify", c_uint8),
        ("sq_draining", c_uint8), ("max_rd_atomic", c_uint8), ("max_dest_rd_atomic", c_uint8),
        ("min_rnr_timer", c_uint8), ("port_num", c_uint8), ("timeout", c_uint8), ("retry_cnt", c_uint8),
        ("rnr_retry", c_uint8), ("alt_port_num", c_uint8), ("alt_timeout", c_uint8), ("rate_limit", c_uint32),
    ]  # fmt: skip


class Port(ctypes.Structure):
    """struct ibv_port_attr."""

    _fields_ = [
        ("state", c_int), ("max_mtu", c_int), ("active_mtu", c_int), ("gid_tbl_len", c_int),
        ("port_cap_flags", c_uint32), ("max_msg_sz", c_uint32), ("bad_pkey_cntr", c_uint32),
        ("qkey_viol_cntr", c_uint32), ("pkey_tbl_len", c_uint16), ("lid", c_uint16), ("rest", c_uint8 * 16),
    ]  # fmt: skip


class Gid(ctypes.Structure):
    """struct ibv_gid_entry."""

    _fields_ = [
        ("gid", c_uint8 * 16), ("gid_index", c_uint32), ("port_num", c_uint32), ("gid_type", c_uint32),
        ("ndev_ifindex", c_uint32),
    ]  # fmt: skip


class _Operations(ctypes.Structure):
    """struct ibv_context_ops: table behind the header's inline functions."""

    _fields_ = [
        ("before", c_void_p * 11), ("poll_cq", c_void_p), ("req_notify_cq", c_void_p), ("between", c_void_p * 12),
        ("post_send", c_void_p), ("behind", c_void_p * 6),
    ]  # fmt: skip


class VerbsContext(ctypes.Structure):
    """The front of struct ibv_context."""

    _fields_ = [("device", c_void_p), ("ops", _Operations), ("cmd_fd", c_int), ("async_fd", c_int)]


# These three never wait, so they keep the interpreter's lock: releasing it would cost more than the call.
POLL = ctypes.PYFUNCTYPE(c_int, c_void_p, c_int, c_void_p)
NOTIFY = ctypes.PYFUNCTYPE(c_int, c_void_p, c_int)
POST = ctypes.PYFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p)

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ibv_get_device_list": (POINTER(c_void_p), POINTER(c_int)),
    "ibv_free_device_list": (None, POINTER(c_void_p)),
    "ibv_get_device_name": (c_char_p, c_void_p),
    "ibv_open_device": (POINTER(VerbsContext), c_void_p),
    "ibv_close_device": (c_int, POINTER(VerbsContext)),
    "ibv_query_port": (c_int, POINTER(VerbsContext), c_uint8, POINTER(Port)),
    "_ibv_query_gid_table": (c_ssize_t, POINTER(VerbsContext), POINTER(Gid), c_size_t, c_uint32, c_size_t),
    "ibv_alloc_pd": (c_void_p, POINTER(VerbsContext)),
    "ibv_dealloc_pd": (c_int, c_void_p),
    "ibv_reg_mr": (POINTER(Region), c_void_p, c_void_p, c_size_t, c_int),
    "ibv_dereg_mr": (c_int, POINTER(Region)),
    "ibv_create_comp_channel": (POINTER(CompletionChannel), POINTER(VerbsContext)),
    "ibv_destroy_comp_channel": (c_int, POINTER(CompletionChannel)),
    "ibv_create_cq": (c_void_p, POINTER(VerbsContext), c_int, c_void_p, POINTER(CompletionChannel), c_int),
    "ibv_destroy_cq": (c_int, c_void_p),
    "ibv_get_cq_event": (c_int, POINTER(CompletionChannel), POINTER(c_void_p), POINTER(c_void_p)),
    "ibv_ack_cq_events": (None, c_void_p, c_uint32),
    "ibv_create_qp": (POINTER(Pair), c_void_p, POINTER(QueuePairStart)),
    "ibv_modify_qp": (c_int, POINTER(Pair), POINTER(Attributes), c_int),
    "ibv_destroy_qp": (c_int, POINTER(Pair)),
}


@functools.cache
def library() -> Any:
    """Return the loaded library with its signatures; raises OSError if there is none."""
    try:
        loaded = ctypes.CDLL(LIBRARY, use_errno=True)
    except OSError as error:
        raise OSError(f"{error}; install libibverbs1 and ibverbs-providers (Debian's names)") from error
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def register_dmabuf(verbs: Any) -> Any:
    """Return ``ibv_reg_dmabuf_mr`` with its signature; raises AttributeError if the library is too old."""
    function = verbs.ibv_reg_dmabuf_mr
    function.restype = POINTER(Region)
    function.argtypes = (c_void_p, c_uint64, c_size_t, c_uint64, c_int, c_int)
    return function
