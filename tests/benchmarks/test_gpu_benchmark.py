"""The benchmark for GPUs runs to its end on a CPU, whose figures it does not keep."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.workers import gpu
from tests.workers.tiny import BLOCK, engine, request, write_tiny

ROOT = Path(__file__).parents[2]
SIZES = "--batches 1,2 --context 20 --prefill 64 --long 256 --budget 64 --block-tokens 16 --load-bytes 200000"


def test_an_engine_that_fails_ends_it_at_once(tmp_path: Path):
    """And not when a step is 600 s late: that is all the time that a borrowed machine has."""

    def fail(batch: object, cache: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    model = write_tiny(tmp_path).load()
    model.forward = fail  # type: ignore[method-assign]
    served = gpu.Served(engine(model), SimpleNamespace(close=lambda: None))
    with served.running(), pytest.raises(SystemExit, match="illegal memory access"):
        served.ttft(request("one", range(2, 2 + BLOCK)))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-4), ("bfloat16", 0.03)])
def test_it_runs_on_a_cpu(dtype: str, error: float):
    command = [sys.executable, "-m", "benchmarks.workers.gpu", "--device", "cpu", "--model", "tiny", *SIZES.split()]
    command += ["--ring-bytes", "40000", "--rounds", "1", "--dtype", dtype]
    kept = ROOT / "benchmarks/results/gpu.json"
    before = kept.read_bytes() if kept.exists() else None
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert ran.returncode == 0, ran.stderr
    rows = [ast.literal_eval(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert [row["what"] for row in rows if row["what"] != "ttft"] == [
        "check", "decode", "decode", "prefill",
        "load", "load, ring alone", "load, plain pinned copy", "save", "save, ring alone", "save, plain pinned copy",
    ]  # fmt: skip
    assert rows[0]["relative_error"] < error
    assert [row["kind"] for row in rows if row["what"] == "ttft"] == ["cold", "90 % in the store", "90 % in the cache"]
    assert "are not kept" in ran.stdout
    assert (kept.read_bytes() if kept.exists() else None) == before
