"""Probe of RDMA devices for direct access to GPU memory (dmabuf): tried, never assumed.

Owns the CUDA driver's interface (by ctypes) and the attempt: allocate a little on each GPU, request its dmabuf,
register that with an RDMA device, and release everything. It runs in a process of its own, because it exercises
drivers. Transfers take GPU memory through a pinned ring (``gpu_staging``), which works everywhere.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from tanghulu.errors import NodeUnavailable, TanghuluError, TransferFailed
from tanghulu.transfer_engine.transports.rdma import verbs as rdma_verbs

_DRIVER = "libcuda.so.1"
_TIMEOUT_S = 30.0
#: Page size of a GPU; a dmabuf covers whole pages.
_PROBE_BYTES = 2 << 20
_HAS_DMABUF = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
_AS_DMABUF = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD


@dataclass(frozen=True, slots=True)
class GpuFinding:
    """Result for one GPU: ``reason`` names the step at which it failed, empty if its memory was registered."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class GpuProbe:
    """The GPUs tried, or why none was."""

    gpus: tuple[GpuFinding, ...]
    reason: str

    @property
    def works(self) -> bool:
        """Whether some GPU's memory can be registered."""
        return any(not gpu.reason for gpu in self.gpus)

    @property
    def note(self) -> str:
        """Readable sentence: what works, or what is missing."""
        return self.reason or "; ".join(f"{gpu.name}: {gpu.reason or 'registered by dmabuf'}" for gpu in self.gpus)


def probe() -> GpuProbe:
    """Try to register GPU memory, in a process of its own; never raises."""
    try:
        ctypes.CDLL(_DRIVER)
    except OSError as error:
        return GpuProbe((), f"no NVIDIA driver: {error}")
    try:
        ended = subprocess.run(
            [sys.executable, "-m", __name__], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return GpuProbe((), f"the attempt did not end: {error}")
    if ended.returncode != 0:
        last = (ended.stderr.strip().splitlines() or ["no output"])[-1]
        return GpuProbe((), f"the attempt ended with status {ended.returncode}: {last}")
    read = json.loads(ended.stdout)
    return GpuProbe(tuple(GpuFinding(**gpu) for gpu in read["gpus"]), read["reason"])


def attempt() -> GpuProbe:
    """Make the attempt itself."""
    try:
        driver = _Driver()
        return GpuProbe(tuple(_try_gpu(driver, number) for number in range(driver.num_gpus())), "")
    except NodeUnavailable as error:
        return GpuProbe((), error.message)


def _try_gpu(driver: _Driver, number: int) -> GpuFinding:
    name = f"cuda:{number}"
    try:
        gpu = driver.gpu(number)
        name = f"{name} ({driver.name(gpu)})"
        if not driver.attribute(gpu, _HAS_DMABUF):
            return GpuFinding(
                name, "its driver offers no dmabufs (they require the open kernel modules and Linux 5.12)"
            )
        with driver.memory(gpu) as address:
            fd = driver.dmabuf(address)
            try:
                _register(fd, address)
            finally:
                os.close(fd)
    except TanghuluError as error:
        return GpuFinding(name, error.message)
    return GpuFinding(name, "")


def _register(fd: int, address: int) -> None:
    """Register it; raises NodeUnavailable without an RDMA device, TransferFailed if none takes the memory."""
    found = rdma_verbs.probe()
    if not found.devices:
        raise NodeUnavailable(f"the GPU offers a dmabuf, but no RDMA device can register it: {found.reason}")
    reasons = []
    for info in found.devices:
        device = rdma_verbs.Device(info)
        try:
            device.try_dmabuf(fd, address, _PROBE_BYTES)
            return
        except TransferFailed as error:
            reasons.append(error.message)
        finally:
            device.close()
    raise TransferFailed("; ".join(reasons))


class _Driver:
    """The required calls of the CUDA driver; each raises NodeUnavailable with the driver's own message."""

    def __init__(self) -> None:
        try:
            self._cuda: Any = ctypes.CDLL(_DRIVER)
            self._cuda.cuMemGetHandleForAddressRange  # noqa: B018 - drivers before CUDA 11.7 have none
        except (OSError, AttributeError) as error:
            raise NodeUnavailable(f"no NVIDIA driver that supports dmabufs: {error}") from error
        self._call("cuInit", ctypes.c_uint(0))

    def num_gpus(self) -> int:
        """Return the number of GPUs; raises NodeUnavailable if there are none."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        if count.value == 0:
            raise NodeUnavailable("the NVIDIA driver finds no GPU")
        return count.value

    def gpu(self, number: int) -> ctypes.c_int:
        """Return the driver's handle."""
        gpu = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(gpu), ctypes.c_int(number))
        return gpu

    def name(self, gpu: ctypes.c_int) -> str:
        """Return the GPU's product name."""
        text = ctypes.create_string_buffer(128)
        self._call("cuDeviceGetName", text, ctypes.c_int(len(text)), gpu)
        return text.value.decode(errors="replace")

    def attribute(self, gpu: ctypes.c_int, which: int) -> int:
        """Return one of its attributes."""
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(which), gpu)
        return value.value

    @contextmanager
    def memory(self, gpu: ctypes.c_int) -> Iterator[int]:
        """Allocate _PROBE_BYTES on the GPU."""
        context, address = ctypes.c_void_p(), ctypes.c_uint64()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), gpu)
        try:
            self._call("cuCtxSetCurrent", context)
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(_PROBE_BYTES))
            try:
                yield address.value
            finally:
                self._call("cuMemFree_v2", address)
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", gpu)

    def dmabuf(self, address: int) -> int:
        """Return a descriptor of the memory at ``address``; the caller closes it."""
        fd = ctypes.c_int(-1)
        self._call(
            "cuMemGetHandleForAddressRange", ctypes.byref(fd), ctypes.c_uint64(address), ctypes.c_size_t(_PROBE_BYTES),
            ctypes.c_int(_AS_DMABUF), ctypes.c_ulonglong(0),
        )  # fmt: skip
        return fd.value

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
            raise NodeUnavailable(f"{name}: {(text.value or b'unknown error').decode(errors='replace')} ({code})")


if __name__ == "__main__":
    print(json.dumps(asdict(attempt())))
