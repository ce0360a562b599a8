"""A worker's computing device, its abilities and memory, as reported by torch and the system.

Without a GPU, the only use of CUDA here is to check for one.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tanghulu.errors import ConfigError
from tanghulu.workers.compute.memory_plan import available_bytes

CPU = torch.device("cpu")
#: Lowest compute capability at which a GPU multiplies bfloat16 natively (Ampere).
_BFLOAT16_FROM = (8, 0)
_NAME = re.compile(r"cuda(?::(\d+))?")
#: Instructions that multiply bfloat16, by the kernel's names.
_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """Criteria for the arithmetic on a CPU: its instructions, and the libraries of torch that run on it.

    Float32 works on every CPU whose torch has the library. oneDNN packs bfloat16 only with AVX512, or with AVX2's
    conversions, and emulates the products of those that have no instructions for them, which is slow.
    """

    #: It multiplies bfloat16 in hardware (AVX512-BF16, AMX).
    native_bfloat16: bool
    #: FBGEMM, whose products widen float16 weights in registers; it needs AVX2.
    has_fbgemm: bool
    #: oneDNN, whose products take weights packed in its order.
    has_onednn: bool

    @classmethod
    def of(cls, flags: Collection[str]) -> CpuFeatures:
        """Return those of a CPU with the instructions ``flags``, named as in /proc/cpuinfo, under this torch."""
        return cls(
            native_bfloat16=not _BFLOAT16_FLAGS.isdisjoint(flags),
            has_fbgemm="fbgemm" in torch.backends.quantized.supported_engines,
            has_onednn=bool(torch.backends.mkldnn.is_available()),  # type: ignore[no-untyped-call]
        )


@cache
def this_cpu() -> CpuFeatures:
    """Return the features of this process's CPU."""
    if platform.system() != "Linux":
        return CpuFeatures.of(())
    lines = _CPU_INFO.read_text(encoding="ascii", errors="replace").splitlines()
    return CpuFeatures.of(next((line.split() for line in lines if line.startswith("flags")), []))


def pick_device(name: str, turn: int = 0, num_ranks: int = 1) -> torch.device:
    """Return the device ``name``: ``cpu``, ``cuda``, ``cuda:N``, or ``auto``: as ``cuda`` if torch sees a GPU.

    ``cuda`` is the first of ``num_ranks`` GPUs: the first ones of the host for the worker with ``turn`` 0, the next for
    1, and past the last the first again. Raises ConfigError that names what torch sees instead.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return CPU
    named = _NAME.fullmatch("cuda" if name == "auto" else name)
    if named is None:
        raise ConfigError(f"--device {name!r} is unknown; choose auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        built = "built without CUDA" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
        raise ConfigError(f"--device {name}: torch {torch.__version__}, {built}, sees no GPU here; use --device cpu")
    count = torch.cuda.device_count()
    index = int(named[1]) if named[1] else turn % max(1, count // num_ranks) * num_ranks
    if index >= count:
        raise ConfigError(f"--device {name}: this host has {count} GPUs, cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", index)


def num_sharing(name: str, turn: int, num_workers: int, num_ranks: int) -> int:
    """Return how many of a host's ``num_workers`` share the GPU that `pick_device` gives to the one with ``turn``."""
    if ":" in name:
        return num_workers
    places = max(1, torch.cuda.device_count() // num_ranks)
    return max(1, len(range(turn % places, num_workers, places)))


def device_of_rank(first: torch.device, rank: int) -> torch.device:
    """Return the device of tensor-parallel rank ``rank`` if rank 0 has ``first``; raises ConfigError without one."""
    if first.type != "cuda":
        return first
    index, count = first.index + rank, torch.cuda.device_count()
    if index >= count:
        raise ConfigError(f"tensor-parallel rank {rank} needs cuda:{index}; this host has {count} GPUs; lower --tp")
    return torch.device("cuda", index)


def describe_device(device: torch.device) -> str:
    """Describe ``device`` for the log: ``cpu``, or the GPU's name and capability."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device} ({torch.cuda.get_device_name(device)}, capability {major}.{minor})"


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether the GPU multiplies bfloat16 natively."""
    return torch.cuda.get_device_capability(device) >= _BFLOAT16_FROM


def free_bytes(device: torch.device) -> int | None:
    """Return the number of bytes that could be allocated now; None if the system does not report it."""
    if device.type != "cuda":
        return available_bytes()
    return int(torch.cuda.mem_get_info(device)[0])


def total_bytes(device: torch.device) -> int:
    """Return the size of the GPU's memory."""
    return int(torch.cuda.mem_get_info(device)[1])


def reserve(num_bytes: int, device: torch.device) -> None:
    """Have torch take ``num_bytes`` of the GPU for this process, to allocate from; raises ConfigError if it cannot.

    Without it two workers that start at once plan with the same free bytes, and one fails in the middle of its load.
    """
    try:
        torch.empty(num_bytes, dtype=torch.uint8, device=device)  # torch's allocator keeps what is freed
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{device} had room for this worker, but another process took it meanwhile: {str(error).splitlines()[0]}; "
            "choose another --device, or lower --kv-memory"
        ) from error


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all work of the current thread's stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def upload(array: Any, device: torch.device) -> torch.Tensor:
    """Copy the numpy array to ``device``, without waiting for the device's earlier work.

    The copy is made from pinned memory, which torch's allocator keeps until it has ended.
    """
    return staged_for(array, device).to(device, non_blocking=True)


def staged_for(array: Any, device: torch.device) -> torch.Tensor:
    """Return the numpy array as a tensor from which copies to ``device`` need not wait: pinned for a GPU."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor
