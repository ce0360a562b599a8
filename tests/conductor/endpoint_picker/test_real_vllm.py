"""Two real ``vllm serve`` behind a real Envoy: what the picker takes to be cached is what vLLM finds in its cache."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tanghulu.conductor.endpoint_picker.ext_proc import TEST_SERVED
from tanghulu.conductor.routing_service.service import ANYBODY
from tests.conductor.endpoint_picker.envoy import gateway
from tests.conductor.endpoint_picker.rig import picker, until
from tests.engines.vllm.conftest import CACHE, MODEL
from tests.free_ports import free_port

VLLM = CACHE / "vllm" / "bin" / "vllm"
pytestmark = [
    pytest.mark.engine_vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not VLLM.exists(), reason="vLLM's environment is not built: tools/engine_venv.py vllm"),
]
BLOCK_TOKENS = 32
SYSTEM = "You answer questions about the sea, its tides, its currents and its animals, briefly and with care. " * 12


@contextlib.contextmanager
def serving(folder: Path, port: int) -> Iterator[None]:
    source = {"enable_kv_cache_events": True, "publisher": "zmq"}
    source |= {"endpoint": f"tcp://*:{free_port()}", "replay_endpoint": f"tcp://*:{free_port()}"}
    flags = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "smollm2", "--dtype", "float32"]
    flags += ["--enforce-eager", "--max-model-len", "2048", "--block-size", str(BLOCK_TOKENS)]
    flags += ["--enable-prompt-tokens-details", "--kv-events-config", json.dumps(source)]
    variables = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (folder / f"vllm-{port}.log").open("wb") as log:
        process = subprocess.Popen([VLLM, "serve", MODEL, *flags], stdout=log, stderr=log, env=variables)
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        process.kill()
        process.wait()


async def test_turns_find_their_prefix(tmp_path: Path):
    ports = [free_port(), free_port()]
    names = [f"127.0.0.1:{port}" for port in ports]
    options: dict[str, Any] = {"endpoints": ",".join(names), "model": MODEL, "block_tokens": BLOCK_TOKENS}
    options |= {"kv_events": True, "assume_cached_s": 0.0, "health_interval_s": 1.0}
    async with contextlib.AsyncExitStack() as stack:
        for port in ports:
            stack.enter_context(serving(tmp_path, port))
        picking = picker(num_ready=2, within_s=600, conformance_headers=True, **options)
        server = await stack.enter_async_context(picking)
        http = await stack.enter_async_context(gateway(tmp_path, str(server.address), names))
        http.timeout = httpx.Timeout(600)

        async def ask(path: str, **fields: Any) -> tuple[str, int, int, dict[str, Any]]:
            """Who answered, the tokens found in its cache, those that the picker expected there, and the answer."""
            body = json.dumps({"model": "smollm2", "max_tokens": 8, "temperature": 0, **fields}).encode()
            query, _ = await server._ext_proc.prompts.query(path, body, ANYBODY)
            expected = server.service.index.match(query.hashes)
            answer = await http.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 200, answer.text
            served, given = answer.headers[TEST_SERVED], answer.json()
            usage = given["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            return served, cached, expected.get(served, 0) * BLOCK_TOKENS, given

        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Why are there tides?"}]
        first, cached, expected, given = await ask("/v1/chat/completions", messages=chat)
        assert (cached, expected) == (0, 0)
        prompt_tokens = given["usage"]["prompt_tokens"]
        await until(lambda: server.service.index.num_blocks_of(first) >= prompt_tokens // BLOCK_TOKENS)
        chat += [given["choices"][0]["message"], {"role": "user", "content": "And how high are they?"}]
        chat = [{"role": each["role"], "content": each["content"]} for each in chat]
        for _ in range(2):
            served, cached, expected, given = await ask("/v1/chat/completions", messages=chat)
            assert served == first
            assert expected >= prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
            assert expected - BLOCK_TOKENS <= cached <= expected, "vLLM computes the last token in any case"
            blocks = given["usage"]["prompt_tokens"] // BLOCK_TOKENS
            await until(lambda blocks=blocks: server.service.index.num_blocks_of(first) >= blocks)
        served, _, expected, _ = await ask("/v1/messages", system=SYSTEM, messages=chat[1:])
        assert served == first
        assert expected >= prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS, "the same prompt in Anthropic's form"
        text = "Once upon a time there was a small boat on a wide sea. " * 20
        first, cached, expected, _ = await ask("/v1/completions", prompt=text)
        assert (cached, expected) == (0, 0)
