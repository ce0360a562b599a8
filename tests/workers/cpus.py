"""Kinds of CPUs: what is computed on each can be tested on all, where it is slow and not wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

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

each_cpu = pytest.mark.parametrize("cpu", list(CPUS.values()), ids=list(CPUS))
