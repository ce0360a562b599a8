"""Kinds of CPUs: what is computed on each can be tested on all, where it is slow and not wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tanghulu.workers.compute.device import CpuFeatures

_AVX2 = "sse4_2 fma f16c avx avx2"
_AVX512 = f"{_AVX2} avx512f avx512dq avx512cd avx512bw avx512vl avx512_vnni"
#: Instructions of CPUs that are sold, and of what runs on all of them, by the names in /proc/cpuinfo.
FLAGS = {
    "sse2": "fpu sse sse2",
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": f"{_AVX512} avx512_bf16",
    "amx": f"{_AVX512} avx512_bf16 amx_bf16 amx_tile amx_int8",
}
#: What tanghulu makes of them with the libraries that torch has here; FBGEMM would refuse to run on the first.
CPUS = {name: CpuFeatures.of(flags.split()) for name, flags in FLAGS.items()}
CPUS["sse2"] = replace(CPUS["sse2"], has_fbgemm=False)
CPUS["no-libraries"] = CpuFeatures(native_bfloat16=False, has_fbgemm=False, has_onednn=False)

#: torch packs bfloat16 for oneDNN only on CPUs with AVX512, or with AVX2's conversions.
PACKS_BFLOAT16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="hardware: oneDNN packs no bfloat16 on this CPU"
)


def on_cpu(name: str, *values: Any) -> Any:
    """Return the parameters of a test that computes as on the CPU of this name, where this one can."""
    return pytest.param(*values, marks=PACKS_BFLOAT16 if CPUS[name].native_bfloat16 else ())


each_cpu = pytest.mark.parametrize("cpu", [on_cpu(name, cpu) for name, cpu in CPUS.items()], ids=list(CPUS))
