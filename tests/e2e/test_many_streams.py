"""Hundreds of streams of clients that come, hang up and dawdle, over HTTP and gRPC: all accounted for, nothing kept."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from tanghulu.protos import inference_pb2 as pb
from tanghulu.protos import inference_pb2_grpc
from tests.e2e.cluster import LiveCluster, eventually, running_cluster
from tests.free_ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.by_hand, pytest.mark.e2e]

NUM_STREAMS = 256
SECONDS = 300.0
#: Until caches are full and everything has been made that is made once.
WARM_S = 90.0
#: Of each worker's cache and of the node: full within the first minute, and the tables of what was evicted soon after.
CACHE = "8MiB"
NUM_PREFIXES = 40
SEED = 14
#: Memory may grow by so much from then on, which is what allocators keep.
MOST_GROWTH, SLACK_BYTES = 1.1, 16 << 20
CONDUCTOR_S_REQUESTS = "tanghulu_conductor_requests_total"


class Clients:
    """``NUM_STREAMS`` clients; each begins its next request when its last one has ended, one way or another."""

    def __init__(self, port: int, stub: Any, model: str) -> None:
        self._port, self._stub, self._model = port, stub, model
        self._numbers = itertools.count()
        self.counts: Counter[str] = Counter()
        self.ending = False

    async def run(self) -> None:
        while not self.ending:
            await self._one(next(self._numbers))

    async def _one(self, number: int) -> None:
        draw = random.Random(SEED * 1_000_000 + number)
        prefix = random.Random(draw.randrange(NUM_PREFIXES)).choices("abcdefgh ", k=512)
        prompt = "".join([*prefix, *draw.choices("abcdefgh ", k=64)])
        num_tokens, kind = draw.randint(16, 256), draw.choice(("whole", "whole", "leaves", "dawdles"))
        ask = self._over_grpc if draw.random() < 0.25 else self._over_http
        await ask(prompt, num_tokens, kind, draw)
        self.counts["begun"] += 1
        self.counts["left" if kind == "leaves" else "answered"] += 1
        self.counts[f"{ask.__name__.strip('_')} {kind}"] += 1

    async def _over_http(self, prompt: str, num_tokens: int, kind: str, draw: random.Random) -> None:
        body = {"model": self._model, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        connection = socket.socket()
        if kind == "dawdles":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self._port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=4096)
        try:
            writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in answer.splitlines()[0], answer
            if kind == "leaves":
                await reader.read(draw.randint(1, 4096))
                return
            answer = b""
            while piece := await reader.read(1024):
                answer += piece
                if kind == "dawdles":
                    await asyncio.sleep(0.05)
            assert answer.count(b'"finish_reason":"length"') == 1, answer[-500:]
            assert b"data: [DONE]" in answer
        finally:
            writer.transport.abort()

    async def _over_grpc(self, prompt: str, num_tokens: int, kind: str, draw: random.Random) -> None:
        sampling = pb.SamplingOptions(max_tokens=num_tokens, ignore_eos=True)
        call = self._stub.Generate(pb.GenerateRequest(text=prompt, model=self._model, sampling=sampling))
        count, most, last = 0, draw.randint(1, 32), pb.GenerateReply()
        async for last in call:
            count += len(last.tokens)
            if kind == "leaves" and count >= most:
                call.cancel()
                return
            if kind == "dawdles":
                await asyncio.sleep(0.02)
        if kind == "leaves":  # it was over before
            return
        assert (last.finish_reason, count) == ("length", num_tokens)


def outcomes(live: LiveCluster) -> dict[str, float]:
    return {each: live.metric("conductor", CONDUCTOR_S_REQUESTS, outcome=each) for each in ("length", "abort")}


def private_bytes(live: LiveCluster) -> dict[str, int]:
    """What each process has for itself: caches and segments, which are shared, are as large as they were made."""
    infos = {entry["name"]: psutil.Process(entry["pid"]).memory_info() for entry in live.entries()}
    return {name: info.rss - info.shared for name, info in infos.items()}


def nothing_is_held(live: LiveCluster) -> bool:
    gauges = ("requests_in_flight", "requests_queued")
    held = [live.metric("conductor", f"tanghulu_conductor_{name}") for name in gauges]
    names = ("tanghulu_worker_blocks_in_use", "tanghulu_worker_exports")
    return not any(held) and not any(live.metric(role, name) for role in ("prefill", "decode") for name in names)


async def _load(live: LiveCluster, grpc_port: int) -> tuple[Counter[str], list[dict[str, int]]]:
    """What the clients counted, and the memory of each process, first when it is warm and last at the end."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}", options=[("grpc.http2.bdp_probe", 0)]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        clients = Clients(int(live.url.rpartition(":")[2]), stub, "mock")
        tasks = [asyncio.create_task(clients.run()) for _ in range(NUM_STREAMS)]
        memory, until_s = [], time.monotonic() + SECONDS
        try:
            await asyncio.sleep(WARM_S)
            while time.monotonic() < until_s:
                memory.append(private_bytes(live))
                await asyncio.wait(tasks, timeout=15, return_when=asyncio.FIRST_EXCEPTION)
                assert not any(task.done() for task in tasks), await asyncio.gather(*tasks)
            clients.ending = True
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return clients.counts, [*memory, private_bytes(live)]


@pytest.mark.timeout(1200)
def test_all_requests_are_accounted_for_and_memory_is_flat(tmp_path: Path) -> None:
    grpc_port = free_port()
    flags = (
        "--engine",
        "mock",
        "--model",
        "mock",
        "--debug",
        "mock_speedup=8",
        "--node-memory",
        CACHE,
        "--grpc-port",
        str(grpc_port),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANGHULU_KV_MEMORY", CACHE)
        with running_cluster(tmp_path, *flags) as live:
            counts, memory = asyncio.run(_load(live, grpc_port))
            eventually(lambda: nothing_is_held(live), what="all requests have ended and all blocks are given back")
            ended = outcomes(live)
            print("\nrequests:", dict(counts), "outcomes:", ended)
            for name in memory[0]:
                print(name, "MiB:", [round(each[name] / (1 << 20), 1) for each in memory])
            assert live.metric("conductor", CONDUCTOR_S_REQUESTS) == sum(ended.values()) == counts["begun"]
            assert counts["answered"] <= ended["length"]
            assert ended["abort"] <= counts["left"]
            for name, warm in memory[0].items():
                assert memory[-1][name] <= MOST_GROWTH * warm + SLACK_BYTES, name
