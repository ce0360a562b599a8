"""The time that an endpoint picker adds to a request, at a steady rate.

    python -m benchmarks.conductor.endpoint_picks [--model FOLDER] [--rate 100] [--seconds 20]

A picker runs in a process of its own, for 16 endpoints without health checks. This process is the gateway: for each
request it sends header and body, in full duplex, then the head of a response and its body 50 ms later. Sessions of
20 turns grow by 1,200 characters a turn, behind a system prompt of 4,000. Timed is the picker's answer: from before the
header is sent until the pick is here. *probe* is a gRPC health check of the same process, for comparison: what the
machine and gRPC cost by themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks.common import report
from tanghulu.conductor.endpoint_picker.ext_proc import PICKED, SERVICE
from tanghulu.protos import endpoint_picker_pb2 as pb

ENDPOINTS, TURNS, ANSWER_S = 16, 20, 0.05
SYSTEM_CHARACTERS, TURN_CHARACTERS = 4000, 1200
PORTS = (19_402, 19_403, 19_404)
MODES = pb.ProtocolConfiguration(request_body_mode=pb.FULL_DUPLEX_STREAMED, response_body_mode=pb.FULL_DUPLEX_STREAMED)
WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "was", "on", "are", "as", "with", "his", "they")


class Sessions:
    """Bodies of chats in progress; each goes on with its next turn."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._system = {"role": "system", "content": self._text(SYSTEM_CHARACTERS)}
        self._open: list[list[dict[str, str]]] = [[self._system] for _ in range(50)]

    def body(self) -> bytes:
        """The next turn of any session."""
        number = self._chance.randrange(len(self._open))
        session = self._open[number]
        if len(session) > 2 * TURNS:
            session = self._open[number] = [self._system]
        session.append({"role": "user", "content": self._text(TURN_CHARACTERS)})
        body = json.dumps({"model": "m", "messages": session, "stream": True}).encode()
        session.append({"role": "assistant", "content": self._text(TURN_CHARACTERS // 4)})
        return body

    def _text(self, characters: int) -> str:
        return " ".join(self._chance.choices(WORDS, k=characters // 4))


async def request(channel: grpc.aio.Channel, body: bytes) -> float:
    """Seconds until the pick of one request, which then runs to its end."""
    process = channel.stream_stream(
        f"/{SERVICE}/Process", pb.ProcessingRequest.SerializeToString, pb.ProcessingResponse.FromString
    )()
    headers = [
        pb.HeaderValue(key=":path", raw_value=b"/v1/chat/completions"),
        pb.HeaderValue(key="content-length", raw_value=str(len(body)).encode()),
    ]
    began_s = time.perf_counter()
    head = pb.HttpHeaders(headers=pb.HeaderMap(headers=headers))
    await process.write(pb.ProcessingRequest(request_headers=head, protocol_config=MODES))
    for start in range(0, len(body), 16 << 10):
        piece = pb.HttpBody(body=body[start : start + (16 << 10)], end_of_stream=start + (16 << 10) >= len(body))
        await process.write(pb.ProcessingRequest(request_body=piece))
    answer = await process.read()
    seconds = time.perf_counter() - began_s
    assert answer.dynamic_metadata["envoy.lb"][PICKED], answer
    served = answer.dynamic_metadata["envoy.lb"][PICKED].partition(",")[0]
    while not (await process.read()).request_body.response.body_mutation.streamed_response.end_of_stream:
        pass
    message = pb.ProcessingRequest(response_headers=pb.HttpHeaders())
    message.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": served})
    await process.write(message)
    await process.read()
    await asyncio.sleep(ANSWER_S)
    await process.write(pb.ProcessingRequest(response_body=pb.HttpBody(body=b"answer", end_of_stream=True)))
    await process.read()
    await process.done_writing()
    return seconds


async def load(rate: float, seconds: float, seed: int) -> tuple[list[float], list[float]]:
    """Seconds of each pick, and of each probe."""
    sessions, tasks, probes = Sessions(seed), list[asyncio.Task[float]](), list[float]()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{PORTS[0]}") as channel:
        probe = channel.unary_unary("/grpc.health.v1.Health/Check")
        await probe(b"", wait_for_ready=True)
        began_s = time.perf_counter()
        for number in range(int(rate * seconds)):
            body = sessions.body()
            await asyncio.sleep(max(0.0, began_s + number / rate - time.perf_counter()))
            tasks.append(asyncio.create_task(request(channel, body)))
            if number % 10 == 0:
                probed_s = time.perf_counter()
                await probe(b"")
                probes.append(time.perf_counter() - probed_s)
        return await asyncio.gather(*tasks), probes


def row(case: str, samples: list[float]) -> dict[str, Any]:
    """Percentiles in milliseconds."""
    cuts = statistics.quantiles((1e3 * each for each in samples), n=100)
    return {"case": case, "requests": len(samples), "p50_ms": cuts[49], "p90_ms": cuts[89], "p99_ms": cuts[98]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder with a tokenizer; default: prompts are compared as text")
    parser.add_argument("--rate", type=float, default=100, help="requests a second")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    endpoints = ",".join(f"127.0.0.1:{20_000 + i}" for i in range(ENDPOINTS))
    command = [sys.executable, "-m", "tanghulu", "epp", "--endpoints", endpoints, "--health-interval-s", "0"]
    for name, port in zip(("port", "health-port", "metrics-port"), PORTS, strict=True):
        command += [f"--{name}", str(port)]
    if options.model:
        command += ["--model", str(options.model)]
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as picker:
        try:
            picks, probes = asyncio.run(load(options.rate, options.seconds, options.seed))
        finally:
            picker.terminate()
    case = "tokenised" if options.model else "as text"
    rows = [row(case, picks), row("probe", probes)]
    for each in rows:
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in each.items()})
    report.keep(f"endpoint_picks_{case.replace(' ', '_')}", rows, seed=options.seed, rate=options.rate)


if __name__ == "__main__":
    main()
