"""A cluster with a gRPC port, and what a program would do at it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from tanghulu.protos import inference_pb2 as pb
from tanghulu.protos import inference_pb2_grpc
from tanghulu.types import Role
from tests.conductor.cluster import Cluster, running_cluster
from tests.conductor.fake_worker import FakeWorker


@dataclass
class Answer:
    """One sequence's replies, put together."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    tool_calls: list[tuple[str, str]] = field(default_factory=list)
    logprobs: list[pb.PositionLogprobs] = field(default_factory=list)
    prompt: pb.PromptPiece = field(default_factory=pb.PromptPiece)
    num_pieces: int = 0
    last: pb.GenerateReply = field(default_factory=pb.GenerateReply)

    def add(self, reply: pb.GenerateReply) -> None:
        assert not self.last.finish_reason, "nothing comes behind the last reply"
        if reply.HasField("prompt"):
            assert not self.tokens, "the prompt comes first"
            self.prompt.MergeFrom(pb.PromptPiece(tokens=reply.prompt.tokens, logprobs=reply.prompt.logprobs))
            self.prompt.text += reply.prompt.text
            self.num_pieces += 1
        self.tokens += reply.tokens
        self.text += reply.text
        self.reasoning += reply.reasoning
        self.logprobs += reply.logprobs
        for call in reply.tool_calls:
            if call.name:
                self.tool_calls.append((call.name, ""))
            name, arguments = self.tool_calls[call.index]
            self.tool_calls[call.index] = (name, arguments + call.arguments)
        self.last = reply


@contextlib.asynccontextmanager
async def grpc_cluster(
    run_dir: Path, channel_options: list[tuple[str, int]] | None = None, **options: Any
) -> AsyncIterator[tuple[Cluster, Any]]:
    """A running cluster and a stub of its gRPC API."""
    async with running_cluster(run_dir, grpc_port=0, **options) as cluster:
        address = str(cluster.conductor.inference.address)
        async with grpc.aio.insecure_channel(address, options=channel_options) as channel:
            yield cluster, inference_pb2_grpc.InferenceStub(channel)


async def add_worker(cluster: Cluster, name: str, script: str, **card: Any) -> FakeWorker:
    """A registered and connected worker that says ``script``; ``card``: fields of its card."""
    worker = FakeWorker(name, Role.BOTH, cluster.run_dir, script)
    worker.card = card
    worker.model = card.get("model", worker.model)
    worker.fingerprint = card.get("fingerprint", worker.fingerprint)
    cluster.workers.append(worker)
    await worker.start(cluster.discovery)
    await cluster.until(lambda: worker.id in cluster.registry.workers and cluster.registry.workers[worker.id].usable)
    return worker


def text_request(text: str = "x", **sampling: Any) -> pb.GenerateRequest:
    """A request to go on behind ``text``; 4 tokens, unless ``sampling`` says otherwise."""
    return pb.GenerateRequest(text=text, sampling=pb.SamplingOptions(**{"max_tokens": 4, **sampling}))


async def whole(call: Any) -> list[Answer]:
    """The sequences of a call, read to its end."""
    answers: dict[int, Answer] = {}
    async for reply in call:
        answers.setdefault(reply.index, Answer()).add(reply)
    return [answers[index] for index in sorted(answers)]


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call ends with."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call was answered")


def trailing(error: grpc.aio.AioRpcError) -> dict[str, str]:
    """The trailing metadata of ``error``."""
    return {name: value for name, value in error.trailing_metadata() or () if isinstance(value, str)}
