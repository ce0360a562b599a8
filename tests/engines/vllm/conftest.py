"""vLLM's environment, and engines in it: skipped where ``tools/engine_venv.py vllm`` was not run."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.store.cluster import Cluster

ROOT = Path(__file__).parents[3]
CACHE = Path.home() / ".cache" / "tanghulu" / "engines"
PYTHON = CACHE / "vllm" / "bin" / "python"
MODEL = CACHE / "smollm2"
DEADLINE_S = 900


class Vllm:
    """Runs programs in vLLM's environment, with this tree's tanghulu on their path."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "vllm.log"

    def run(self, program: str | Path, given: Any) -> list[Any]:
        """The lines of JSON that the program says to ``given``, which it reads from its standard input."""
        variables = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
        }
        with self._log.open("ab") as log:
            done = subprocess.run(
                [PYTHON, program],
                input=json.dumps(given),
                env=variables,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
        assert done.returncode == 0, self.log_text()[-5000:]
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]

    def log_text(self) -> str:
        return self._log.read_text()


@pytest.fixture
def vllm(tmp_path: Path) -> Vllm:
    if not (PYTHON.exists() and MODEL.exists()):
        pytest.skip("extra: vLLM's environment is missing; tools/engine_venv.py vllm builds it")
    return Vllm(tmp_path)


@pytest.fixture
def store() -> Iterator[Cluster]:
    with Cluster(1, "2GiB", checked=False) as cluster:
        yield cluster
