"""Whether GPU memory can be registered with an RDMA device: every step at which that can end says so."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tanghulu.errors import NodeUnavailable, TransferFailed
from tanghulu.transfer_engine.gpu import direct as gpu_direct
from tanghulu.transfer_engine.transports.rdma import verbs as rdma_verbs
from tanghulu.transfer_engine.transports.rdma.verbs import DeviceInfo, DeviceProbe

NIC = DeviceInfo("mlx5_0", "fe80::1", 0, 0, 5)


class Driver:
    """One GPU that can be told at which step to fail; counts what it lends."""

    has_dmabufs = 1
    fails_at = ""
    num_lent = 0

    def num_gpus(self) -> int:
        return 1

    def gpu(self, number: int) -> int:
        return number

    def name(self, gpu: int) -> str:
        return "H200"

    def attribute(self, gpu: int, which: int) -> int:
        return self.has_dmabufs

    @contextmanager
    def memory(self, gpu: int) -> Iterator[int]:
        if self.fails_at == "memory":
            raise NodeUnavailable("cuMemAlloc_v2: out of memory (2)")
        self.num_lent += 1
        yield 1 << 40
        self.num_lent -= 1

    def dmabuf(self, address: int) -> int:
        if self.fails_at == "dmabuf":
            raise NodeUnavailable("cuMemGetHandleForAddressRange: not supported (801)")
        return os.memfd_create("dmabuf")


class Device:
    """A NIC that takes dmabufs, or not."""

    refusal = ""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info

    def try_dmabuf(self, fd: int, address: int, size_bytes: int) -> None:
        assert os.fstat(fd)
        if self.refusal:
            raise TransferFailed(self.refusal)

    def close(self) -> None:
        pass


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(gpu_direct, "_Driver", lambda: driver)
    monkeypatch.setattr(rdma_verbs, "probe", lambda: DeviceProbe((NIC,), ""))
    monkeypatch.setattr(rdma_verbs, "Device", Device)
    monkeypatch.setattr(Device, "refusal", "")
    return driver


def test_memory_that_was_registered(driver: Driver):
    found = gpu_direct.attempt()
    assert found.works
    assert found.note == "cuda:0 (H200): registered by dmabuf"
    assert driver.num_lent == 0


@pytest.mark.parametrize(
    ("step", "reason"),
    [("attribute", "offers no dmabufs"), ("memory", "out of memory"), ("dmabuf", "not supported (801)"),
     ("nic", "no RDMA device can register it: no RDMA device"), ("register", "mlx5_0 cannot register a dmabuf")],
)  # fmt: skip
def test_each_step_says_why_it_was_the_last(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, no_descriptor_leaks: None, step: str, reason: str
):
    driver.has_dmabufs = step != "attribute"
    driver.fails_at = step
    if step == "nic":
        monkeypatch.setattr(rdma_verbs, "probe", lambda: DeviceProbe((), "no RDMA device"))
    if step == "register":
        monkeypatch.setattr(Device, "refusal", "mlx5_0 cannot register a dmabuf: Operation not supported")
    found = gpu_direct.attempt()
    assert not found.works
    assert reason in found.note


def test_a_driver_that_crashes_takes_nobody_with_it(monkeypatch: pytest.MonkeyPatch):
    ended = subprocess.CompletedProcess[str]([], -11, "", "")
    monkeypatch.setattr(gpu_direct.subprocess, "run", lambda *given, **more: ended)
    monkeypatch.setattr(gpu_direct.ctypes, "CDLL", lambda name: object())
    assert gpu_direct.probe() == gpu_direct.GpuProbe((), "the attempt ended with status -11: no output")


def test_what_the_process_prints_is_what_is_found(monkeypatch: pytest.MonkeyPatch):
    """Really started; where there is no driver it ends at the first step, and says so."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        assert "no NVIDIA driver" in gpu_direct.probe().note
        load: Any = ctypes.CDLL
        monkeypatch.setattr(gpu_direct.ctypes, "CDLL", lambda name: None if name == "libcuda.so.1" else load(name))
    found = gpu_direct.probe()
    assert found.note
    assert "attempt" not in found.note
