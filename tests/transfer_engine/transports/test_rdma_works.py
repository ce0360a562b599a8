"""The bytes that verbs devices read and write: work requests, completions, and the library's structures."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest

from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.transfer_engine.transports.rdma import abi
from tanghulu.transfer_engine.transports.rdma.verbs import (
    CompletionRing,
    PostRing,
    WorkCompletion,
    WorkRequest,
    choose_signalled,
)

KIB, MIB = 1 << 10, 1 << 20

#: Offsets and sizes in infiniband/verbs.h on 64-bit machines, as a C compiler sees them.
LAYOUTS: dict[Any, dict[str, int]] = {
    abi.CompletionChannel: {"fd": 8, "sizeof": 16},
    abi.Region: {"lkey": 36, "rkey": 40, "sizeof": 48},
    abi.QueuePairStart: {"send_cq": 8, "recv_cq": 16, "cap": 32, "qp_type": 52, "sq_sig_all": 56, "sizeof": 64},
    abi.Pair: {"handle": 48, "qp_num": 52},
    abi.GlobalRoute: {"sgid_index": 20, "hop_limit": 21, "sizeof": 24},
    abi.AddressHandle: {"grh": 0, "dlid": 24, "is_global": 29, "port_num": 30, "sizeof": 32},
    abi.Attributes: {
        "path_mtu": 8, "rq_psn": 20, "sq_psn": 24, "dest_qp_num": 28, "qp_access_flags": 32, "cap": 36, "ah_attr": 56,
        "pkey_index": 120, "max_rd_atomic": 126, "max_dest_rd_atomic": 127, "min_rnr_timer": 128, "port_num": 129,
        "timeout": 130, "retry_cnt": 131, "rnr_retry": 132, "rate_limit": 136, "sizeof": 144,
    },
    abi.Port: {"state": 0, "active_mtu": 8, "gid_tbl_len": 12, "lid": 34, "sizeof": 52},
    abi.Gid: {"gid_index": 16, "port_num": 20, "gid_type": 24, "sizeof": 32},
}  # fmt: skip


@pytest.mark.parametrize("structure", list(LAYOUTS))
def test_structures_lie_as_the_library_s(structure: Any):
    for name, offset in LAYOUTS[structure].items():
        found = ctypes.sizeof(structure) if name == "sizeof" else getattr(structure, name).offset
        assert found == offset, name


def test_the_table_of_operations():
    operations = abi.VerbsContext.ops.offset
    assert operations + abi._Operations.poll_cq.offset == 96
    assert operations + abi._Operations.req_notify_cq.offset == 104
    assert operations + abi._Operations.post_send.offset == 208
    assert abi.VerbsContext.cmd_fd.offset == 264


def test_a_chain_of_works():
    works = [
        WorkRequest(1, Opcode.READ, 0x1000, 11, 0x9000, 21, 100),
        WorkRequest(2, Opcode.WRITE, 0x2000, 12, 0xA000, 22, 200),
        WorkRequest((1 << 64) - 1, Opcode.WRITE, 0x3000, 13, (1 << 64) - 4096, 0xFFFFFFFF, (1 << 32) - 1),
    ]
    ring = PostRing(4)
    ring.fill(works, [False, True, True])
    assert follow(ring.address) == list(zip(works, [False, True, True], strict=True))
    ring.fill(works[:1], [True])
    assert follow(ring.address) == [(works[0], True)]


def test_a_chain_as_long_as_the_ring():
    works = [WorkRequest(n, Opcode.WRITE, n, n, n, n, n) for n in range(1, 257)]
    ring = PostRing(256)
    ring.fill(works, [True] * 256)
    assert [work for work, _ in follow(ring.address)] == works


@pytest.mark.parametrize(
    ("lengths", "told"),
    [
        ([1], [0]),
        ([MIB] * 3, [0, 1, 2]),
        ([64 * KIB] * 18, [7, 15, 17]),
        ([512 * KIB] * 5, [1, 3, 4]),
        ([1] * 7 + [MIB] + [1] * 9, [7, 15, 16]),
    ],
)
def test_which_works_tell_their_end(lengths: list[int], told: list[int]):
    assert [index for index, tells in enumerate(choose_signalled(lengths)) if tells] == told


def test_completions():
    ring = CompletionRing(4)
    assert ring.max_works == 4
    statuses = [0, 5, 10, 99]
    entries = b"".join(struct.pack("<QiiII", 70 + n, status, 0, 0, 0) + bytes(24) for n, status in enumerate(statuses))
    ctypes.memmove(ring.address, entries, len(entries))
    assert ring.take(4) == [
        WorkCompletion(70, "", False),
        WorkCompletion(71, "WR_FLUSH_ERR", False),
        WorkCompletion(72, "REM_ACCESS_ERR", True),
        WorkCompletion(73, "status 99", False),
    ]
    assert ring.take(1) == [WorkCompletion(70, "", False)]


def follow(address: int) -> list[tuple[WorkRequest, bool]]:
    """The chain as a device reads it, from struct ibv_send_wr and struct ibv_sge."""
    found: list[tuple[WorkRequest, bool]] = []
    while address:
        work_id, following, ranges, num_ranges, opcode, flags = struct.unpack("<QQQiiI", ctypes.string_at(address, 36))
        remote_address, remote_key = struct.unpack("<QI", ctypes.string_at(address + 40, 12))
        local_address, length, local_key = struct.unpack("<QII", ctypes.string_at(ranges, 16))
        assert num_ranges == 1
        kind = {4: Opcode.READ, 0: Opcode.WRITE}[opcode]
        work = WorkRequest(work_id, kind, local_address, local_key, remote_address, remote_key, length)
        found.append((work, bool(flags & 2)))
        address = following
    return found
