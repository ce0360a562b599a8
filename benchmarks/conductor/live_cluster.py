"""Clusters for benchmarks: ours (mock workers) or Dynamo's, as processes, awaited and ended without remains."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tanghulu.cli.children import ChildProcess

BLOCK_TOKENS = 64
KV_TOKEN_BYTES = 16
_READY_S = 90.0


@dataclass
class Served:
    """Where requests go: the frontends' addresses and the model's name."""

    urls: list[str]
    model: str
    children: list[ChildProcess] = field(default_factory=list)


async def _ready(url: str, path: str, ok: Any) -> None:
    """Wait until ``ok`` holds of the answer to GET ``path``."""
    async with httpx.AsyncClient(timeout=2, trust_env=False) as http:
        async with asyncio.timeout(_READY_S):
            while True:
                with contextlib.suppress(httpx.HTTPError, json.JSONDecodeError, KeyError):
                    answer = await http.get(url + path)
                    if answer.status_code == 200 and ok(answer):
                        return
                await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def tanghulu_cluster(
    folder: Path, policy: str, num_blocks: int, num_conductors: int = 1, *flags: str, num_workers: int = 2
) -> AsyncIterator[Served]:
    """A master, mock workers of ``num_blocks`` blocks without a store, and conductors with ``policy``."""
    async with contextlib.AsyncExitStack() as stack:
        served = Served([], "mock")

        async def start(role: str, name: str, *arguments: str) -> ChildProcess:
            base = ["--host", "127.0.0.1", "--port", "0", "--metrics-port", "0"]
            child = ChildProcess(role, name, [*base, *arguments], folder / f"{name}.log", folder / name)
            child.run_dir.mkdir(mode=0o700)
            started: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def on_status(_: str, message: dict[str, Any]) -> None:
                if started.done():
                    return
                if message["event"] == "ready":
                    started.set_result(None)
                elif message["event"] in ("failed", "exited"):
                    started.set_exception(RuntimeError(f"{name}: {message}, see {child.log_path}"))

            await child.spawn(on_status)
            stack.push_async_callback(child.stop, 10.0)
            await asyncio.wait_for(started, _READY_S)
            served.children.append(child)
            return child

        master = (await start("master", "master")).info["address"]
        memory = str(num_blocks * BLOCK_TOKENS * KV_TOKEN_BYTES)
        engine = ["--engine", "mock", "--model", "mock", "--debug", "mock_timing=gpu-8b", "--kv-memory", memory]
        engine += ["--debug", f"mock_kv_token_bytes={KV_TOKEN_BYTES}", "--no-store", "--max-num-batched-tokens", "8192"]
        for number in range(num_workers):
            await start("worker", f"worker-{number}", "--master", master, *engine, *flags)
        for number in range(num_conductors):
            child = await start("conductor", f"conductor-{number}", "--master", master, "--policy", policy)
            served.urls.append(f"http://{child.info['address']}")
        for url in served.urls:
            await _ready(url, "/v1/models", lambda answer: answer.json()["data"])
        yield served


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_model(folder: Path, *, marks_ends: bool = False) -> None:
    """What Dynamo wants of a model: numbers, a byte-level tokenizer like ours, a template.

    Text becomes a token a byte. The other tokens, of a word each, are there for what Dynamo's mocker draws: ids up to
    about 2,000; of those that are no text it streams nothing. ``marks_ends``: the template puts a special token behind
    each message, as those of real models do.
    """
    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġ" + "".join(letters) for letters in itertools.product("abcdefghijklmnop", repeat=3)]
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(alphabet + words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = len(alphabet) + len(words)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": end + 1, "eos_token_id": end}
    config |= shape | {"num_key_value_heads": 2, "max_position_embeddings": 131072, "bos_token_id": end}
    (folder / "config.json").write_text(json.dumps(config))
    behind = "<|end|>" if marks_ends else ""
    template = "{% for m in messages %}{{ m.content }}" + behind + "{% endfor %}"
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


@contextlib.asynccontextmanager
async def dynamo_cluster(
    folder: Path, venv: Path, num_blocks: int, *flags: str, marks_ends: bool = False, num_workers: int = 2
) -> AsyncIterator[Served]:
    """Dynamo's frontend with its KV router and mockers, all defaults but the size of cache and block.

    ``flags`` are the mockers', ``marks_ends`` is of `write_model`.
    """
    write_model(folder / "model", marks_ends=marks_ends)
    own = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(folder / "kv"), "DYN_REQUEST_PLANE": "tcp"}
    own |= {"DYN_EVENT_PLANE": "zmq", "DYN_TCP_RPC_HOST": "127.0.0.1", "HF_HUB_OFFLINE": "1"}
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | own
    port = _free_port()
    plane = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
    commands = [["dynamo.frontend", "--http-port", str(port), "--router-mode", "kv", *plane]]
    mocker = ["dynamo.mocker", "--model-path", str(folder / "model"), "--model-name", "mock", *plane]
    mocker += ["--num-gpu-blocks-override", str(num_blocks), "--block-size", str(BLOCK_TOKENS), *flags]
    commands += [mocker] * num_workers
    processes = []
    try:
        for number, command in enumerate(commands):
            with (folder / f"dynamo-{number}.log").open("wb") as log:
                processes.append(
                    await asyncio.create_subprocess_exec(
                        str(venv / "bin/python"), "-m", *command, env=environment, stdout=log, stderr=log
                    )
                )
        url = f"http://127.0.0.1:{port}"
        await _ready(url, "/v1/models", lambda answer: answer.json()["data"])
        await asyncio.sleep(3)  # it names the model when the first mocker is there
        yield Served([url], "mock")
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in processes:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 8)
            if process.returncode is None:
                process.kill()
                await process.wait()
