"""vLLM's environment, and engines in it: skipped where ``tools/engine_venv.py vllm`` was not run."""

from __future__ import annotations

import contextlib
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
        with self._log.open("ab") as log:
            done = subprocess.run(
                [PYTHON, program],
                input=json.dumps(given),
                env=self._variables(),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
        assert done.returncode == 0, self.log_text()[-5000:]
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]

    @contextlib.contextmanager
    def running(self, program: str | Path, given: Any) -> Iterator[Conversation]:
        """The program, asked line by line; at the end its input is closed, and it has to end well."""
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [PYTHON, program],
                env=self._variables(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            conversation = Conversation(process, self)
            conversation.say(given)
            yield conversation
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(DEADLINE_S) == 0, self.log_text()[-5000:]
        finally:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()

    @staticmethod
    def _variables() -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            # Its processes would write between a program's lines, and within them.
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        }

    def log_text(self) -> str:
        return self._log.read_text()


class Conversation:
    """A running program: lines of JSON go in and come out."""

    def __init__(self, process: subprocess.Popen[str], vllm: Vllm) -> None:
        self._process, self._vllm = process, vllm

    def say(self, given: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(given) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """The next line of JSON."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError(self._vllm.log_text()[-5000:])

    def ask(self, **given: Any) -> Any:
        self.say(given)
        return self.hear()


@pytest.fixture
def vllm(tmp_path: Path) -> Vllm:
    if not (PYTHON.exists() and MODEL.exists()):
        pytest.skip("extra: vLLM's environment is missing; tools/engine_venv.py vllm builds it")
    return Vllm(tmp_path)


@pytest.fixture
def store() -> Iterator[Cluster]:
    with Cluster(1, "2GiB", checked=False) as cluster:
        yield cluster
