"""The conductor and SGLang 0.5.23's own prefix cache, publisher of events and sampling parameters.

The engine does not run without its kernels, so the HTTP server is a fake: what it gets goes into the real cache.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.conductor.engines.conftest import Front, folder, fronts  # noqa: F401 - fixtures
from tests.conductor.engines.fake_sglang import FakeSglang
from tests.conductor.engines.test_cache import known_blocks
from tests.free_ports import free_port

ROOT = Path(__file__).parents[3]
PYTHON = Path.home() / ".cache" / "tanghulu" / "engines" / "sglang" / "bin" / "python"
pytestmark = [
    pytest.mark.engine_sglang,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="SGLang's environment is not built: tools/engine_venv.py sglang"),
]
PROMPT, OTHER = "the rain in Spain stays mainly in the plain " * 3, "an answer of another kind altogether " * 3
WITHIN_S = 120.0


class Radix:
    """The process with SGLang's cache, and the addresses that its server states."""

    def __init__(self, process: asyncio.subprocess.Process, ports: tuple[int, int]) -> None:
        self._process = process
        hosts = {"publisher": "zmq", "endpoint_host": "*", "topic": "", "dp_size": 1}
        self.described = {**hosts, "endpoint_port_base": ports[0], "replay_endpoint_port_base": ports[1]}

    @classmethod
    async def start(cls) -> Radix:
        ports = free_port(), free_port()
        process = await asyncio.create_subprocess_exec(
            *(PYTHON, Path(__file__).with_name("radix.py"), *map(str, ports)),
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "ignore"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        made = cls(process, ports)
        await made._until("ready")
        return made

    async def __call__(self, name: str, *arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")
        await self._until("done")

    async def _until(self, answer: str) -> None:
        assert self._process.stdout is not None
        while (line := await self._process.stdout.readline()).strip() != answer.encode():
            assert line, "SGLang's process ended"

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


async def until_known(front: Front, prompt: str, num_blocks: int, **fields: Any) -> None:
    async with asyncio.timeout(WITHIN_S):
        while await known_blocks(front, front.servers[0], prompt) != num_blocks:  # noqa: ASYNC110 - no hook for tests
            await asyncio.sleep(0.02)


async def test_events_and_parameters_of_the_real_classes(fronts, folder):  # noqa: F811 - fixtures
    pytest.importorskip("zmq")
    radix = await Radix.start()
    server = FakeSglang(folder, kv_events=radix.described)
    try:
        async with fronts(servers=[server]) as front:
            await front.up()
            for prompt in (PROMPT, OTHER):
                await front.complete(prompt, seed=7, stop=["xyz"], frequency_penalty=0.5, logit_bias={"5": -1})
                sent = server.requests[-1]
                await radix("sample", sent["sampling_params"])
                await radix("insert", sent["input_ids"], sent.get("cache_salt", ""))
                await until_known(front, prompt, len(sent["input_ids"]) // 8)
            num_other = len(sent["input_ids"]) // 8
            await radix("evict", 1)  # drops the least recently used leaf: all of the first prompt
            await until_known(front, PROMPT, 0)
            await until_known(front, OTHER, num_other)
            await radix("insert", sent["input_ids"], "somebody else's")  # no prefix of ours
            await until_known(front, OTHER, num_other)
            await radix("flush")
            await until_known(front, OTHER, 0)
    finally:
        await radix.close()
